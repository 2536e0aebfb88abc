"""Every way to spoil a program that we know of is found, by the rules that it breaks.

As with schedules, the name of the mutation that is missed is that of the test that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.bases import BASES, MICROBATCHES, V
from tests.unit.orders import random_order
from zero_bubble.check import Rule
from zero_bubble.check_program import check_program
from zero_bubble.lower import lower
from zero_bubble.placement import interleaved, v_shape
from zero_bubble.program import (
    Channel,
    Finalize,
    Flow,
    HandOver,
    Instruction,
    Program,
    Receive,
    Run,
    Send,
)
from zero_bubble.schedule import Kind, Pass

type Rows = list[list[Instruction]]
type Mutation = Callable[[Rows], None]
type Mutations = dict[str, tuple[set[Rule], Mutation]]
"""Name, what is broken, how."""

PROGRAMS = {name: lower(schedule) for name, schedule in BASES.items()}
FORWARD_ONLY = {
    f"{name} forward": lower(schedule, forward_only=True) for name, schedule in BASES.items()
}
BACK = 2
"""The stage of the V's turn, and the last of a linear placement."""


def rules_of(program: Program, mutate: Mutation) -> set[Rule]:
    rows = [list(row) for row in program.instructions]
    mutate(rows)
    changed = replace(program, instructions=tuple(map(tuple, rows)))
    assert changed != program
    return {one.rule for one in check_program(changed)}


def places(row: list[Instruction], kind: type, flow: Flow = Flow.FORWARD) -> list[int]:
    """Where a row has Sends or Receives of chunk 0's messages in a flow."""
    return [
        index
        for index, one in enumerate(row)
        if isinstance(one, kind)
        and isinstance(one, Send | Receive)
        and (one.channel.flow, one.chunk) == (flow, 0)
    ]


def run_of(row: list[Instruction], microbatch: int, chunk: int = 0) -> int:
    """Where the F of a microbatch is."""
    return row.index(Run(Pass(Kind.F, microbatch, chunk)))


def drop(stage: int, kind: type) -> Mutation:
    return lambda rows: rows[stage].__delitem__(places(rows[stage], kind)[3])


def double(stage: int, kind: type) -> Mutation:
    def mutate(rows: Rows) -> None:
        index = places(rows[stage], kind)[3]
        rows[stage].insert(index, rows[stage][index])

    return mutate


def sends_in_another_order(rows: Rows) -> None:
    first, second, *_ = places(rows[0], Send)
    rows[0].insert(second, rows[0].pop(first))


def receives_in_another_order(rows: Rows) -> None:
    first, second, *_ = places(rows[1], Receive)
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]


def receive_after_its_run(rows: Rows) -> None:
    # The last one, so that the order of the channel stays.
    row = rows[1]
    last = places(row, Receive)[-1]
    row.insert(run_of(row, MICROBATCHES - 1), row.pop(last))


def send_before_its_run(rows: Rows) -> None:
    first = places(rows[0], Send)[0]
    rows[0].insert(0, rows[0].pop(first))


def change(stage: int, kind: type, how: Callable[[Send | Receive], Send | Receive]) -> Mutation:
    def mutate(rows: Rows) -> None:
        index = places(rows[stage], kind)[3]
        one = rows[stage][index]
        assert isinstance(one, Send | Receive)
        rows[stage][index] = how(one)

    return mutate


def turned_round(one: Send | Receive) -> Send | Receive:
    channel = one.channel
    return replace(one, channel=Channel(channel.target, channel.source, channel.flow))


def of_the_other_flow(one: Send | Receive) -> Send | Receive:
    return replace(one, channel=replace(one.channel, flow=Flow.BACKWARD))


def of_another_stage(one: Send | Receive) -> Send | Receive:
    return replace(one, channel=Channel(2, 0, one.channel.flow))


def of_the_next_microbatch(one: Send | Receive) -> Send | Receive:
    return replace(one, microbatch=one.microbatch + 1)


def of_no_microbatch(one: Send | Receive) -> Send | Receive:
    return replace(one, microbatch=-1)


def of_another_chunk(one: Send | Receive) -> Send | Receive:
    return replace(one, chunk=one.chunk + 1)


def finalize_again(rows: Rows) -> None:
    rows[1].append(Finalize())


def finalize_early(rows: Rows) -> None:
    rows[1].insert(0, rows[1].pop())


def no_finalize(rows: Rows) -> None:
    rows[1].pop()


def run_doubled(rows: Rows) -> None:
    index = run_of(rows[1], 3)
    rows[1].insert(index, rows[1][index])


def run_of_no_chunk(rows: Rows) -> None:
    rows[1].insert(0, Run(Pass(Kind.W, 0, 5)))


def sends_wait_for_their_answer(rows: Rows) -> None:
    """Stage 0 sends nothing before its first gradient has come."""
    row = rows[0]
    first = next(
        index
        for index, one in enumerate(row)
        if isinstance(one, Run) and one.what.kind in (Kind.B, Kind.BW) and one.what.chunk == 0
    )
    held = [one for one in row[:first] if isinstance(one, Send)]
    row[:] = [one for one in row[:first] if one not in held] + [
        row[first],
        *held,
        *row[first + 1 :],
    ]


def turns(rows: Rows) -> list[int]:
    return [index for index, one in enumerate(rows[BACK]) if isinstance(one, HandOver)]


def no_turn(rows: Rows) -> None:
    del rows[BACK][turns(rows)[2]]


def turn_twice(rows: Rows) -> None:
    index = turns(rows)[2]
    rows[BACK].insert(index, rows[BACK][index])


def turn_early(rows: Rows) -> None:
    rows[BACK].insert(0, rows[BACK].pop(turns(rows)[2]))


def turn_late(rows: Rows) -> None:
    index = turns(rows)[2]
    rows[BACK].insert(len(rows[BACK]) - 1, rows[BACK].pop(index))


def turned(how: Callable[[HandOver], Instruction]) -> Mutation:
    def mutate(rows: Rows) -> None:
        index = turns(rows)[2]
        one = rows[BACK][index]
        assert isinstance(one, HandOver)
        rows[BACK][index] = how(one)

    return mutate


def also_run(kind: Kind) -> Mutation:
    return lambda rows: rows[1].append(Run(Pass(kind, 0)))


ORDER, MESSAGE, COUNT = Rule.ORDER, Rule.MESSAGE, Rule.COUNT
ANY: Mutations = {
    "sends in another order": ({MESSAGE}, sends_in_another_order),
    "receives in another order": ({MESSAGE}, receives_in_another_order),
    "send dropped": ({MESSAGE}, drop(0, Send)),
    "receive dropped": ({MESSAGE, ORDER}, drop(1, Receive)),
    "send doubled": ({MESSAGE}, double(0, Send)),
    "receive doubled": ({MESSAGE}, double(1, Receive)),
    "receive after its run": ({ORDER}, receive_after_its_run),
    "send before its run": ({ORDER}, send_before_its_run),
    "send on a channel turned round": ({MESSAGE}, change(0, Send, turned_round)),
    "receive on a channel turned round": ({MESSAGE}, change(1, Receive, turned_round)),
    "send on a channel of the other flow": ({MESSAGE, ORDER}, change(0, Send, of_the_other_flow)),
    "receive on a channel of the other flow": (
        {MESSAGE, ORDER},
        change(1, Receive, of_the_other_flow),
    ),
    "send on a channel of other stages": ({MESSAGE}, change(0, Send, of_another_stage)),
    "receive on a channel of other stages": ({MESSAGE}, change(1, Receive, of_another_stage)),
    "send of no microbatch": ({MESSAGE, ORDER}, change(0, Send, of_no_microbatch)),
    "receive of no microbatch": ({MESSAGE, ORDER}, change(1, Receive, of_no_microbatch)),
    "receive of the next microbatch": (
        {MESSAGE, ORDER},
        change(1, Receive, of_the_next_microbatch),
    ),
    "send of another chunk": ({MESSAGE, ORDER}, change(0, Send, of_another_chunk)),
    "receive for another chunk": ({MESSAGE, ORDER}, change(1, Receive, of_another_chunk)),
    "run doubled": ({COUNT}, run_doubled),
}
EVALUATION: Mutations = {
    "finalize without gradients": ({COUNT}, finalize_again),
    "one B": ({COUNT, MESSAGE, ORDER}, also_run(Kind.B)),
    "one W": ({COUNT}, also_run(Kind.W)),
}
TRAINING: Mutations = {
    "finalize twice": ({ORDER}, finalize_again),
    "finalize early": ({ORDER}, finalize_early),
    "no finalize": ({COUNT}, no_finalize),
    "no such chunk": ({Rule.RANGE}, run_of_no_chunk),
    "sends wait for their answer": ({Rule.DEADLOCK}, sends_wait_for_their_answer),
}
TURNS: Mutations = {
    "no hand-over": ({MESSAGE, ORDER}, no_turn),
    "hand-over twice": ({MESSAGE}, turn_twice),
    "hand-over before its run": ({ORDER}, turn_early),
    "hand-over after the run that needs it": ({ORDER}, turn_late),
    "hand-over to the same chunk": (
        {MESSAGE, ORDER},
        turned(lambda one: replace(one, target_chunk=0)),
    ),
    "hand-over from the wrong chunk": (
        {MESSAGE, ORDER},
        turned(lambda one: replace(one, source_chunk=1)),
    ),
    "hand-over of another microbatch": (
        {MESSAGE, ORDER},
        turned(lambda one: replace(one, microbatch=MICROBATCHES - 1)),
    ),
    "hand-over in the other flow": (
        {MESSAGE, ORDER},
        turned(lambda one: replace(one, flow=Flow.BACKWARD)),
    ),
    "hand-over by message": (
        {MESSAGE, ORDER},
        turned(lambda one: Send(Channel(BACK, BACK, one.flow), one.microbatch, one.source_chunk)),
    ),
}


def cases(mutations: Mutations, bases: Iterable[str]) -> list[tuple[str, str]]:
    return [(name, base) for name in mutations for base in bases]


@pytest.mark.parametrize(
    ("name", "base"),
    [
        *cases(ANY, [*PROGRAMS, *FORWARD_ONLY]),
        *cases(TRAINING, PROGRAMS),
        *cases(EVALUATION, FORWARD_ONLY),
        *cases(TURNS, [*V, *(f"{base} forward" for base in V)]),
    ],
)
def test_a_mutated_program(name: str, base: str) -> None:
    expected, mutate = (ANY | TRAINING | EVALUATION | TURNS)[name]
    assert rules_of((PROGRAMS | FORWARD_ONLY)[base], mutate) == expected


@given(seed=st.integers(0, 10**6), forward_only=st.booleans(), data=st.data())
def test_any_instruction_dropped_or_doubled_is_missed(
    seed: int, forward_only: bool, data: st.DataObject
) -> None:
    placement = data.draw(st.sampled_from([v_shape(3), interleaved(3, 2)]))
    program = lower(random_order(placement, 3, seed), forward_only=forward_only)
    stage = data.draw(st.integers(0, 2))
    index = data.draw(st.integers(0, len(program.instructions[stage]) - 1))
    one = program.instructions[stage][index]
    assert rules_of(program, lambda rows: rows[stage].__delitem__(index))
    assert rules_of(program, lambda rows: rows[stage].insert(index, one))


@pytest.mark.parametrize("forward_only", [False, True])
def test_a_program_without_one_of_its_stages_is_refused(forward_only: bool) -> None:
    program = lower(BASES["zb-h1"], forward_only=forward_only)
    with pytest.raises(ValueError, match="2 rows of passes for 3 stages"):
        check_program(replace(program, instructions=program.instructions[:2]))
