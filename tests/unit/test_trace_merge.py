"""Merged traces: one clock, the figures by their definitions, and what is missing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import random_costs, random_order
from tests.unit.trace_runs import HELD, MESSAGE, made_run
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.placement import interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import simulate
from zero_bubble.trace.memory import held_after
from zero_bubble.trace.merge import load_traces, merge
from zero_bubble.trace.rank_file import RankTrace, TracedIteration, TracedPass, save_rank


def recorded(
    schedule: Schedule, costs: Costs, offsets: list[float], edges: bool = True
) -> list[RankTrace]:
    """A job that runs exactly as simulated, each rank by a clock of its own."""
    ranks = tuple(range(schedule.num_stages))
    return [
        RankTrace(
            stage,
            stage,
            ranks,
            schedule.placement,
            offset,
            tuple((stage, other, costs.comm(stage, other)) for other in ranks if other != stage)
            if edges
            else (),
            (
                TracedIteration(
                    7,
                    schedule.name,
                    schedule.num_microbatches,
                    tuple(
                        TracedPass(
                            span.what,
                            (row[index - 1].end if index else 0.0) - offset,
                            span.start - offset,
                            span.end - offset,
                        )
                        for index, span in enumerate(row)
                    ),
                ),
            ),
        )
        for stage, (row, offset) in enumerate(
            zip(simulate(schedule, costs).spans, offsets, strict=True)
        )
    ]


@given(
    seed=st.integers(0, 10**6),
    placement=st.sampled_from([linear(1), linear(3), v_shape(2), interleaved(2, 3)]),
)
def test_a_job_that_runs_as_simulated_has_the_simulators_figures(
    seed: int, placement: object
) -> None:
    assert isinstance(placement, type(linear(1)))
    schedule, costs = random_order(placement, 3, seed), random_costs(placement, seed)
    costs = dataclasses.replace(costs, t_bw=None)
    offsets = [100.0 * stage - 70 for stage in range(placement.num_stages)]
    (found,) = merge(recorded(schedule, costs, offsets)).measured
    expected = simulate(schedule, costs)
    assert found.schedule == schedule
    assert found.cost == pytest.approx(expected.cost)
    assert found.work == pytest.approx(expected.work)
    assert found.bubble_rate == pytest.approx(expected.bubble_rate, abs=1e-9)
    assert found.length == pytest.approx(max(row[-1].end for row in expected.spans))
    assert found.predict().cost == pytest.approx(expected.cost)
    for row, spans in zip(found.rows, expected.spans, strict=True):
        for one, span in zip(row, spans, strict=True):
            assert (one.ready, one.end) == pytest.approx((span.start, span.end))


def test_costs_are_medians_by_kind_stage_and_chunk() -> None:
    (found,) = merge(made_run(build("zb-v", 4, 8))).measured
    durations = sorted(
        one.end - one.ready for one in found.rows[2] if (one.what.kind, one.what.chunk) == ("B", 1)
    )
    assert found.costs.t_b[2][1] == pytest.approx((durations[3] + durations[4]) / 2)
    assert found.costs.t_comm == MESSAGE
    assert found.costs.comm(3, 1) == MESSAGE
    assert found.costs.t_bw is None


def test_the_fused_backward_is_halved_into_b_and_w() -> None:
    (found,) = merge(made_run(build("1f1b", 2, 4))).measured
    assert found.costs.t_bw is not None
    for fused, b, w in zip(found.costs.t_bw, found.costs.t_b, found.costs.t_w, strict=True):
        assert fused[0] == pytest.approx(b[0] + w[0])
        assert b == w
    assert found.predict().work == pytest.approx(found.work, rel=0.1)


def test_counted_bytes_give_the_memory_of_a_chunk_and_the_peak_of_a_stage() -> None:
    schedule = build("zb-h1", 3, 6)
    (found,) = merge(made_run(schedule)).measured
    assert found.costs.m_b == ((HELD[Kind.F],),) * 3
    assert found.costs.m_w == ((-HELD[Kind.W],),) * 3
    formula = simulate(schedule, Costs.uniform(linear(3), 1, 1, 1, m_b=3000, m_w=1000))
    assert found.peak_memory == formula.peak_memory == found.predict().peak_memory
    assert held_after(found.predict(), 1) == [one.held for one in found.rows[1]]
    (without,) = merge(made_run(schedule, counted=False)).measured
    assert without.peak_memory == (None,) * 3
    assert without.costs.m_b == ((0,),) * 3


def test_iterations_and_pipelines_are_apart(tmp_path: Path) -> None:
    schedule = build("zb-h1", 2, 3)
    for one in made_run(schedule, iterations=(10, 12)) + made_run(schedule, first_rank=2, seed=1):
        save_rank(one, tmp_path)
    found = load_traces(tmp_path)
    assert [(one.pipeline, one.iteration) for one in found.measured] == [
        ((0, 1), 10),
        ((0, 1), 12),
        ((2, 3), 10),
    ]
    assert found.missing == ()
    for each in found.measured:
        begins = [row[0].begin for row in each.rows]
        assert min(begins) == pytest.approx(0.0, abs=1e-3)
        assert max(begins) < 1.0, "both stages begin together by the clock of stage 0"
    assert found.measured[1].start > found.measured[0].start + found.measured[0].cost
    only = load_traces(tmp_path, range(12, 14))
    assert [one.iteration for one in only.measured] == [12]
    assert only.missing == ("Pipeline 2-3 recorded iteration 10, none of those wanted.",)


def test_a_rank_without_a_file_and_an_iteration_of_some_are_told() -> None:
    whole = made_run(build("zb-h1", 2, 3), iterations=(10, 11))
    short = dataclasses.replace(whole[1], iterations=whole[1].iterations[:1])
    other = made_run(build("zb-h1", 2, 3), first_rank=2)
    found = merge([whole[0], short, other[1]])
    assert [one.iteration for one in found.measured] == [10]
    assert found.missing == (
        "Iteration 11 of pipeline 0-1 is left out: stage 1 did not record it.",
        "Pipeline 2-3 is left out: rank 2 left no file (trace-rank00002.json).",
    )


def test_nothing_to_merge(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        load_traces(tmp_path / "none")
    with pytest.raises(ValueError, match=r"no trace-rank\*\.json in it"):
        load_traces(tmp_path)
    ranks = made_run(build("zb-h1", 2, 3))
    path = save_rank(ranks[0], tmp_path)
    with pytest.raises(ValueError, match=r"no whole iteration\..*rank 1 left no file"):
        load_traces(tmp_path)
    path.rename(tmp_path / "trace-rank00001.json")
    with pytest.raises(ValueError, match="it is the trace of rank 0"):
        load_traces(tmp_path)


def test_files_of_different_jobs() -> None:
    h1, v = made_run(build("zb-h1", 2, 3)), made_run(build("zb-v", 2, 3))
    with pytest.raises(
        ValueError, match=r"rank 1 has the placement \[\[0, 3\], \[1, 2\]\], rank 0"
    ):
        merge([h1[0], v[1]])
    with pytest.raises(ValueError, match="rank 0 is in pipeline 0-1 by one file and in 0-1-2"):
        merge([*h1, made_run(build("zb-h1", 3, 3))[2]])
    with pytest.raises(ValueError, match="rank 1 ran '1f1b' with 3 microbatches, rank 0 'zb-h1'"):
        merge([h1[0], made_run(build("1f1b", 2, 3))[1]])
    part = h1[1].iterations[0]
    lost = dataclasses.replace(part, passes=part.passes[:-1])
    with pytest.raises(ValueError, match="not those of a whole batch: stage 1, 0W2"):
        merge([h1[0], dataclasses.replace(h1[1], iterations=(lost,))])


def test_one_pass_alone_is_no_batch() -> None:
    lone = TracedIteration(1, "", 1, (TracedPass(Pass(Kind.F, 0), 0, 0, 1),))
    with pytest.raises(ValueError, match="not those of a whole batch"):
        merge([RankTrace(0, 0, (0,), linear(1), 0.0, (), (lone,))])
