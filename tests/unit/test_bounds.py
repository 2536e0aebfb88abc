"""No schedule costs less than the bound, and many cost just that."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cheapest import cheapest
from tests.unit.orders import random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.costs import Costs, Table, paper_profiles
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.bounds import Reason, lower_bound, stage_bounds
from zero_bubble.search.exact_cpsat import solve_cpsat
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

CUSTOM = Placement(((0, 1, 4), (3,), (2, 5)))
PLACEMENTS = (linear(1), linear(3), v_shape(2), v_shape(3), interleaved(2, 2), CUSTOM)

TINY = [
    (linear(2), 2, 1.0),
    (linear(2), 3, 1.0),
    (linear(2), 3, 2.0),
    (linear(2), 2, math.inf),
    (linear(3), 2, 1.5),
    (v_shape(2), 1, math.inf),
    (v_shape(2), 2, 2.0),
    (interleaved(2, 2), 1, math.inf),
    (Placement(((0, 1), (2,))), 2, 2.0),
    (Placement(((1,), (0, 2))), 2, 2.5),
]


def whole_costs(placement: Placement, seed: int) -> Costs:
    """Different costs for every chunk and edge, some of them zero."""
    draw = random.Random(seed)

    def table(values: list[float]) -> Table:
        return tuple(tuple(draw.choice(values) for _ in held) for held in placement.positions)

    stages = placement.num_stages
    return Costs(
        t_f=table([0, 1, 3, 5, 9]),
        t_b=table([0, 1, 3, 5, 9]),
        t_w=table([0, 1, 2, 4, 8]),
        m_b=(m_b := table([0.5, 1, 1, 1.25])),
        m_w=tuple(tuple(draw.choice([0, 0.5, 1]) * one for one in row) for row in m_b),
        t_comm=draw.choice([0, 1, 2]),
        t_edges=((0, stages - 1, 4.0),) if stages > 1 and draw.random() < 0.3 else (),
    )


def split(schedule: Schedule) -> Schedule:
    """Each fused backward as a B and, right after it, a W."""
    rows = []
    for row in schedule.passes:
        passes: list[Pass] = []
        for one in row:
            parts = (Kind.B, Kind.W) if one.kind is Kind.BW else (one.kind,)
            passes += (replace(one, kind=kind) for kind in parts)
        rows.append(tuple(passes))
    return replace(schedule, passes=tuple(rows))


def own_problem(schedule: Schedule, costs: Costs) -> tuple[Problem, float]:
    """The problem whose limits are just what the schedule holds, and the schedule's cost."""
    timeline = simulate(schedule, costs)
    limits = timeline.peak_memory
    problem = Problem.of(schedule.placement, costs, schedule.num_microbatches, limits)
    return problem, timeline.cost


def assert_not_above(bound: float, cost: float) -> None:
    assert bound <= cost * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize(("placement", "microbatches", "share"), TINY)
def test_no_order_of_a_tiny_problem_costs_less(
    placement: Placement, microbatches: int, share: float
) -> None:
    """``share`` is the limit in microbatches of the stage's memory."""
    for seed in range(2):
        costs = whole_costs(placement, seed)
        limits = [max(sum(row), share * max(row)) for row in costs.m_b]
        problem = Problem.of(placement, costs, microbatches, limits)
        assert_not_above(lower_bound(problem).cost, cheapest(problem))


@pytest.mark.parametrize(
    ("placement", "microbatches", "limit"),
    [
        (linear(2), 3, 1.5),
        (linear(2), 3, 2),
        (linear(3), 2, 3),
        (v_shape(2), 2, 2),
        (interleaved(2, 2), 1, 2),
    ],
)
def test_the_bound_is_met_on_tiny_uniform_problems(
    placement: Placement, microbatches: int, limit: float
) -> None:
    problem = Problem.of(
        placement, Costs.uniform(placement, 3, 4, 2, 1, 1, 0.5), microbatches, limit
    )
    assert lower_bound(problem).cost == pytest.approx(cheapest(problem), rel=1e-9)


@given(
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 8),
    order=st.integers(0, 2**32),
    costs=st.integers(0, 2**32),
    whole=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_no_random_order_costs_less_under_the_memory_it_takes(
    placement: Placement, microbatches: int, order: int, costs: int, whole: bool
) -> None:
    schedule = split(random_order(placement, microbatches, order))
    prices = whole_costs(placement, costs) if whole else random_costs(placement, costs)
    problem, cost = own_problem(schedule, prices)
    assert_not_above(lower_bound(problem).cost, cost)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@given(
    stages=st.integers(1, 8),
    more=st.integers(0, 12),
    seed=st.integers(0, 2**32),
    uniform=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_no_known_schedule_costs_less_under_the_memory_it_takes(
    name: str, stages: int, more: int, seed: int, uniform: bool
) -> None:
    schedule = build(name, stages, 2 * stages - 1 + more)
    draw = random.Random(seed)
    t_f, t_b, t_w, t_comm = (draw.uniform(0, 5) for _ in range(4))
    costs = random_costs(linear(stages), seed)
    if uniform:
        costs = Costs.uniform(linear(stages), t_f, t_b, t_w, t_comm, m_w=draw.random())
    problem, cost = own_problem(schedule, costs)
    assert_not_above(lower_bound(problem).cost, cost)


@given(
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 6),
    seed=st.integers(0, 2**32),
    stage=st.integers(0, 10),
    more=st.floats(0, 4),
)
@settings(max_examples=60, deadline=None)
def test_memory_never_raises_the_bound_and_nothing_lowers_it_below_the_work(
    placement: Placement, microbatches: int, seed: int, stage: int, more: float
) -> None:
    costs = random_costs(placement, seed)
    limits = [1.5 * sum(row) for row in costs.m_b]
    less = lower_bound(Problem.of(placement, costs, microbatches, limits))
    limits[stage % len(limits)] += more
    problem = Problem.of(placement, costs, microbatches, limits)
    bound = lower_bound(problem)
    assert problem.ideal * (1 - 1e-9) <= bound.cost <= less.cost * (1 + 1e-9)
    free = lower_bound(Problem.of(placement, costs, microbatches))
    assert free.cost <= bound.cost * (1 + 1e-9)


@pytest.mark.parametrize("row", range(12))
def test_zb_h1_is_optimal_with_the_memory_of_1f1b(row: int) -> None:
    """The paper's ZB-1p finds nothing better either (section 5.3)."""
    profile = paper_profiles()[row]
    problem = Problem.of(
        linear(profile.stages), profile.costs, profile.microbatches, float(profile.stages)
    )
    bound = lower_bound(problem)
    assert problem.bubble_rate(bound.cost) == pytest.approx(profile.bubble_rates["zb-1p"], abs=1e-4)
    cost = simulate(build("zb-h1", profile.stages, profile.microbatches), profile.costs).cost
    assert bound.cost == pytest.approx(cost, rel=1e-9)


@pytest.mark.parametrize("row", range(12))
def test_the_papers_zb_2p_is_not_below_the_bound(row: int) -> None:
    profile = paper_profiles()[row]
    problem = Problem.of(
        linear(profile.stages), profile.costs, profile.microbatches, 2.0 * profile.stages
    )
    rate = problem.bubble_rate(lower_bound(problem).cost)
    assert rate <= profile.bubble_rates["zb-2p"] + 5e-5


def test_few_microbatches_bind_zb_2p_more_than_its_memory() -> None:
    """With 24 microbatches on 8 stages the published 4.33 % is the optimum."""
    profile = paper_profiles()[0]
    bounds = [
        lower_bound(Problem.of(linear(8), profile.costs, 24, limit)) for limit in (16.0, math.inf)
    ]
    for bound in bounds:
        rate = 1 - 24 * (18.522 + 18.086 + 9.337) / bound.cost
        assert rate == pytest.approx(profile.bubble_rates["zb-2p"], abs=5e-5)
        assert bound.reason is Reason.COUPLING


@pytest.mark.parametrize(
    ("stages", "microbatches", "times", "hidden", "rate"),
    [
        (16, 48, (14.407, 14.38, 9.676, 1.61), 4096, 0.0697),
        (16, 64, (14.412, 14.393, 9.688, 1.621), 4096, 0.0533),
        (16, 128, (14.316, 14.306, 9.639, 1.619), 4096, 0.0274),
    ],
)
def test_the_papers_zb_v_is_optimal_on_16_stages(
    stages: int,
    microbatches: int,
    times: tuple[float, float, float, float],
    hidden: int,
    rate: float,
) -> None:
    """Table 8, times of a chunk: ZB-V with the memory of 1F1B, 2p chunks."""
    m_w = 32 * hidden / (34 * hidden + 5 * 32 * 1024)
    costs = Costs.uniform(v_shape(stages), *times, m_w=m_w)
    problem = Problem.of(v_shape(stages), costs, microbatches, 2.0 * stages)
    assert problem.bubble_rate(lower_bound(problem).cost) == pytest.approx(rate, abs=1e-4)


@pytest.mark.parametrize(
    ("stages", "microbatches", "limit"), [(3, 6, 3.0), (3, 6, 4.0), (4, 8, 4.0)]
)
def test_cp_sat_proves_the_same(stages: int, microbatches: int, limit: float) -> None:
    """Its proof knows nothing of this bound."""
    placement = linear(stages)
    problem = Problem.of(
        placement, Costs.uniform(placement, 10, 10, 7, 1, m_w=0.45), microbatches, limit
    )
    incumbent = build("zb-h1", stages, microbatches)
    optimum = solve_cpsat(problem, incumbent, time_limit=60.0, lower_bound=0.0)
    assert optimum.bound == pytest.approx(optimum.cost, rel=1e-6)
    assert lower_bound(problem).cost == pytest.approx(optimum.cost, rel=1e-6)


@pytest.mark.parametrize("placement", [linear(4), v_shape(4), interleaved(4, 3)])
def test_a_single_microbatch_takes_the_whole_way(placement: Placement) -> None:
    """m = 1: nothing overlaps but W's, which all run after the last B on stage 0 or before it."""
    costs = Costs.uniform(placement, 3, 4, 2, 1)
    problem = Problem.of(placement, costs, 1)
    chunks = placement.num_positions
    hops = sum(placement.owner(one)[0] != placement.owner(one + 1)[0] for one in range(chunks - 1))
    bound = lower_bound(problem)
    assert bound.cost == pytest.approx(chunks * (3 + 4) + 2 * hops + 2)


def test_one_microbatch_at_a_time_costs_a_way_each() -> None:
    """Memory for one microbatch, all of it kept until W."""
    problem = Problem.of(linear(3), Costs.uniform(linear(3), 2, 3, 1, 1), 4, 1.0)
    way = 3 * (2 + 3) + 4 * 1
    assert lower_bound(problem).cost == pytest.approx(4 * (way + 1))


def test_the_parts_add_up() -> None:
    """4 stages at half of 1F1B's memory: by hand, T_F = T_B = 3, T_W = 2, no messages."""
    problem = Problem.of(linear(4), Costs.uniform(linear(4), 3, 3, 2), 8, 2.0)
    first = stage_bounds(problem)[0]
    # The first B comes after 4 F's and 3 B's, 21 ms; memory holds two F's, 6 ms.
    assert first.work == 8 * 8
    assert first.warm_up == 21 - 6
    # The last F is followed by 21 ms, B and W, and memory holds one more B and W, 5 ms.
    assert first.cool_down == 21 + 3 + 2 - 3 - 5 - 5
    assert lower_bound(problem).cost >= first.cost


@pytest.mark.parametrize("limit", [128.0, math.inf])
def test_large_problems_take_well_below_a_second(limit: float) -> None:
    placement = v_shape(64)
    costs = Costs.uniform(placement, 9.4, 9.7, 7.2, 0.9, m_w=0.5)
    row = (11.0, *costs.t_b[0][1:])
    uneven = replace(costs, t_b=(row, *costs.t_b[1:]))
    for one in (costs, uneven):
        bound = lower_bound(Problem.of(placement, one, 512, limit))
        assert bound.cost >= 512 * 2 * (9.4 + 9.7 + 7.2)
