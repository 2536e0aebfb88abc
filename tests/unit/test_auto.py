"""What the search finds: always legal, never worse than what is known, and the optimum where small.

Legality, memory and cost come from the checker and the simulator; optima from the paper, from lower
bounds and from a solver's proof.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_bubble.builders import build, zb_h1
from zero_bubble.check import bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs, Table, paper_profiles, paper_v_profiles
from zero_bubble.export.json_io import load_schedule, save_schedule
from zero_bubble.export.pytorch_csv import FORMS, load_csv, save_csv
from zero_bubble.jitter import jittered
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.search.auto import EFFORTS, Progress, auto
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.exact import solve_cpsat
from zero_bubble.search.paper import paper_method
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

TIMES = st.one_of(st.just(0.0), st.integers(1, 9).map(float), st.floats(0.01, 9))


@st.composite
def placements(draw: st.DrawFn, most: int = 6) -> Placement:
    stages = draw(st.integers(1, most))
    shape = draw(st.sampled_from(["linear", "interleaved", "v", "custom"]))
    if shape == "linear":
        return linear(stages)
    if shape == "interleaved":
        return interleaved(stages, draw(st.integers(2, 3)))
    if shape == "v":
        return v_shape(stages)
    counts = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    positions = draw(st.permutations(range(sum(counts))))
    ends = [sum(counts[: stage + 1]) for stage in range(stages)]
    return Placement(
        tuple(tuple(positions[end - count : end]) for count, end in zip(counts, ends, strict=True))
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any times and memory, also none, and limits from the least that works to 2p microbatches."""
    placement = draw(placements())
    stages = placement.num_stages

    def table(values: st.SearchStrategy[float]) -> Table:
        return tuple(tuple(draw(values) for _ in held) for held in placement.positions)

    m_b = table(st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.3]))
    edges = draw(
        st.lists(
            st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1), TIMES), max_size=3
        )
    )
    costs = Costs(
        t_f=table(TIMES),
        t_b=table(TIMES),
        t_w=table(TIMES),
        m_b=m_b,
        m_w=tuple(tuple(draw(st.sampled_from([0, 0.4, 1])) * one for one in row) for row in m_b),
        t_comm=draw(TIMES),
        t_edges=tuple(edge for edge in edges if edge[0] != edge[1]),
    )
    room = st.one_of(st.just(1.0), st.floats(1, 2 * stages), st.just(math.inf))
    limits = [math.inf if (factor := draw(room)) == math.inf else factor * sum(row) for row in m_b]
    # Long batches are found by repeating a steady state.
    microbatches = draw(st.integers(1, 12 if stages > 3 else 36))
    return Problem.of(placement, costs, microbatches, limits)


@settings(max_examples=18)
@given(problem=problems())
def test_any_times_and_limits_give_a_legal_schedule_within_them(
    tmp_path_factory: pytest.TempPathFactory, problem: Problem
) -> None:
    solution = auto(problem, effort="quick")
    schedule, costs = solution.schedule, problem.costs
    assert schedule.placement == problem.placement
    assert schedule.num_microbatches == problem.num_microbatches
    assert check(schedule, costs=costs, memory_limit=problem.memory_limit) == []
    assert bit_identical_order(schedule) == []
    for forward_only in (False, True):
        assert check_program(lower(schedule, forward_only=forward_only)) == []

    timeline = simulate(schedule, costs)
    assert solution.cost == pytest.approx(timeline.cost, rel=1e-9)
    for held, limit in zip(timeline.peak_memory, problem.memory_limit, strict=True):
        assert held <= limit * (1 + 1e-9)
    assert solution.bound <= solution.cost
    assert lower_bound(problem).cost <= solution.cost * (1 + 1e-9)

    folder = tmp_path_factory.getbasetemp()
    save_schedule(schedule, folder / "one.json", costs)
    assert load_schedule(folder / "one.json") == schedule
    # A file in PyTorch's form names positions: chunks come back in the order of the model.
    if all(list(held) == sorted(held) for held in problem.placement.positions):
        for form in FORMS:
            save_csv(schedule, folder / "one.csv", form)
            assert load_csv(folder / "one.csv") == schedule


@settings(max_examples=5)
@given(problem=problems())
def test_the_same_problem_gives_the_same_schedule_whatever_the_processors(problem: Problem) -> None:
    first = auto(problem, effort="quick")
    assert auto(problem, effort="quick") == first
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 1)
        assert auto(problem, effort="quick") == first


@settings(max_examples=5)
@given(problem=problems())
def test_progress_never_gets_worse_and_never_passes_the_bound(problem: Problem) -> None:
    told: list[Progress] = []
    solution = auto(problem, effort="quick", progress=told.append)
    assert all(one.bound == lower_bound(problem).cost for one in told)
    assert all(one.cost >= other.cost for one, other in pairwise(told))
    # The search counts in ticks of at most a 100,000th of the longest pass.
    assert all(one.cost >= one.bound for one in told)
    assert all(one.cost >= solution.cost * (1 - 1e-4) for one in told)
    assert all(one.step for one in told)


@settings(max_examples=12)
@given(stages=st.integers(1, 6), more=st.integers(0, 8), time=st.integers(1, 9))
def test_equal_times_and_twice_the_memory_leave_no_bubble(
    stages: int, more: int, time: int
) -> None:
    """ZB-H2 (paper, section 2.2): stage 0 has 2p-1 microbatches in flight."""
    costs = Costs.uniform(linear(stages), time, time, time)
    problem = Problem.of(linear(stages), costs, 2 * stages - 1 + more, 2 * stages - 1)
    assert auto(problem, effort="quick").cost == problem.ideal


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 5), (4, 8), (5, 14)])
def test_a_v_with_equal_times_has_no_bubble_at_the_memory_of_1f1b(
    stages: int, microbatches: int
) -> None:
    """The paper's section 6; a chunk is half a stage."""
    placement = v_shape(stages)
    costs = Costs.uniform(placement, 1, 1, 1, m_b=0.5)
    problem = Problem.of(placement, costs, microbatches, stages)
    assert auto(problem, effort="quick").cost == problem.ideal


@pytest.mark.parametrize("row", [0, 3])
def test_nothing_beats_zb_h1_at_the_memory_of_1f1b(row: int) -> None:
    profile = paper_profiles()[row]
    stages, microbatches = profile.stages, profile.microbatches
    problem = Problem.of(linear(stages), profile.costs, microbatches, stages)
    solution = auto(problem, effort="quick")
    handcrafted = simulate(zb_h1(stages, microbatches), profile.costs).cost
    assert solution.cost == pytest.approx(handcrafted, rel=1e-9)
    assert solution.cost == pytest.approx(lower_bound(problem).cost, rel=1e-9)
    assert solution.is_optimal


whole = st.integers(1, 20)


@settings(max_examples=12)
@given(
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 20),
    times=st.tuples(whole, whole, whole),
    t_comm=st.integers(0, 5),
    room=st.floats(1, 2),
)
def test_linear_schedules_are_never_worse_than_the_known_ones(
    stages: int, microbatches: int, times: tuple[int, int, int], t_comm: int, room: float
) -> None:
    costs = Costs.uniform(linear(stages), *times, t_comm)
    problem = Problem.of(linear(stages), costs, microbatches, room * stages)
    cost = auto(problem, effort="quick").cost
    assert cost <= paper_method(problem).cost * (1 + 1e-9)
    for name in ("zb-h1", "zb-h2"):
        known = build(name, stages, microbatches)
        if not check(known, costs=costs, memory_limit=problem.memory_limit):
            assert cost <= simulate(known, costs).cost * (1 + 1e-9)


@settings(max_examples=12)
@given(
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 16),
    times=st.tuples(whole, whole, whole),
    t_comm=st.integers(0, 5),
    room=st.sampled_from([0.5, 0.75, 1.0]),
)
def test_v_schedules_are_never_worse_than_the_known_ones(
    stages: int, microbatches: int, times: tuple[int, int, int], t_comm: int, room: float
) -> None:
    placement = v_shape(stages)
    costs = Costs.uniform(placement, *times, t_comm, m_b=0.5)
    # V-Half takes half of 1F1B's memory and a chunk more (Qi et al. 2024).
    problem = Problem.of(placement, costs, microbatches, room * stages + 0.5)
    cost = auto(problem, effort="quick").cost
    for name in ("zb-v", "v-half", "v-min"):
        known = build(name, stages, microbatches, costs=costs)
        if not check(known, costs=costs, memory_limit=problem.memory_limit):
            assert cost <= simulate(known, costs).cost * (1 + 1e-9), name


@settings(max_examples=12)
@given(
    stages=st.integers(1, 5),
    chunks=st.integers(2, 3),
    microbatches=st.integers(1, 12),
    times=st.tuples(whole, whole, whole),
    t_comm=st.integers(0, 5),
    room=st.integers(0, 2),
)
def test_interleaved_schedules_are_never_worse_than_the_known_one(
    stages: int,
    chunks: int,
    microbatches: int,
    times: tuple[int, int, int],
    t_comm: int,
    room: int,
) -> None:
    placement = interleaved(stages, chunks)
    costs = Costs.uniform(placement, *times, t_comm)
    known = build("zb-interleaved", stages, microbatches, chunks=chunks)
    needs = simulate(known, costs)
    problem = Problem.of(placement, costs, microbatches, max(needs.peak_memory) + room)
    assert auto(problem, effort="quick").cost <= needs.cost * (1 + 1e-9)


SMALL = {
    "linear, 1F1B's memory": (linear(3), 5, 3.0),
    "linear, a third more": (linear(3), 4, 4.0),
    "V, half of 1F1B's": (v_shape(2), 3, 2.0),
    "interleaved, 5 chunks of 8": (interleaved(2, 2), 4, 5.0),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_problems_are_solved_to_the_proven_optimum(name: str) -> None:
    pytest.importorskip("ortools")
    placement, microbatches, limit = SMALL[name]
    problem = Problem.of(placement, Costs.uniform(placement, 4, 5, 3, 1), microbatches, limit)
    found = auto(problem, effort="quick")
    proven = solve_cpsat(problem, found.schedule, time_limit=60)
    assert proven.is_optimal
    assert found.cost == pytest.approx(proven.cost, rel=1e-9)


@pytest.mark.parametrize(
    "placement", [linear(3), v_shape(3), interleaved(3, 2)], ids=lambda one: one.name
)
def test_jitter_chooses_a_schedule_that_is_no_worse_when_times_vary(placement: Placement) -> None:
    costs = Costs.uniform(placement, 3, 5, 2, 0.5, m_b=1 / placement.num_chunks(0))
    problem = Problem.of(placement, costs, 9, 4)
    steady, sharp = auto(problem, effort="quick", jitter=0.1), auto(problem, effort="quick")
    assert auto(problem, effort="quick", jitter=0.1) == steady
    assert check(steady.schedule, costs=costs, memory_limit=4) == []
    assert bit_identical_order(steady.schedule) == []
    assert steady.cost == pytest.approx(simulate(steady.schedule, costs).cost, rel=1e-9)
    assert sharp.cost <= steady.cost <= sharp.cost * 1.1
    # Not the noise that the choice was made with, and the same for both.
    one, other = (
        jittered(found.schedule, costs, sigma=0.1, repeats=400, seed=7) for found in (steady, sharp)
    )
    error = float((one.costs - other.costs).std()) / math.sqrt(400)
    assert one.mean <= other.mean + 3 * error


@pytest.mark.slow
def test_more_effort_is_not_worse() -> None:
    profile = paper_v_profiles()[0]
    placement = v_shape(3)
    costs = Costs.uniform(
        placement, profile.costs.t_f[0][0], profile.costs.t_b[0][0], profile.costs.t_w[0][0], 1.0
    )
    problem = Problem.of(placement, costs, 7, 5)
    quick, normal = (auto(problem, effort=one).cost for one in ("quick", "normal"))
    assert normal <= quick


def test_passes_that_take_no_time_cost_nothing() -> None:
    for placement in (linear(3), v_shape(3)):
        problem = Problem.of(placement, Costs.uniform(placement, 0, 0, 0), 5, 3)
        solution = auto(problem, effort="quick")
        assert (solution.cost, solution.bound, solution.gap) == (0, 0, 0)
        assert check(solution.schedule, memory_limit=3) == []


def test_a_limit_that_cannot_be_met_names_the_least() -> None:
    costs = Costs.uniform(v_shape(2), 1, 1, 1, m_b=10)
    with pytest.raises(ValueError, match=r"19 of stage 1 cannot be met: .* takes 20 there"):
        auto(Problem.of(v_shape(2), costs, 4, [20, 19]))


def test_wrong_settings_are_answered_with_right_ones() -> None:
    problem = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2)
    assert set(EFFORTS) == {"quick", "normal", "thorough"}
    with pytest.raises(ValueError, match="one of quick, normal, thorough, not 'hard'"):
        auto(problem, effort="hard")
    for jitter in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"such as 0.05, not {jitter}"):
            auto(problem, jitter=jitter)


def test_without_a_limit_no_more_memory_is_held_than_the_least_cost_needs() -> None:
    """ZB-H2 has no bubble with 2p-1 microbatches (paper, Table 2): more would buy nothing."""
    problem = Problem.of(linear(4), Costs.uniform(linear(4), 1, 1, 1), 24)
    solution = auto(problem, effort="quick")
    assert solution.is_optimal
    assert max(simulate(solution.schedule, problem.costs).peak_memory) <= 8
