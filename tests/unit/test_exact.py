"""The exact scheduler finds what trying all orders finds, and proves no more than is true."""

from __future__ import annotations

import itertools
import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.brute_force import all_costs, one_by_one
from tests.unit.orders import random_costs
from zero_bubble.builders import build
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Pass, Schedule
from zero_bubble.search.exact import SOLVERS, Progress, solve
from zero_bubble.search.exact_block import cut
from zero_bubble.search.exact_order import KnownOrder
from zero_bubble.search.exact_ticks import to_ticks
from zero_bubble.search.orders import encode, evaluate
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

pytest.importorskip("ortools")
pytest.importorskip("highspy")

TURNED = Placement(((0, 1), (2,)))
"""The second stage has to wait for the first one's second chunk."""


def draw_costs(placement: Placement, seed: int, m_w: float, digits: int) -> Costs:
    draw = random.Random(seed)

    def table(low: float) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(round(draw.uniform(low, 9), digits) for _ in held) for held in placement.positions
        )

    one = Costs.uniform(placement, 1, 1, 1, m_w=m_w)
    return Costs(
        t_f=table(1),
        t_b=table(1),
        t_w=table(0),
        m_b=one.m_b,
        m_w=one.m_w,
        t_comm=round(draw.uniform(0, 2), digits),
        t_edges=((1, 0, round(draw.uniform(0, 4), digits)),),
    )


TINY: dict[str, tuple[Placement, int, float | tuple[float, ...], float]] = {
    "linear": (linear(2), 3, math.inf, 1.0),
    "linear, memory for 2": (linear(2), 3, 2.0, 1.0),
    "linear, memory for 1.5": (linear(3), 2, 1.5, 0.4),
    "V, memory for 2 of 4": (v_shape(2), 2, 2.0, 0.7),
    "V, memory for 2.5 and 2 of 4": (v_shape(2), 2, (2.5, 2.0), 0.5),
    "interleaved, memory for 2 of 4": (interleaved(2, 2), 2, 2.0, 0.3),
    "turned": (TURNED, 2, (2.5, 1.0), 0.5),
}


def tiny(name: str, seed: int) -> Problem:
    placement, microbatches, limit, m_w = TINY[name]
    costs = draw_costs(placement, seed, m_w, digits=1 if seed % 2 else 15)
    return Problem.of(placement, costs, microbatches, limit)


def require_legal(problem: Problem, schedule: Schedule) -> None:
    assert check(schedule, costs=problem.costs, memory_limit=problem.memory_limit) == []


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", TINY)
def test_finds_and_proves_the_optimum_of_all_orders(name: str, seed: int, solver: str) -> None:
    problem = tiny(name, seed)
    found = solve(problem, one_by_one(problem.placement, problem.num_microbatches), solver=solver)
    best = min(all_costs(problem, True).values())
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert found.bound == pytest.approx(best, rel=1e-9)
    assert found.is_optimal
    assert found.how == solver
    assert simulate(found.schedule, problem.costs).cost == pytest.approx(found.cost, rel=1e-12)
    assert bit_identical_order(found.schedule) == []
    require_legal(problem, found.schedule)


def test_the_memory_limits_of_these_problems_bind() -> None:
    free = tiny("linear", 1)
    tight = Problem.of(free.placement, free.costs, free.num_microbatches, 2.0)
    assert min(all_costs(free, True).values()) < min(all_costs(tight, True).values())


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(4))
def test_without_microbatch_order_it_finds_the_optimum_of_all_legal_orders(
    seed: int, solver: str
) -> None:
    placement = linear(2)
    costs = draw_costs(placement, seed, m_w=0.6, digits=15)
    problem = Problem.of(placement, costs, 2, (2.0, 1.7))
    incumbent = one_by_one(placement, 2)
    free = solve(problem, incumbent, solver=solver, bit_identical=False)
    best = min(all_costs(problem, False).values())
    assert free.cost == pytest.approx(best, rel=1e-9)
    assert free.is_optimal
    assert free.cost <= solve(problem, incumbent, solver=solver).cost * (1 + 1e-9)
    require_legal(problem, free.schedule)


def test_an_incumbent_in_any_microbatch_order_can_be_improved() -> None:
    problem = tiny("linear", 2)
    ascending = one_by_one(problem.placement, 3)
    name = (2, 0, 1)
    rows = tuple(
        tuple(Pass(one.kind, name[one.microbatch], one.chunk) for one in row)
        for row in ascending.passes
    )
    found = solve(problem, Schedule(problem.placement, 3, rows), bit_identical=False)
    assert found.cost <= min(all_costs(problem, True).values()) * (1 + 1e-9)
    assert found.is_optimal


@pytest.mark.parametrize("name", TINY)
def test_no_order_as_cheap_as_the_incumbent_breaks_a_known_pair(name: str) -> None:
    problem = tiny(name, 1)
    costs = all_costs(problem, True)
    near = sorted(costs.values())[len(costs) // 3]
    incumbent = next(rows for rows, cost in costs.items() if cost == near)
    rows = encode(Schedule(problem.placement, problem.num_microbatches, incumbent))
    ticks = to_ticks(problem, near)
    block = cut(problem, ticks, rows, bit_identical=True)
    known = KnownOrder(block)
    index = {code: at for at, code in enumerate(block.code.tolist())}
    open_pairs = len(known.undecided())
    assert open_pairs < sum(len(row) * (len(row) - 1) // 2 for row in block.rows)
    for order, cost in costs.items():
        if cost > near:
            continue
        assert cost >= (known.bound - ticks.error) * ticks.unit * (1 - 1e-12)
        schedule = Schedule(problem.placement, problem.num_microbatches, order)
        for row in encode(schedule).tolist():
            places = [index[code] for code in row if code in index]
            for one, other in itertools.combinations(places, 2):
                assert not known.before[other, one]


@given(seed=st.integers(0, 10**6), stages=st.integers(1, 5), microbatches=st.integers(1, 8))
def test_a_cost_in_ticks_less_the_error_is_no_more_than_in_milliseconds(
    seed: int, stages: int, microbatches: int
) -> None:
    schedule = build("zb-h1", stages, microbatches)
    problem = Problem.of(schedule.placement, random_costs(schedule.placement, seed), microbatches)
    cost = simulate(schedule, problem.costs).cost
    ticks = to_ticks(problem, cost)
    run = evaluate(ticks.arrays, microbatches, encode(schedule))
    assert run.end.tolist() == [round(end) for end in run.end]
    assert (run.cost - ticks.error) * ticks.unit <= cost
    assert run.cost * ticks.unit == pytest.approx(cost, rel=1e-6)


def test_times_with_few_decimals_are_not_rounded() -> None:
    placement = linear(4)
    costs = Costs.uniform(placement, 18.522, 18.086, 9.337, 0.601)
    ticks = to_ticks(Problem.of(placement, costs, 8), 500.0)
    assert ticks.unit == pytest.approx(0.001)
    assert ticks.error == 0
    assert ticks.arrays.t_f.tolist() == [18522.0] * 4
    assert ticks.arrays.delay_b.tolist() == [601.0, 601.0, 601.0, 0.0]


@pytest.mark.parametrize("solver", SOLVERS)
def test_zb_h1_is_optimal_in_its_own_memory(solver: str) -> None:
    placement = linear(3)
    problem = Problem.of(placement, Costs.uniform(placement, 1, 1, 1), 5, 3.0)
    found = solve(problem, build("zb-h1", 3, 5), solver=solver)
    # m (T_F + T_B + T_W) and a bubble of (p - 1)(T_F + T_B - T_W): the paper's Table 2.
    assert found.cost == 5 * 3 + 2 * (1 + 1 - 1)
    assert found.is_optimal


def test_zb_h1_is_optimal_at_full_size_without_a_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The times of the paper's first profile at 1p, where W keeps all of a pass's memory."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    placement = linear(8)
    problem = Problem.of(placement, Costs.uniform(placement, 18.522, 18.086, 9.337, 0.601), 24, 8.0)
    found = solve(problem, build("zb-h1", 8, 24), time_limit=30)
    assert found.is_optimal
    assert problem.bubble_rate(found.bound) == pytest.approx(0.1585, abs=5e-5)


@pytest.mark.parametrize("seed", range(3))
def test_both_solvers_prove_the_same_optimum(seed: int) -> None:
    placement = linear(3) if seed else v_shape(2)
    costs = draw_costs(placement, seed, m_w=0.5, digits=15)
    microbatches = 5 if seed else 3
    problem = Problem.of(placement, costs, microbatches, 3.5)
    incumbent = one_by_one(placement, microbatches)
    one, other = (solve(problem, incumbent, solver=solver) for solver in SOLVERS)
    assert one.is_optimal
    assert other.is_optimal
    assert one.cost == pytest.approx(other.cost, rel=1e-9)
    assert one.cost < simulate(incumbent, costs).cost
    for found in (one, other):
        require_legal(problem, found.schedule)


@pytest.mark.parametrize("solver", SOLVERS)
def test_without_time_the_incumbent_comes_back_with_a_bound_that_holds(solver: str) -> None:
    problem = tiny("linear, memory for 2", 2)
    incumbent = one_by_one(problem.placement, 3)
    found = solve(problem, incumbent, solver=solver, time_limit=0)
    assert found.schedule is incumbent
    assert found.cost == pytest.approx(simulate(incumbent, problem.costs).cost, rel=1e-12)
    assert problem.ideal <= found.bound <= min(all_costs(problem, True).values())


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_bound_that_is_met_needs_no_solver(solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny("linear", 1)
    best = solve(problem, one_by_one(problem.placement, 3))
    for package in ("ortools.sat.python", "highspy"):
        monkeypatch.setitem(sys.modules, package, None)
    again = solve(problem, best.schedule, solver=solver, lower_bound=best.cost)
    assert again.schedule is best.schedule
    assert again.is_optimal


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_missing_solver_is_an_error_with_a_remedy(
    solver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("ortools.sat.python", "highspy"):
        monkeypatch.setitem(sys.modules, package, None)
    problem = tiny("linear", 1)
    with pytest.raises(ValueError, match=r"pip install (ortools|highspy)"):
        solve(problem, one_by_one(problem.placement, 3), solver=solver)


@pytest.mark.parametrize("solver", SOLVERS)
def test_progress_only_gets_better(solver: str) -> None:
    problem = tiny("V, memory for 2.5 and 2 of 4", 1)
    told: list[Progress] = []
    incumbent = one_by_one(problem.placement, 2)
    found = solve(problem, incumbent, solver=solver, progress=told.append)
    assert found.cost < simulate(incumbent, problem.costs).cost
    for one, other in itertools.pairwise(told):
        assert one.seconds <= other.seconds
        assert one.cost >= other.cost
        assert one.bound <= other.bound
        assert one.gap >= other.gap
    assert (told[-1].cost, told[-1].bound) == (found.cost, found.bound)
    assert told[-1].gap == 0


@pytest.mark.parametrize("solver", SOLVERS)
def test_searches_repeat(solver: str) -> None:
    problem = tiny("linear", 2)
    one, other = (solve(problem, one_by_one(problem.placement, 3), solver=solver) for _ in "ab")
    assert one == other


def test_the_exact_scheduler_says_what_it_cannot_start_from() -> None:
    problem = tiny("linear, memory for 2", 1)
    good = one_by_one(problem.placement, 3)
    with pytest.raises(ValueError, match="no solver is called 'gurobi'; known: cp-sat, highs"):
        solve(problem, good, solver="gurobi")
    with pytest.raises(ValueError, match="time_limit must be"):
        solve(problem, good, time_limit=math.nan)
    with pytest.raises(ValueError, match="above the incumbent's cost"):
        solve(problem, good, lower_bound=1e6)
    with pytest.raises(ValueError, match="both must be the same"):
        solve(problem, one_by_one(problem.placement, 4))
    with pytest.raises(ValueError, match=r"not legal: stage 0.*memory"):
        solve(problem, build("gpipe", 2, 3))
    with pytest.raises(ValueError, match="fused backward"):
        solve(problem, build("1f1b", 2, 3))
    large = Problem.of(problem.placement, problem.costs, 2000)
    with pytest.raises(ValueError, match=r"11998 passes are too many .* improve_by_windows"):
        solve(large, one_by_one(problem.placement, 2000))
    backwards = tuple(
        tuple(Pass(one.kind, 2 - one.microbatch) for one in row) for row in good.passes
    )
    with pytest.raises(ValueError, match="out of order"):
        solve(problem, Schedule(problem.placement, 3, backwards))
    mixed = (good.passes[0], backwards[1])
    free = Problem.of(problem.placement, problem.costs, 3)
    rows = (tuple(sorted(mixed[0], key=lambda one: "FBW".index(one.kind))), mixed[1])
    with pytest.raises(ValueError, match="begins with 0F2"):
        solve(free, Schedule(problem.placement, 3, rows), bit_identical=False)
