"""Templates to start from: what their lags mean, and that some template always fits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.builders import interleaved_1f1b
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass
from zero_bubble.search.descent import lag_keys
from zero_bubble.search.families import Start, microbatches_in_flight, starts
from zero_bubble.search.problem import Problem
from zero_bubble.search.squeeze import Knobs, squeeze, template

TURNED = Placement(((2, 0), (1,), (3, 5, 4)))
PLACEMENTS = (linear(1), linear(5), v_shape(1), v_shape(4), interleaved(3, 2), TURNED)


def order(start: Start, stage: int, chunks: int, microbatches: int, types: range) -> list[Pass]:
    """Passes of these types on a stage, by ascending key; the backward stands as the fused one."""
    keys = lag_keys(start.family.base(chunks, microbatches), start.lags)[stage]
    passes = [
        (keys[which, one], Pass(Kind.F if which < chunks else Kind.BW, one, which % chunks))
        for which in types
        for one in range(microbatches)
    ]
    return [one for _, one in sorted(passes, key=lambda pair: float(pair[0]))]


@settings(max_examples=15)
@given(stages=st.integers(2, 6), chunks=st.integers(2, 4), groups=st.integers(1, 4), data=st.data())
def test_interleaved_groups_run_as_megatron_runs_them(
    stages: int, chunks: int, groups: int, data: st.DataObject
) -> None:
    placement, microbatches = interleaved(stages, chunks), groups * stages
    problem = Problem.of(placement, Costs.uniform(placement, 1, 1, 1), microbatches)
    megatron = interleaved_1f1b(stages, microbatches, chunks)
    start = next(one for one in starts(problem) if one.family.group == stages)
    stage = data.draw(st.integers(0, stages - 1))
    forwards = order(start, stage, chunks, microbatches, range(chunks))
    backwards = order(start, stage, chunks, microbatches, range(chunks, 2 * chunks))
    assert forwards == [*megatron.order(stage, [Kind.F])]
    assert backwards == [*megatron.order(stage, [Kind.BW])]


@pytest.mark.parametrize("limit", [1.0, 2.5, 4.0, 8.0, math.inf])
def test_linear_lags_fall_along_the_pipeline_and_fit(limit: float) -> None:
    problem = Problem.of(linear(4), Costs.uniform(linear(4), 1, 1, 1), 9, limit)
    lagged = [one for one in starts(problem) if one.family.name == "lag"]
    assert lagged
    for start in lagged:
        assert start.family.falling
        lags = start.lags[:, 1]
        assert all(one >= other for one, other in pairwise(lags))
        # B of microbatch j comes after F's up to j + h: h + 1 of them are in flight.
        assert math.floor(lags[0]) + 1 <= min(limit, 9)


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_a_v_takes_turns_without_a_gap_when_times_are_equal(stages: int) -> None:
    """A stage's four F's and B's fall on different places of the period of two F's and two B's."""
    placement = v_shape(stages)
    problem = Problem.of(placement, Costs.uniform(placement, 1, 1, 1), 4 * stages, 2 * stages)
    found = [one for one in starts(problem) if one.family.name == "v2"]
    assert found
    for start in found:
        assert start.family.period == 2
        for lags in start.lags:
            places = sorted(float(lag) % 2 for lag in lags)
            assert places == [0, 0.5, 1, 1.5]


@settings(max_examples=20)
@given(
    seed=st.integers(0, 10**6),
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 9),
    room=st.floats(1, 4),
)
def test_whatever_the_limits_some_template_runs(
    seed: int, placement: Placement, microbatches: int, room: float
) -> None:
    costs = random_costs(placement, seed)
    limits = [sum(row) * room for row in costs.m_b]
    problem = Problem.of(placement, costs, microbatches, limits)
    arrays, chunks = problem.arrays(), max(map(len, placement.positions))
    for start in starts(problem):
        assert start.lags.shape == (placement.num_stages, 2 * chunks)
        assert start.family.row_sets.shape[1] == 2 * chunks
    waves = [one for one in starts(problem) if one.family.name == "wave"]
    fitting = [
        what
        for one in waves
        if (what := template(arrays, lag_keys(one.family.base(chunks, microbatches), one.lags)))
    ]
    assert fitting
    assert all(squeeze(arrays, microbatches, what, Knobs()) >= 0 for what in fitting)


def test_microbatches_in_flight_are_what_memory_holds() -> None:
    costs = Costs.uniform(v_shape(2), 1, 1, 1, m_b=2)
    for limits, expected in (
        ((4, 9), (1, 2.25)),
        ((math.inf, 1000), (6, 6)),
    ):
        problem = Problem.of(v_shape(2), costs, 6, limits)
        assert np.allclose(microbatches_in_flight(problem), expected)
    free = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1, m_b=0), 6, 0.0)
    assert microbatches_in_flight(free).tolist() == [6, 6]
