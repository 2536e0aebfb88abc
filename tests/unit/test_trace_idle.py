"""Idle time: every stretch without a pass has one cause, and together they are all there is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import random_costs, random_order
from tests.unit.trace_runs import made_run
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import simulate
from zero_bubble.trace.idle import (
    Cause,
    Gap,
    idle_by_cause,
    measured_gaps,
    predicted_gaps,
    waits_by_source,
)
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.merge import merge
from zero_bubble.trace.rank_file import Phase, TracedPass

F0, B0, W0 = Pass(Kind.F, 0), Pass(Kind.B, 0), Pass(Kind.W, 0)
placements = st.sampled_from([linear(1), linear(3), v_shape(2), v_shape(3), interleaved(2, 3)])


@given(seed=st.integers(0, 10**6), placement=placements)
def test_causes_add_up_to_the_length_minus_the_work(seed: int, placement: Placement) -> None:
    (measured,) = merge(made_run(random_order(placement, 3, seed), seed=seed)).measured
    for gaps, work in zip(measured_gaps(measured), measured.work, strict=True):
        assert sum(idle_by_cause(gaps).values()) == pytest.approx(measured.length - work)
        assert all(gap.duration > -1e-9 for gap in gaps)
        times = [(gap.begin, gap.end) for gap in gaps]
        assert times == sorted(times)
        waits = sum(waits_by_source(gaps).values())
        assert waits == pytest.approx(
            sum(gap.duration for gap in gaps if gap.cause in (Cause.ACTIVATION, Cause.GRADIENT))
        )


@given(seed=st.integers(0, 10**6), placement=placements)
def test_a_prediction_waits_for_messages_or_has_no_work(seed: int, placement: Placement) -> None:
    timeline = simulate(random_order(placement, 3, seed), random_costs(placement, seed))
    length = max(row[-1].end for row in timeline.spans)
    for gaps, work in zip(predicted_gaps(timeline), timeline.work, strict=True):
        assert sum(gap.duration for gap in gaps) == pytest.approx(length - work)
        assert {gap.cause for gap in gaps if gap.duration > 1e-9} <= {
            Cause.ACTIVATION,
            Cause.GRADIENT,
            Cause.NO_WORK,
        }


def test_a_small_case_by_hand() -> None:
    """Two stages, one microbatch; times as one would draw them on paper."""
    measured = Measured(
        (0, 1),
        1,
        0.0,
        Schedule(linear(2), 1, ((F0, B0, W0), (F0, B0, W0))),
        (
            (TracedPass(F0, 0, 1, 4), TracedPass(B0, 4.5, 12, 15), TracedPass(W0, 15, 15, 17)),
            (TracedPass(F0, 0, 5, 8), TracedPass(B0, 8, 8, 11), TracedPass(W0, 12, 12, 14)),
        ),
        (
            (Phase("finalize", 17.5, 18), Phase("optimizer step", 18, 20)),
            (Phase("post-validation", 11.25, 11.5), Phase("finalize", 14, 15)),
        ),
        (),
    )
    first, second = measured_gaps(measured)
    assert first == (
        Gap(Cause.NO_WORK, 0, 1, before=F0),
        Gap(Cause.BETWEEN, 4, 4.5, before=B0),
        Gap(Cause.GRADIENT, 4.5, 12, source=1, before=B0),
        Gap(Cause.NO_WORK, 17, 17.5),
        Gap(Cause.FINALIZE, 17.5, 18, phase="finalize"),
        Gap(Cause.OPTIMIZER, 18, 20, phase="optimizer step"),
    )
    assert second == (
        Gap(Cause.NO_WORK, 0, 5, source=0, before=F0),
        Gap(Cause.BETWEEN, 11, 11.25, before=W0),
        Gap(Cause.OPTIMIZER, 11.25, 11.5, before=W0, phase="post-validation"),
        Gap(Cause.BETWEEN, 11.5, 12, before=W0),
        Gap(Cause.FINALIZE, 14, 15, phase="finalize"),
        Gap(Cause.NO_WORK, 15, 20),
    )
    assert (measured.cost, measured.work, measured.bubble_rate) == (16, (8, 8), 0.5)
    assert waits_by_source(first) == {(Cause.GRADIENT, 1): 7.5}
    assert waits_by_source(second) == {}


def test_in_a_v_a_stage_waits_for_its_neighbours() -> None:
    timeline = simulate(build("zb-v", 4, 8), Costs.uniform(v_shape(4), 5, 6, 4, t_comm=0.5))
    sources = [
        {gap.source for gap in row if gap.cause is not Cause.NO_WORK}
        for row in predicted_gaps(timeline)
    ]
    assert sources[0] == {1}
    assert sources[3] == {2}
    assert sources[1] <= {0, 2}
    assert sources[2] <= {1, 3}


def test_the_turn_of_a_v_and_a_pass_without_input_wait_for_the_host() -> None:
    """One stage holds both halves: nothing comes by message."""
    order = (F0, Pass(Kind.F, 0, 1), Pass(Kind.BW, 0, 1), Pass(Kind.BW, 0, 0))
    row = tuple(TracedPass(what, 3 * n, 3 * n + 1, 3 * n + 3) for n, what in enumerate(order))
    measured = Measured((0,), 1, 0.0, Schedule(v_shape(1), 1, (order,)), (row,), ((),), ())
    assert measured_gaps(measured) == (
        (
            Gap(Cause.NO_WORK, 0, 1, before=order[0]),
            Gap(Cause.BETWEEN, 3, 4, before=order[1]),
            Gap(Cause.BETWEEN, 6, 7, before=order[2]),
            Gap(Cause.BETWEEN, 9, 10, before=order[3]),
        ),
    )
