"""Descent: lags and knobs change only for the better, within a budget."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.builders import build
from zero_bubble.check import check
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.descent import FAILED, assess, descend, sweep
from zero_bubble.search.families import Start, starts
from zero_bubble.search.orders import decode
from zero_bubble.search.problem import Floats, Ints, Problem
from zero_bubble.search.squeeze import Knobs
from zero_bubble.simulate import simulate

PLACEMENTS = (linear(4), v_shape(3), interleaved(2, 2), Placement(((2, 0), (1,), (3, 5, 4))))
KNOBS = Knobs()


def scratch(problem: Problem) -> Ints:
    chunks = max(map(len, problem.placement.positions))
    return np.empty((problem.num_stages, 3 * chunks * problem.num_microbatches), np.int64)


def base_of(problem: Problem, start: Start) -> Floats:
    chunks = max(map(len, problem.placement.positions))
    return start.family.base(chunks, problem.num_microbatches)


def assessed(problem: Problem, start: Start, lags: Floats, knobs: Floats) -> float:
    return assess(problem.arrays(), base_of(problem, start), lags, knobs, scratch(problem))


class Descent(NamedTuple):
    """Where a descent ended."""

    cost: float
    lags: Floats
    knobs: Floats


def descended(problem: Problem, start: Start, budget: int, target: float = 0.0) -> Descent:
    lags, knobs, family = start.lags.copy(), np.array(KNOBS), start.family
    cost = descend(
        problem.arrays(),
        base_of(problem, start),
        lags,
        knobs,
        family.row_sets,
        family.step,
        family.falling,
        target,
        budget,
        scratch(problem),
    )
    return Descent(cost, lags, knobs)


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 8),
    room=st.floats(1, 6),
)
def test_it_never_gets_worse_and_more_budget_helps(
    seed: int, placement: Placement, microbatches: int, room: float
) -> None:
    costs = random_costs(placement, seed)
    limits = [sum(row) * room for row in costs.m_b]
    problem = Problem.of(placement, costs, microbatches, limits)
    found = starts(problem)
    start = found[seed % len(found)]
    before = assessed(problem, start, start.lags, np.array(KNOBS))
    short, long = descended(problem, start, 20), descended(problem, start, 120)
    assert before >= short.cost >= long.cost
    if long.cost >= FAILED:
        return
    # The lags and knobs are those of the cost, and their schedule is one.
    rows = scratch(problem)
    cost = assess(problem.arrays(), base_of(problem, start), long.lags, long.knobs, rows)
    schedule = decode(problem, rows, "descended")
    assert cost == long.cost
    assert check(schedule, costs=costs, memory_limit=limits) == []
    assert simulate(schedule, costs).cost <= cost * (1 + 1e-9)
    assert lower_bound(problem).cost <= cost * (1 + 1e-9)


def test_a_budget_of_one_changes_nothing() -> None:
    problem = Problem.of(v_shape(3), random_costs(v_shape(3), 5), 8)
    for start in starts(problem)[:6]:
        cost, lags, knobs = descended(problem, start, 1)
        assert cost == assessed(problem, start, start.lags, np.array(KNOBS))
        assert np.array_equal(lags, start.lags)
        assert np.array_equal(knobs, np.array(KNOBS))


def test_it_ends_at_the_target() -> None:
    problem = Problem.of(v_shape(3), random_costs(v_shape(3), 5), 8)
    start = starts(problem)[0]
    before = assessed(problem, start, start.lags, np.array(KNOBS))
    best = descended(problem, start, 1000).cost
    assert best < before
    there = descended(problem, start, 1000, target=before)
    assert there.cost == before
    assert np.array_equal(there.lags, start.lags)
    middle = (best + before) / 2
    assert best <= descended(problem, start, 1000, target=middle).cost <= middle


@pytest.mark.parametrize(("in_flight", "name"), [(7, "zb-h2"), (4, "zb-h1")])
def test_it_finds_what_is_known_to_be_optimal_from_far_away(in_flight: int, name: str) -> None:
    """Equal times: no bubble for 2p-1 microbatches in flight, and nothing beats ZB-H1 for p."""
    stages, microbatches = 4, 12
    costs = Costs.uniform(linear(stages), 1, 1, 1)
    problem = Problem.of(linear(stages), costs, microbatches, in_flight)
    family = next(one.family for one in starts(problem) if one.family.name == "lag")
    start = Start(family, np.array([[0, 2.5]] * stages))
    known = simulate(build(name, stages, microbatches), costs).cost
    assert assessed(problem, start, start.lags, np.array(KNOBS)) > known
    assert descended(problem, start, 2000).cost == known


def test_lags_of_a_line_never_rise() -> None:
    changed = 0
    for seed in range(8):
        costs = random_costs(linear(5), seed)
        problem = Problem.of(linear(5), costs, 10, [6 * row[0] for row in costs.m_b])
        family = next(one.family for one in starts(problem) if one.family.name == "lag")
        start = Start(family, np.array([[0, 0.5]] * 5))
        lags = descended(problem, start, 300).lags[:, 1]
        assert all(one >= other for one, other in pairwise(lags))
        changed += not np.array_equal(lags, start.lags[:, 1])
    assert changed > 0


def test_a_template_beyond_the_limits_fails() -> None:
    costs = Costs.uniform(linear(3), 1, 1, 1)
    start = starts(Problem.of(linear(3), costs, 8, math.inf))[0]
    tight = Problem.of(linear(3), costs, 8, 1)
    lags = np.array([[0, 5.5], [0, 3.5], [0, 1.5]])
    assert assessed(tight, start, lags, np.array(KNOBS)) == FAILED


def test_a_sweep_is_one_squeeze_for_each_setting() -> None:
    problem = Problem.of(v_shape(3), random_costs(v_shape(3), 5), 8)
    settings = np.array([KNOBS, KNOBS._replace(gap=1.0, late_gap=1.0), KNOBS._replace(lead=0.0)])
    for start in starts(problem)[:4]:
        costs = np.empty(len(settings))
        base = base_of(problem, start)
        sweep(problem.arrays(), base, start.lags, settings, costs, scratch(problem))
        expected = [assessed(problem, start, start.lags, knobs) for knobs in settings]
        assert costs.tolist() == expected
