"""Searching a schedule window by window never makes it worse, and mostly better."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.brute_force import one_by_one
from tests.unit.orders import random_costs
from zero_bubble.builders import build
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.search.exact import solve
from zero_bubble.search.exact_block import cut
from zero_bubble.search.exact_ticks import to_ticks
from zero_bubble.search.orders import encode
from zero_bubble.search.problem import Problem
from zero_bubble.search.windows import improve_by_windows
from zero_bubble.simulate import simulate

pytest.importorskip("ortools")


@pytest.mark.parametrize("placement", [linear(3), v_shape(2)], ids=["linear", "v"])
def test_a_bad_schedule_gets_much_better_and_stays_within_its_memory(placement: Placement) -> None:
    costs = Costs.uniform(placement, 2, 3, 1, 0.5, m_w=0.5)
    problem = Problem.of(placement, costs, 6, 3.0)
    bad = one_by_one(placement, 6)
    found = improve_by_windows(problem, bad)
    assert found.cost < 0.75 * simulate(bad, costs).cost
    assert found.cost == pytest.approx(simulate(found.schedule, costs).cost, rel=1e-12)
    assert check(found.schedule, costs=costs, memory_limit=3.0) == []
    assert bit_identical_order(found.schedule) == []
    assert problem.ideal <= found.bound <= found.cost


def test_windows_as_long_as_the_schedule_find_the_optimum() -> None:
    problem = Problem.of(linear(3), Costs.uniform(linear(3), 2, 3, 1, 0.5), 4, 3.0)
    bad = one_by_one(linear(3), 4)
    optimum = solve(problem, bad)
    assert optimum.is_optimal
    found = improve_by_windows(problem, bad, width=1000, effort=20)
    assert found.cost == pytest.approx(optimum.cost, rel=1e-9)


@settings(max_examples=15)
@given(seed=st.integers(0, 10**6), name=st.sampled_from(["zb-h1", "zb-h2"]))
def test_no_schedule_gets_worse_or_illegal(seed: int, name: str) -> None:
    schedule = build(name, 3, 5)
    costs = random_costs(schedule.placement, seed)
    before = simulate(schedule, costs)
    problem = Problem.of(schedule.placement, costs, 5, before.peak_memory)
    found = improve_by_windows(problem, schedule, sweeps=1, width=4, effort=0.1)
    assert found.cost <= before.cost * (1 + 1e-12)
    assert check(found.schedule, costs=costs, memory_limit=problem.memory_limit) == []
    assert found.cost == pytest.approx(simulate(found.schedule, costs).cost, rel=1e-12)


def test_the_result_repeats() -> None:
    problem = Problem.of(linear(3), Costs.uniform(linear(3), 2, 3, 1, 0.5), 6, 3.0)
    one, other = (improve_by_windows(problem, one_by_one(linear(3), 6), sweeps=1) for _ in "ab")
    assert one == other


def test_a_met_bound_and_no_time_leave_the_schedule_as_it_is() -> None:
    problem = Problem.of(linear(3), Costs.uniform(linear(3), 2, 3, 1), 6, 3.0)
    bad = one_by_one(linear(3), 6)
    cost = simulate(bad, problem.costs).cost
    assert improve_by_windows(problem, bad, time_limit=0).schedule is bad
    assert improve_by_windows(problem, bad, lower_bound=cost).schedule is bad


@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 8),
    window=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_window_knows_what_its_order_costs(
    seed: int, stages: int, microbatches: int, window: tuple[float, float]
) -> None:
    schedule = build("zb-h1", stages, microbatches)
    costs = random_costs(schedule.placement, seed)
    problem = Problem.of(schedule.placement, costs, microbatches)
    rows, cost = encode(schedule), simulate(schedule, costs).cost
    ticks = to_ticks(problem, cost)
    begin, end = (part * 1.5e9 for part in sorted(window))
    block = cut(problem, ticks, rows, bit_identical=True, window=(begin, end))
    through = block.start + block.duration + block.tail
    assert block.target == max(block.floor, int(through.max(initial=0)))
    assert (block.start >= block.release).all()
    assert np.array_equal(block.merge(block.start.astype(float), rows.shape), rows)
    inside = [code for code in rows.ravel() if code >= 0]
    fixed = sum(map(len, block.before)) + sum(map(len, block.after))
    assert fixed + len(block.code) == len(inside)


def test_windows_too_small_to_reorder_anything_are_an_error() -> None:
    problem = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2, math.inf)
    with pytest.raises(ValueError, match="windows of 2 passes are needed, not 3 and 1"):
        improve_by_windows(problem, one_by_one(linear(2), 2), width=1)
