"""Every way to spoil a schedule that we know of is found, by the rule that it breaks.

A mutation is a function that changes rows in place. It is named, and tried on each base that it can
be done to; the name of the one that is missed is that of the test that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tests.unit.bases import BASES, MICROBATCHES, SPLIT, V
from zero_bubble.check import Rule, Violation, bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import simulate

type Rows = list[list[Pass]]


def rules(found: list[Violation]) -> set[Rule]:
    return {one.rule for one in found}


def mutated(schedule: Schedule, mutate: Callable[[Rows], None]) -> Schedule:
    rows = [list(row) for row in schedule.passes]
    mutate(rows)
    changed = replace(schedule, passes=tuple(map(tuple, rows)))
    assert changed != schedule
    return changed


def index_of(row: list[Pass], kinds: str, microbatch: int = 0) -> int:
    """Where the first pass of these kinds and microbatch is."""
    return next(
        index
        for index, one in enumerate(row)
        if one.kind in kinds.split() and one.microbatch == microbatch
    )


def swap(row: list[Pass], first: int, second: int) -> None:
    row[first], row[second] = row[second], row[first]


def backward_before_forward(rows: Rows) -> None:
    swap(rows[1], index_of(rows[1], "F"), index_of(rows[1], "B BW"))


def w_before_b(rows: Rows) -> None:
    b = index_of(rows[1], "B", 2)
    chunk = rows[1][b].chunk
    swap(rows[1], b, rows[1].index(Pass(Kind.W, 2, chunk)))


def drop(kinds: str) -> Callable[[Rows], None]:
    return lambda rows: rows[1].__delitem__(index_of(rows[1], kinds, 3))


def double(kinds: str) -> Callable[[Rows], None]:
    def mutate(rows: Rows) -> None:
        index = index_of(rows[1], kinds, 3)
        rows[1].insert(index, rows[1][index])

    return mutate


def move_to_another_stage(rows: Rows) -> None:
    rows[2].append(rows[1].pop(index_of(rows[1], "W BW", 3)))


def forward_becomes(change: Callable[[Pass], Pass]) -> Callable[[Rows], None]:
    def mutate(rows: Rows) -> None:
        # The last one, so that the pass it becomes has its other passes behind it.
        index = max(at for at, one in enumerate(rows[1]) if one.kind is Kind.F)
        rows[1][index] = change(rows[1][index])

    return mutate


def split_beside_fused(rows: Rows) -> None:
    index = index_of(rows[1], "B BW", 3)
    one = rows[1][index]
    rows[1][index] = replace(one, kind=Kind.B if one.kind is Kind.BW else Kind.BW)


def a_forward_overtakes_what_it_waits_for(rows: Rows) -> None:
    rows[-1].insert(0, rows[-1].pop(index_of(rows[-1], "F", MICROBATCHES - 1)))


def microbatches_change_places_on_the_last_stage(rows: Rows) -> None:
    other = {0: MICROBATCHES - 1, MICROBATCHES - 1: 0}
    rows[-1][:] = [
        replace(one, microbatch=other.get(one.microbatch, one.microbatch)) for one in rows[-1]
    ]


SCHEDULE_MUTATIONS: Mapping[str, tuple[Rule, tuple[str, ...], Callable[[Rows], None]]] = {
    "backward before its forward": (Rule.ORDER, tuple(BASES), backward_before_forward),
    "W before its B": (Rule.ORDER, SPLIT, w_before_b),
    "F dropped": (Rule.COUNT, tuple(BASES), drop("F")),
    "backward dropped": (Rule.COUNT, tuple(BASES), drop("B BW")),
    "W dropped": (Rule.COUNT, SPLIT, drop("W")),
    "F doubled": (Rule.COUNT, tuple(BASES), double("F")),
    "backward doubled": (Rule.COUNT, tuple(BASES), double("B BW")),
    "W doubled": (Rule.COUNT, SPLIT, double("W")),
    "moved to another stage": (Rule.COUNT, tuple(BASES), move_to_another_stage),
    "another microbatch": (
        Rule.COUNT,
        tuple(BASES),
        forward_becomes(lambda one: replace(one, microbatch=0)),
    ),
    "another chunk": (Rule.COUNT, tuple(V), forward_becomes(lambda one: replace(one, chunk=0))),
    "no such chunk": (Rule.RANGE, tuple(BASES), forward_becomes(lambda one: replace(one, chunk=2))),
    "no such chunk, below 0": (
        Rule.RANGE,
        tuple(BASES),
        forward_becomes(lambda one: replace(one, chunk=-1)),
    ),
    "no such microbatch": (
        Rule.RANGE,
        tuple(BASES),
        forward_becomes(lambda one: replace(one, microbatch=MICROBATCHES)),
    ),
    "no such microbatch, below 0": (
        Rule.RANGE,
        tuple(BASES),
        forward_becomes(lambda one: replace(one, microbatch=-1)),
    ),
    "split and fused": (Rule.COUNT, tuple(BASES), split_beside_fused),
    "F overtakes what it waits for": (
        Rule.DEADLOCK,
        tuple(BASES),
        a_forward_overtakes_what_it_waits_for,
    ),
    "microbatches change places on a stage": (
        Rule.DEADLOCK,
        tuple(BASES),
        microbatches_change_places_on_the_last_stage,
    ),
}


@pytest.mark.parametrize("base", list(BASES))
def test_the_bases_are_legal(base: str) -> None:
    assert check(BASES[base]) == []
    assert bit_identical_order(BASES[base]) == []
    for forward_only in (False, True):
        assert check_program(lower(BASES[base], forward_only=forward_only)) == []


@pytest.mark.parametrize(
    ("name", "base"),
    [(name, base) for name, (_, bases, _) in SCHEDULE_MUTATIONS.items() for base in bases],
)
def test_a_mutated_schedule(name: str, base: str) -> None:
    rule, _, mutate = SCHEDULE_MUTATIONS[name]
    assert rules(check(mutated(BASES[base], mutate))) == {rule}


@pytest.mark.parametrize("base", list(BASES))
def test_an_early_forward_exceeds_the_memory(base: str) -> None:
    schedule = BASES[base]
    costs = Costs.uniform(schedule.placement, 1, 1, 1, m_b=1, m_w=0.3)
    limits = simulate(schedule, costs).peak_memory
    assert check(schedule, costs=costs, memory_limit=limits) == []

    def mutate(rows: Rows) -> None:
        # To the front, where stage 0 has only its warm-up: it now holds one more at its peak.
        rows[0].insert(0, rows[0].pop(index_of(rows[0], "F", MICROBATCHES - 1)))

    (found,) = check(mutated(schedule, mutate), costs=costs, memory_limit=limits)
    assert (found.rule, found.stage) == (Rule.MEMORY, 0)


@pytest.mark.parametrize("base", list(BASES))
def test_backwards_out_of_order_are_legal_but_not_bit_identical(base: str) -> None:
    def mutate(rows: Rows) -> None:
        # The last two of chunk 0: nothing waits for what comes after them.
        other = {MICROBATCHES - 2: MICROBATCHES - 1, MICROBATCHES - 1: MICROBATCHES - 2}
        rows[0][:] = [
            one
            if one.kind is Kind.F or one.chunk
            else replace(one, microbatch=other.get(one.microbatch, one.microbatch))
            for one in rows[0]
        ]

    changed = mutated(BASES[base], mutate)
    assert check(changed) == []
    assert check_program(lower(changed)) == []
    found = bit_identical_order(changed)
    assert rules(found) == {Rule.BIT_IDENTICAL}
    assert {one.stage for one in found} == {0}


@pytest.mark.parametrize("base", SPLIT)
def test_one_fused_backward_among_split_ones_is_legal(base: str) -> None:
    def mutate(rows: Rows) -> None:
        split_beside_fused(rows)
        (one,) = (one for one in rows[1] if one.kind is Kind.BW)
        rows[1].remove(replace(one, kind=Kind.W))

    changed = mutated(BASES[base], mutate)
    assert check(changed) == []
    assert check_program(lower(changed)) == []
