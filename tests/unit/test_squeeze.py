"""A squeezed template is a legal schedule within its limits, and costs no more than is claimed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.builders import zb_h1
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.descent import lag_keys
from zero_bubble.search.families import Start, starts
from zero_bubble.search.orders import decode
from zero_bubble.search.problem import Floats, Problem
from zero_bubble.search.squeeze import Knobs, squeeze, template
from zero_bubble.simulate import simulate

TURNED = Placement(((2, 0), (1,), (3, 5, 4)))
PLACEMENTS = (linear(1), linear(4), v_shape(3), interleaved(3, 2), interleaved(2, 3), TURNED)
KNOBS = Knobs()
SETTINGS = (
    KNOBS,
    Knobs(0.0, 0.01, 0.0, 99.0, 0.0, 0.0, 0.01, 0.0, 1.0),
    Knobs(1.0, 1.0, 1e9, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0),
    Knobs(0.25, 0.3, 2.0, 0.5, 5.0, 0.0, 0.6, 1e9, 3.0),
    Knobs(0.5, 0.6, 1.0, 0.0, 1e9, 0.5, 0.6, 1.0, 4.0),
)


def keys_of(start: Start, problem: Problem) -> Floats:
    chunks = max(map(len, problem.placement.positions))
    return lag_keys(start.family.base(chunks, problem.num_microbatches), start.lags)


def squeezed(problem: Problem, keys: Floats, knobs: Knobs) -> tuple[float, Schedule] | None:
    """The cost claimed, and the order; None if the template does not fit or cannot run."""
    arrays, microbatches = problem.arrays(), problem.num_microbatches
    what = template(arrays, keys)
    if what is None:
        return None
    chunks = max(map(len, problem.placement.positions))
    rows = np.empty((problem.num_stages, 3 * chunks * microbatches), np.int64)
    cost = squeeze(arrays, microbatches, what, knobs, rows)
    return (cost, decode(problem, rows, "squeezed")) if cost >= 0 else None


def linear_keys(lags: list[float], microbatches: int) -> Floats:
    """F of microbatch j at j, B at j + the stage's lag."""
    one = np.arange(microbatches, dtype=np.float64)
    return np.stack([np.stack([one, one + lag]) for lag in lags])


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 9),
    room=st.floats(1, 6),
)
def test_every_template_that_fits_gives_a_legal_schedule(
    seed: int, placement: Placement, microbatches: int, room: float
) -> None:
    costs = random_costs(placement, seed)
    limits = [sum(row) * room for row in costs.m_b]
    problem = Problem.of(placement, costs, microbatches, limits)
    ran = 0
    for index, start in enumerate(starts(problem)):
        found = squeezed(problem, keys_of(start, problem), SETTINGS[(seed + index) % len(SETTINGS)])
        if found is None:
            continue
        ran += 1
        cost, schedule = found
        assert check(schedule, costs=costs, memory_limit=limits) == []
        assert bit_identical_order(schedule) == []
        assert simulate(schedule, costs).cost <= cost * (1 + 1e-9)
    assert ran > 0


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 6),
)
def test_a_template_fits_just_when_its_order_with_immediate_w_s_fits(
    seed: int, placement: Placement, microbatches: int
) -> None:
    costs = random_costs(placement, seed)
    problem = Problem.of(placement, costs, microbatches)
    chunks = max(map(len, placement.positions))
    for start in starts(problem)[::5]:
        keys = keys_of(start, problem)
        rows, peaks = [], []
        for stage, held in enumerate(placement.positions):
            passes = sorted(
                (float(keys[stage, kind * chunks + chunk, one]), kind, chunk, one)
                for kind in range(2)
                for chunk in range(len(held))
                for one in range(microbatches)
            )
            memory = np.cumsum(
                [(-1) ** kind * costs.m_b[stage][chunk] for _, kind, chunk, _ in passes]
            )
            rows.append([(kind, chunk, one) for _, kind, chunk, one in passes])
            peaks.append(float(memory.max()))
        what = template(Problem.of(placement, costs, microbatches, peaks).arrays(), keys)
        assert what is not None
        for stage, row in enumerate(rows):
            places = [int(what.place[stage, kind * chunks + c, one]) for kind, c, one in row]
            assert places == [*range(len(row))]
        arrays = problem.arrays()._replace(limit=np.array(peaks) * 0.999)
        assert template(arrays, keys) is None


def test_a_chunk_that_a_stage_does_not_have_has_no_place() -> None:
    problem = Problem.of(TURNED, Costs.uniform(TURNED, 1, 1, 1), 2)
    what = template(problem.arrays(), keys_of(starts(problem)[0], problem))
    assert what is not None
    # The second stage has one chunk of three: F is type 0, B type 3.
    absent = [which for which in range(6) if np.all(what.place[1, which] == -1)]
    assert absent == [1, 2, 4, 5]


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (5, 5, 3)])
def test_lags_of_1f1b_give_the_cost_of_zb_h1(times: tuple[int, int, int]) -> None:
    """ZB-H1 is optimal at this memory: paper, section 2.2, and the lower bound's tests."""
    stages, microbatches = 4, 9
    costs = Costs.uniform(linear(stages), *times)
    problem = Problem.of(linear(stages), costs, microbatches, stages)
    keys = linear_keys([stages - 1 - stage + 0.5 for stage in range(stages)], microbatches)
    costs_found = [one[0] for knobs in SETTINGS if (one := squeezed(problem, keys, knobs))]
    assert min(costs_found) == simulate(zb_h1(stages, microbatches), costs).cost


def test_a_pass_runs_ahead_of_its_template_only_where_memory_allows() -> None:
    """The template runs one microbatch after the other; without a limit nobody waits for that."""
    costs = Costs.uniform(linear(2), 1, 1, 1)
    keys = linear_keys([0.5, 0.5], 4)
    eager = Knobs(0.0, 0.01, 1e9, 0.0, 1e9, 0.0, 0.01, 1e9, 0.0)
    for limit, first_b in ((1.0, 1), (2.0, 2), (math.inf, 3)):
        found = squeezed(Problem.of(linear(2), costs, 4, limit), keys, eager)
        assert found is not None
        kinds = [one.kind for one in found[1].passes[0]]
        assert kinds.index(Kind.B) == first_b
    # Far enough below the limit, the first chunk's F's never run ahead.
    found = squeezed(Problem.of(linear(2), costs, 4), keys, eager._replace(spare=99.0))
    assert found is not None
    assert found[1].passes[0][:2] == (Pass(Kind.F, 0), Pass(Kind.B, 0))


@pytest.mark.parametrize(
    ("gap", "row"), [(0.01, "0F0 0F1 0I0 0W0 0I1 0W1"), (1.0, "0F0 0F1 0I0 0I1 0W0 0W1")]
)
def test_the_gap_that_is_worth_a_w(gap: float, row: str) -> None:
    """Stage 0 ends B of microbatch 0 a ms before it can start the other; a W takes 4."""
    costs = Costs.uniform(linear(2), 1, 1, 4, t_comm=1)
    keys = linear_keys([1.5, 0.5], 2)
    found = squeezed(Problem.of(linear(2), costs, 2), keys, KNOBS._replace(late_gap=gap))
    assert found is not None
    assert str(found[1]).splitlines()[0] == row


def test_a_template_that_can_never_run_is_refused() -> None:
    """Stage 1 means to take microbatch 1 first, and has no memory for the one that comes."""
    problem = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2, 1)
    keys = linear_keys([0.5, 0.5], 2)
    keys[1] = [[2, 0], [3, 1]]
    what = template(problem.arrays(), keys)
    assert what is not None
    assert squeeze(problem.arrays(), 2, what, KNOBS) == -1
