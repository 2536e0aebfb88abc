"""The search with recomputation: legal, within limits, never below its bound, and often on it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.brute_force import all_costs, one_by_one
from tests.unit.orders import parse, random_order
from tests.unit.test_bounds import own_problem, split, whole_costs
from zero_bubble.builders import build
from zero_bubble.builders.recomputing import with_recomputation, within_backward
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs, Table, paper_profiles
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.exact import solve
from zero_bubble.search.orders import encode, evaluate
from zero_bubble.search.paper import paper_method
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

PLACEMENTS = st.sampled_from(
    [linear(1), linear(3), v_shape(2), v_shape(3), interleaved(2, 2), Placement(((0, 3), (1, 2)))]
)
SEEDS = st.integers(0, 10**6)


def recomputing(costs: Costs, seed: int) -> Costs:
    """The costs with recomputation, different on each chunk, of some chunks nothing."""
    draw = random.Random(seed)
    m_r = tuple(tuple(one * draw.choice([0.0, 0.1, 0.5, 1.0]) for one in row) for row in costs.m_b)
    t_r = tuple(tuple(float(draw.choice([0, 1, 2, 6])) for _ in row) for row in costs.m_b)
    return replace(costs, t_r=t_r, m_r=m_r)


def with_r_anywhere(schedule: Schedule, seed: int) -> Schedule:
    """An R of each microbatch at a random place between its F and its B."""
    draw = random.Random(seed)
    rows = []
    for row in schedule.passes:
        passes = list(row)
        for one in row:
            if one.kind is Kind.F:
                first = passes.index(one) + 1
                last = passes.index(replace(one, kind=Kind.B))
                again = replace(one, kind=Kind.R)
                passes.insert(draw.randint(first, last), again)
        rows.append(tuple(passes))
    return replace(schedule, passes=tuple(rows))


def test_an_r_comes_right_before_each_backward() -> None:
    found = with_recomputation(build("1f1b", 2, 2))
    wanted = "0F0 0F1 0R0 0B0 0R1 0B1\n0F0 0R0 0B0 0F1 0R1 0B1"
    assert found == parse(linear(2), 2, wanted)
    assert with_recomputation(found) == found
    halves = with_recomputation(parse(linear(1), 1, "0F0 0I0 0W0"))
    assert halves == parse(linear(1), 1, "0F0 0R0 0I0 0W0")


def test_an_r_before_its_backward_runs_while_the_gradient_is_on_its_way() -> None:
    costs = Costs.uniform(linear(2), 2, 3, 1, t_r=2, m_r=0.1)
    plain = build("1f1b", 2, 1)
    # 2 + 2, then R of the last stage, then both backwards; in B, R of the first stage adds to it.
    assert simulate(with_recomputation(plain), costs).cost == 2 + 2 + 2 + 4 + 4
    assert simulate(plain, costs).cost == 2 + 2 + 2 + 4 + 2 + 4
    assert simulate(plain, within_backward(costs)).cost == 16


def test_the_fused_backward_takes_the_time_of_recomputation_too() -> None:
    costs = Costs.uniform(linear(2), 2, 3, 1, t_bw=3.5, t_r=2, m_r=0.1)
    found = within_backward(costs)
    assert (found.t_b, found.t_bw, found.t_r, found.m_r) == (
        ((5.0,), (5.0,)),
        ((5.5,), (5.5,)),
        None,
        None,
    )


def test_the_least_memory_holds_one_chunk_whole_beside_what_is_kept_of_earlier_ones() -> None:
    costs = Costs.uniform(v_shape(2), 1, 1, 1, m_b=1, t_r=1, m_r=0.1)
    problem = Problem.of(v_shape(2), costs, 3, 1.1)
    assert problem.least_memory(0) == pytest.approx(1.1)
    one = with_recomputation(one_by_one(v_shape(2), 3))
    assert simulate(one, costs).peak_memory == pytest.approx((1.1, 1.1))
    found = auto(problem, effort="quick").schedule
    assert check(found, costs=costs, memory_limit=1.1) == []
    with pytest.raises(ValueError, match=r"memory limit 1.05 of stage 0 .* takes 1.1"):
        Problem.of(v_shape(2), costs, 3, 1.05)
    uneven = replace(costs, m_b=((3.0, 1.0), (3.0, 1.0)))
    assert Problem.of(v_shape(2), uneven, 3).least_memory(0) == 3


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize(
    ("placement", "microbatches", "limit"),
    [(linear(2), 2, 1.5), (linear(2), 2, math.inf), (linear(3), 2, 1.3), (linear(2), 3, 1.2)],
)
def test_nothing_costs_less_than_the_bound_and_the_search_finds_the_cheapest(
    placement: Placement, microbatches: int, limit: float, within: bool
) -> None:
    for seed in range(3):
        draw = random.Random(seed)
        times = [float(draw.choice([1, 2, 3])) for _ in range(4)]
        m_w, m_r = draw.choice([0.3, 0.8]), draw.choice([0.1, 0.4])
        t_f, t_b, t_w, t_r = times
        costs = Costs.uniform(placement, t_f, t_b, t_w, 0.5, m_w=m_w, t_r=t_r, m_r=m_r)
        problem = Problem.of(placement, costs, microbatches, limit, recompute_in_backward=within)
        least = min(all_costs(problem, True).values())
        found = auto(problem, effort="quick")
        assert lower_bound(problem).cost <= least + 1e-9
        assert found.cost == pytest.approx(least)
        assert simulate(found.schedule, costs).cost == pytest.approx(found.cost)
        assert check(found.schedule, costs=costs, memory_limit=limit) == []


@pytest.mark.parametrize(
    ("t_f", "t_b", "t_w", "t_r", "m_r", "m_w", "limit"),
    [(1, 1, 3, 4, 0.8, 0.5, 1.3), (1, 3, 5, 4, 0.9, 0.3, 1.1), (3, 1, 5, 4, 0.9, 0.9, 1.6)],
)
def test_r_fills_the_wait_for_the_last_gradient(
    t_f: float, t_b: float, t_w: float, t_r: float, m_r: float, m_w: float, limit: float
) -> None:
    costs = Costs.uniform(linear(2), t_f, t_b, t_w, m_w=m_w, t_r=t_r, m_r=m_r)
    problem = Problem.of(linear(2), costs, 2, limit)
    assert lower_bound(problem).cost <= min(all_costs(problem, True).values()) + 1e-9


@settings(max_examples=150)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 5), order=SEEDS, cost=SEEDS)
def test_no_schedule_costs_less_than_the_bound(
    placement: Placement, microbatches: int, order: int, cost: int
) -> None:
    plain = split(random_order(placement, microbatches, order))
    costs = recomputing(whole_costs(placement, cost), cost)
    for schedule in (with_r_anywhere(plain, order), plain):
        problem, taken = own_problem(schedule, costs)
        assert lower_bound(problem).cost <= taken * (1 + 1e-9)
    within = replace(problem, recompute_in_backward=True)
    assert lower_bound(within).cost <= taken * (1 + 1e-9)


@settings(max_examples=60)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 5), order=SEEDS, cost=SEEDS)
def test_orders_as_arrays_are_timed_and_weighed_as_the_simulator_does(
    placement: Placement, microbatches: int, order: int, cost: int
) -> None:
    plain = split(random_order(placement, microbatches, order))
    costs = recomputing(whole_costs(placement, cost), cost)
    for schedule, within in ((with_r_anywhere(plain, order), False), (plain, True)):
        problem = Problem.of(placement, costs, microbatches, recompute_in_backward=within)
        found = evaluate(problem.arrays(), microbatches, encode(schedule))
        timeline = simulate(schedule, costs)
        assert found.cost == pytest.approx(timeline.cost)
        assert list(found.peak) == pytest.approx(list(timeline.peak_memory))
        assert problem.ideal == pytest.approx(max(timeline.work))


def test_orders_with_r_are_no_orders_of_a_problem_without() -> None:
    schedule = with_recomputation(build("zb-h1", 2, 2))
    problem = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2)
    with pytest.raises(ValueError, match="no recomputation"):
        evaluate(problem.arrays(), 2, encode(schedule))


@settings(max_examples=5)
@given(
    placement=st.sampled_from([linear(3), v_shape(3), interleaved(2, 2)]),
    microbatches=st.sampled_from([2, 5]),
    cost=SEEDS,
    room=st.floats(1, 4),
)
def test_what_is_found_is_legal_and_no_worse_than_recomputation_in_b(
    placement: Placement, microbatches: int, cost: int, room: float
) -> None:
    costs = recomputing(whole_costs(placement, cost), cost)
    least = [Problem.of(placement, costs, 1).least_memory(one) for one in range(len(costs.t_f))]
    limits = [one * room for one in least]
    problem = Problem.of(placement, costs, microbatches, limits)
    found = auto(problem, effort="quick")
    assert check(found.schedule, costs=costs, memory_limit=limits) == []
    assert bit_identical_order(found.schedule) == []
    assert simulate(found.schedule, costs).cost == pytest.approx(found.cost)
    assert found.bound <= found.cost
    inside = auto(replace(problem, recompute_in_backward=True), effort="quick")
    assert not any(inside.schedule.chunks_with(Kind.R))
    assert check(inside.schedule, costs=costs, memory_limit=limits) == []
    assert simulate(inside.schedule, costs).cost == pytest.approx(inside.cost)
    assert found.cost <= inside.cost * (1 + 1e-9)


@pytest.mark.parametrize("placement", [linear(4), v_shape(3)])
def test_recomputation_of_nothing_changes_nothing(placement: Placement) -> None:
    plain = Costs.uniform(placement, 2, 2.2, 1.3, 0.1, m_w=0.4)
    again = replace(plain, t_r=tuple((0.0,) * len(row) for row in plain.m_b), m_r=plain.m_b)
    limit = 0.8 * placement.num_positions
    one, other = (
        auto(Problem.of(placement, costs, 9, limit), effort="quick") for costs in (plain, again)
    )
    assert other == one


def test_chunks_with_nothing_to_compute_again_have_no_r() -> None:
    costs = Costs.uniform(v_shape(2), 1, 1, 1, t_r=1, m_r=0.2)

    def first(table: Table | None, value: float) -> Table:
        assert table is not None
        return tuple((value, *row[1:]) for row in table)

    costs = replace(costs, t_r=first(costs.t_r, 0.0), m_r=first(costs.m_r, 1.0))
    found = auto(Problem.of(v_shape(2), costs, 4, 3.0), effort="quick").schedule
    assert found.chunks_with(Kind.R) == (frozenset({1}), frozenset({1}))
    assert check(found, costs=costs, memory_limit=3.0) == []


def test_free_recomputation_costs_no_more_than_keeping_all() -> None:
    for placement in (linear(4), v_shape(4)):
        plain = Costs.uniform(placement, 2, 2.2, 1.3, 0.1, m_w=0.4)
        zero = tuple((0.0,) * len(row) for row in plain.m_b)
        free = replace(
            plain, t_r=zero, m_r=tuple(tuple(one / 10 for one in row) for row in plain.m_b)
        )
        limit = 0.7 * placement.num_positions
        kept, again = (
            auto(Problem.of(placement, costs, 12, limit), effort="quick") for costs in (plain, free)
        )
        assert again.cost <= kept.cost * (1 + 1e-9)


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0])
def test_one_chunk_a_stage_is_on_the_bound_of_its_last_stage(factor: float) -> None:
    profile = paper_profiles()[1]
    kept = tuple(tuple(one / 16 for one in row) for row in profile.costs.m_w)  # 2h of 32h
    costs = replace(profile.costs, t_r=profile.costs.t_f, m_r=kept)
    stages, many, limit = profile.stages, profile.microbatches, factor * profile.stages
    found = auto(Problem.of(linear(stages), costs, many, limit), effort="quick")
    # The last stage runs all F's, R's and B's, and W's but for those that fit beside its last B.
    # The first stage starts before that, by the way of F, and ends after it, by that of B and a W.
    t_f, t_b, t_w = costs.t_f[0][0], costs.t_b[0][0], costs.t_w[0][0]
    held_back = 1 + math.floor((limit - 1) / costs.m_w[0][0])
    whole = many * (2 * t_f + t_b) + max(0, many - held_back) * t_w
    ways = (stages - 1) * (t_f + t_b + 2 * costs.t_comm) + t_w
    assert found.cost == pytest.approx(whole + ways)
    assert found.is_optimal


def test_many_microbatches_keep_the_limit() -> None:
    costs = Costs.uniform(linear(3), 2, 2, 1, 0.1, m_w=0.4, t_r=2, m_r=0.05)
    found = auto(Problem.of(linear(3), costs, 80, 2.0), effort="quick")
    assert check(found.schedule, costs=costs, memory_limit=2.0) == []
    assert found.gap < 0.02


def test_other_methods_know_no_recomputation() -> None:
    costs = Costs.uniform(linear(2), 1, 1, 1, t_r=1, m_r=0.1)
    problem = Problem.of(linear(2), costs, 2, 2.0)
    with pytest.raises(ValueError, match="knows no recomputation: use --method auto"):
        paper_method(problem)
    with pytest.raises(ValueError, match="know no recomputation"):
        solve(problem, with_recomputation(build("zb-h1", 2, 2)))
