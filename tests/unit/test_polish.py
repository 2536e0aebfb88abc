"""Polishing: any legal order gets better or stays, and never stops being legal."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cheapest import cheapest
from tests.unit.orders import all_forwards_first, random_costs, random_order
from zero_bubble.builders import zb_h2
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.orders import decode, encode
from zero_bubble.search.polish import polish
from zero_bubble.search.problem import Ints, Problem
from zero_bubble.simulate import simulate

TURNED = Placement(((2, 0), (1,), (3, 5, 4)))
PLACEMENTS = (linear(1), linear(4), v_shape(3), interleaved(2, 3), TURNED)
WAYS = ((1, 6), (50, 12), (300, 6))
"""Late acceptance's history and the longest move."""


def bad_order(placement: Placement, microbatches: int, seed: int) -> Schedule:
    """A random legal order of F, B and W in which the microbatches of each chunk ascend.

    To rename a random order's microbatches by their turn keeps it legal: of the passes that a turn
    waits for, as many have run before as in the random order.
    """
    rows = []
    for row in random_order(placement, microbatches, seed).passes:
        turns: Counter[tuple[Kind, int]] = Counter()
        ascending = []
        for one in row:
            for kind in (Kind.B, Kind.W) if one.kind is Kind.BW else (one.kind,):
                ascending.append(Pass(kind, turns[kind, one.chunk], one.chunk))
                turns[kind, one.chunk] += 1
        rows.append(tuple(ascending))
    return Schedule(placement, microbatches, tuple(rows))


def polished(
    problem: Problem,
    schedule: Schedule,
    *,
    iterations: int = 2000,
    history: int = 50,
    step: int = 12,
    seed: int = 1,
    target: float = 0.0,
) -> tuple[float, Schedule]:
    """The cost claimed, and the order."""
    rows: Ints = encode(schedule)
    microbatches = problem.num_microbatches
    cost = polish(problem.arrays(), microbatches, rows, iterations, history, step, seed, target)
    return cost, decode(problem, rows, "polished")


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 7),
    way=st.sampled_from(WAYS),
)
def test_any_order_stays_legal_and_never_gets_worse(
    seed: int, placement: Placement, microbatches: int, way: tuple[int, int]
) -> None:
    before = bad_order(placement, microbatches, seed)
    costs = random_costs(placement, seed)
    timeline = simulate(before, costs)
    limits = timeline.peak_memory
    problem = Problem.of(placement, costs, microbatches, limits)
    cost, after = polished(problem, before, history=way[0], step=way[1], seed=seed)
    assert check(after, costs=costs, memory_limit=limits) == []
    assert bit_identical_order(after) == []
    assert cost == pytest.approx(simulate(after, costs).cost, rel=1e-9)
    assert cost <= timeline.cost * (1 + 1e-9)


TINY = {
    "linear": (linear(2), 3, math.inf),
    "linear, memory for 2": (linear(2), 3, 2.0),
    "V, memory for 2 of 4": (v_shape(2), 2, 2.0),
    "interleaved, memory for 2 of 4": (interleaved(2, 2), 2, 2.0),
}


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_problem_is_solved_from_the_worst_order(name: str) -> None:
    placement, microbatches, limit = TINY[name]
    costs = Costs.uniform(placement, 3, 5, 2, 1)
    problem = Problem.of(placement, costs, microbatches, limit)
    rows = [[*row] for row in all_forwards_first(placement, microbatches, split=True).passes]
    if limit < math.inf:  # One microbatch after the other fits any limit.
        rows = [sorted(row, key=lambda one: one.microbatch) for row in rows]
    before = Schedule(placement, microbatches, tuple(map(tuple, rows)))
    best = cheapest(problem)
    assert check(before, costs=costs, memory_limit=limit) == []
    assert simulate(before, costs).cost > best
    assert polished(problem, before, iterations=10_000)[0] == pytest.approx(best)


def test_gpipe_loses_its_bubble_where_memory_allows() -> None:
    """With equal times and 2p-1 microbatches in flight there is none (ZB-H2)."""
    stages, microbatches = 3, 8
    costs = Costs.uniform(linear(stages), 1, 1, 1)
    before = all_forwards_first(linear(stages), microbatches, split=True)
    problem = Problem.of(linear(stages), costs, microbatches)
    cost, after = polished(problem, before, iterations=20_000)
    assert simulate(before, costs).bubble_rate > 0.1
    assert cost == simulate(zb_h2(stages, microbatches), costs).cost == problem.ideal
    assert check(after) == []


def test_a_seed_gives_one_order() -> None:
    problem = Problem.of(v_shape(3), random_costs(v_shape(3), 3), 6)
    before = bad_order(v_shape(3), 6, seed=4)
    first = polished(problem, before, iterations=300, seed=5)
    assert polished(problem, before, iterations=300, seed=5) == first
    assert polished(problem, before, iterations=300, seed=6) != first


def test_it_ends_at_the_target() -> None:
    costs = Costs.uniform(v_shape(3), 3, 5, 2)
    problem = Problem.of(v_shape(3), costs, 6)
    before = bad_order(v_shape(3), 6, seed=4)
    start = simulate(before, costs).cost
    best = polished(problem, before)[0]
    assert best < start
    assert polished(problem, before, target=start) == (start, before)
    target = (start + best) / 2
    assert best < polished(problem, before, target=target)[0] <= target


def test_no_iterations_change_nothing() -> None:
    costs = Costs.uniform(linear(3), 3, 5, 2)
    before = bad_order(linear(3), 4, seed=1)
    rows = encode(before)
    arrays = Problem.of(linear(3), costs, 4).arrays()
    cost = polish(arrays, 4, rows, 0, 1, 6, 1, 0.0)
    assert cost == simulate(before, costs).cost
    assert np.array_equal(rows, encode(before))
