"""Repeating a steady state: more microbatches at the same bubble, memory and legality."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import parse, random_costs
from zero_bubble.builders import build
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs
from zero_bubble.placement import linear, v_shape
from zero_bubble.schedule import Schedule
from zero_bubble.search.orders import decode, encode
from zero_bubble.search.problem import Problem
from zero_bubble.search.stretch import stretch
from zero_bubble.simulate import simulate


def stretched(
    schedule: Schedule, costs: Costs, many: int, limit: float | tuple[float, ...] = math.inf
) -> tuple[float, Schedule] | None:
    """The stretched schedule and the cost that is claimed for it."""
    problem = Problem.of(schedule.placement, costs, many, limit)
    found = stretch(problem.arrays(), schedule.num_microbatches, encode(schedule), many)
    return None if found is None else (found[0], decode(problem, found[1], "stretched"))


def bubble(schedule: Schedule, costs: Costs) -> float:
    """In ms."""
    timeline = simulate(schedule, costs)
    return timeline.cost - max(timeline.work)


whole = st.integers(1, 9)


@settings(max_examples=15)
@given(
    stages=st.integers(1, 6),
    more=st.integers(1, 40),
    times=st.tuples(whole, whole, whole),
    name=st.sampled_from(["zb-h1", "zb-h2"]),
)
def test_a_handcrafted_schedule_becomes_as_good_as_the_same_one_for_many(
    stages: int, more: int, times: tuple[int, int, int], name: str
) -> None:
    few, costs = 3 * stages + 2, Costs.uniform(linear(stages), *times)
    short, long = (build(name, stages, one) for one in (few, few + more))
    limits = simulate(short, costs).peak_memory
    found = stretched(short, costs, few + more, limits)
    assert found is not None
    cost, schedule = found
    assert check(schedule, costs=costs, memory_limit=limits) == []
    assert cost == simulate(schedule, costs).cost
    assert cost == simulate(long, costs).cost


@pytest.mark.parametrize("more", [1, 2, 7, 100])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_v_without_a_bubble_stays_without_one(stages: int, more: int) -> None:
    costs = Costs.uniform(v_shape(stages), 1, 1, 1, m_b=0.5)
    few = 3 * stages
    short = build("zb-v", stages, few, costs=costs)
    found = stretched(short, costs, few + more, stages)
    assert found is not None
    cost, schedule = found
    assert check(schedule, costs=costs, memory_limit=stages) == []
    assert bubble(short, costs) == 0
    assert cost == simulate(schedule, costs).cost == 6 * (few + more)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(1, 5),
    few=st.integers(2, 12),
    more=st.integers(0, 20),
    name=st.sampled_from(["zb-h1", "zb-h2", "zb-v", "v-half", "v-min"]),
)
def test_any_times_give_a_legal_schedule_of_the_cost_that_is_claimed(
    seed: int, stages: int, few: int, more: int, name: str
) -> None:
    short = build(name, stages, few)
    costs = random_costs(short.placement, seed)
    limits = simulate(short, costs).peak_memory
    found = stretched(short, costs, few + more, limits)
    if found is None:
        return
    cost, schedule = found
    assert schedule.num_microbatches == few + more
    assert check(schedule, costs=costs, memory_limit=limits) == []
    assert bit_identical_order(schedule) == []
    assert cost == pytest.approx(simulate(schedule, costs).cost, rel=1e-9)


def test_a_block_is_repeated_and_the_rest_stays() -> None:
    short = parse(
        linear(2),
        3,
        """
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0W2
        """,
    )
    found = stretched(short, Costs.uniform(linear(2), 1, 1, 1), 5, 2)
    assert found is not None
    assert str(found[1]).splitlines() == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0F4 0I3 0W3 0I4 0W4",
        "0F0 0I0 0F1 0I1 0W0 0F2 0I2 0W1 0F3 0I3 0W2 0F4 0I4 0W3 0W4",
    ]


def test_as_many_as_there_are_changes_nothing() -> None:
    costs = Costs.uniform(v_shape(3), 2, 3, 1)
    short = build("zb-v", 3, 6, costs=costs)
    assert stretched(short, costs, 6) == (simulate(short, costs).cost, short)


def test_one_microbatch_has_no_block() -> None:
    assert stretched(build("zb-h1", 3, 1), Costs.uniform(linear(3), 1, 1, 1), 5) is None


def test_no_block_is_repeated_beyond_the_limits() -> None:
    costs = Costs.uniform(linear(4), 1, 1, 1)
    short = build("zb-h1", 4, 8)
    assert stretched(short, costs, 20, 4) is not None
    assert stretched(short, costs, 20, (4, 3, 2, 1)) is None


def test_the_rows_given_stay_as_they_are() -> None:
    short = build("zb-h1", 3, 6)
    rows = encode(short)
    before = rows.copy()
    arrays = Problem.of(linear(3), Costs.uniform(linear(3), 1, 1, 1), 9).arrays()
    assert stretch(arrays, 6, rows, 9) is not None
    assert np.array_equal(rows, before)
