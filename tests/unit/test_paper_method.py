"""The paper's heuristic: legal, within its limits, and equal to what the paper published."""

from __future__ import annotations

import math
from itertools import pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.builders import zb_h1
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.paper import paper_method
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

SIZES = {"stages": st.integers(1, 6), "microbatches": st.integers(1, 14)}


ROWS = [*range(8), *(pytest.param(row, marks=pytest.mark.slow) for row in range(8, 12))]
"""Of the paper's profiled configurations; the large ones take a second each."""


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize("row", ROWS)
def test_the_published_rates_of_zb_1p_and_zb_2p(row: int, factor: int) -> None:
    profile = paper_profiles()[row]
    stages = profile.stages
    problem = Problem.of(linear(stages), profile.costs, profile.microbatches, factor * stages)
    solution = paper_method(problem)
    timeline = simulate(solution.schedule, profile.costs)
    assert f"{timeline.bubble_rate:.4f}" == f"{profile.bubble_rates[f'zb-{factor}p']:.4f}"
    assert check(solution.schedule, costs=profile.costs, memory_limit=factor * stages) == []


@pytest.mark.parametrize("factor", [1, 1.5])
@pytest.mark.parametrize("row", ROWS)
def test_no_schedule_is_better_at_1p_and_1_5p(row: int, factor: float) -> None:
    profile = paper_profiles()[row]
    stages = profile.stages
    problem = Problem.of(linear(stages), profile.costs, profile.microbatches, factor * stages)
    assert paper_method(problem).cost == pytest.approx(lower_bound(problem).cost, rel=1e-9)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6), more=st.lists(st.integers(0, 8), min_size=6, max_size=6), **SIZES
)
def test_any_times_and_limits_give_a_legal_schedule_within_them(
    seed: int, more: list[int], stages: int, microbatches: int
) -> None:
    costs = random_costs(linear(stages), seed)
    limits = [(stages - one + more[one]) * costs.m_b[one][0] for one in range(stages)]
    problem = Problem.of(linear(stages), costs, microbatches, limits)
    solution = paper_method(problem)
    assert check(solution.schedule, costs=costs, memory_limit=limits) == []
    assert bit_identical_order(solution.schedule) == []
    assert solution.cost == simulate(solution.schedule, costs).cost
    assert solution.cost >= solution.bound * (1 - 1e-9)
    assert paper_method(problem) == solution


@given(seed=st.integers(0, 10**6), **SIZES)
def test_a_stage_starts_with_more_forwards_than_the_next(
    seed: int, stages: int, microbatches: int
) -> None:
    problem = Problem.of(linear(stages), random_costs(linear(stages), seed), microbatches)
    counts = [
        sum(1 for _ in takewhile(lambda one: one.kind is Kind.F, row))
        for row in paper_method(problem).schedule.passes
    ]
    assert all(one > other or one == microbatches for one, other in pairwise(counts))


@settings(max_examples=40)
@given(stages=st.integers(1, 8), more=st.integers(0, 12), time=st.integers(1, 9))
def test_equal_times_and_twice_the_memory_leave_no_bubble(
    stages: int, more: int, time: int
) -> None:
    costs = Costs.uniform(linear(stages), time, time, time)
    problem = Problem.of(linear(stages), costs, 2 * stages - 1 + more, 2 * stages - 1)
    solution = paper_method(problem)
    assert solution.cost == problem.ideal
    assert solution.is_optimal


@given(
    stages=st.integers(1, 6),
    microbatches=st.integers(6, 14),
    t_w=st.integers(1, 6),
    over_f=st.integers(0, 4),
    over_b=st.integers(0, 4),
)
def test_with_the_memory_of_1f1b_it_is_as_good_as_zb_h1(
    stages: int, microbatches: int, t_w: int, over_f: int, over_b: int
) -> None:
    """The paper's section 5.3: the limit leaves little to choose."""
    costs = Costs.uniform(linear(stages), t_w + over_f, t_w + over_b, t_w)
    problem = Problem.of(linear(stages), costs, microbatches, stages)
    handcrafted = simulate(zb_h1(stages, microbatches), costs).cost
    assert paper_method(problem).cost <= handcrafted


def test_passes_without_memory_fit_a_limit_of_zero() -> None:
    costs = Costs.uniform(linear(3), 1, 1, 1, m_b=0)
    assert check(paper_method(Problem.of(linear(3), costs, 5, 0.0)).schedule) == []


@pytest.mark.parametrize("placement", [v_shape(2), interleaved(2, 2)], ids=lambda one: one.name)
def test_other_placements_are_refused(placement: Placement) -> None:
    problem = Problem.of(placement, Costs.uniform(placement, 1, 1, 1), 4)
    with pytest.raises(ValueError, match=f"not for the placement {placement.name}"):
        paper_method(problem)


def test_less_memory_than_1f1b_needs_is_refused() -> None:
    costs = Costs.uniform(linear(4), 1, 1, 1, m_b=10)
    with pytest.raises(ValueError, match=r"memory limit 19 of stage 2 .* holds 2 .* take 20"):
        paper_method(Problem.of(linear(4), costs, 8, [math.inf, 40, 19, 10]))
    # One microbatch is all that such a stage ever holds.
    assert paper_method(Problem.of(linear(4), costs, 1, 10)).schedule.num_microbatches == 1
