"""The merged Chrome trace: each pass once at its time, waits, phases, memory and arrows."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trace_runs import made_run
from zero_bubble.builders import build
from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.trace.chrome import save_trace, trace
from zero_bubble.trace.idle import Cause, idle_by_cause, measured_gaps
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.merge import merge


def job() -> list[Measured]:
    """Two pipelines of a V, one of them with two iterations."""
    schedule = build("zb-v", 3, 6)
    ranks = made_run(schedule, iterations=(10, 11)) + made_run(schedule, first_rank=3, seed=1)
    return [*merge(ranks).measured]


def events(found: list[Measured], phase: str) -> list[dict[str, Any]]:
    return [one for one in trace(found)["traceEvents"] if one["ph"] == phase]


def test_each_pass_once_where_it_ran() -> None:
    found = job()
    drawn = {
        (one["pid"], one["tid"], one["args"]["iteration"], one["name"]): one
        for one in events(found, "X")
        if one["cat"] in [*Kind]
    }
    assert len(drawn) == 3 * 3 * 2 * 3 * 6, "iterations x stages x chunks x kinds x microbatches"
    begun = found[0].start
    for measured in found:
        process = 0 if measured.pipeline == (0, 1, 2) else 1
        shift = measured.start - (begun if process == 0 else measured.start)
        for stage, row in enumerate(measured.rows):
            for one in row:
                name = f"{one.what.kind} {one.what.microbatch} c{one.what.chunk}"
                event = drawn[process, stage, measured.iteration, name]
                assert event["ts"] == pytest.approx((shift + one.ready) * 1000)
                assert event["dur"] == pytest.approx((one.end - one.ready) * 1000)


def test_idle_time_is_drawn_but_where_there_is_no_work() -> None:
    (measured,) = merge(made_run(build("zb-h1", 3, 6))).measured
    for stage, gaps in enumerate(measured_gaps(measured)):
        ours = [
            one
            for one in events([measured], "X")
            if one["tid"] == stage and one["cat"] not in [*Kind]
        ]
        idle = idle_by_cause(gaps)
        assert sum(one["dur"] for one in ours) == pytest.approx(
            1000 * (sum(idle.values()) - idle[Cause.NO_WORK])
        )
        assert {"finalize", "optimizer step"} <= {one["name"] for one in ours}
    assert "waiting for a gradient from stage 2" in {
        one["name"] for one in events([measured], "X") if one["tid"] == 1
    }


def test_memory_is_what_was_counted() -> None:
    (measured,) = merge(made_run(build("zb-h1", 2, 3))).measured
    for stage, row in enumerate(measured.rows):
        counter = [
            (one["ts"], one["args"]["held"])
            for one in events([measured], "C")
            if one["name"] == f"memory of stage {stage}"
        ]
        assert [held for _, held in counter] == [one.held for one in row]
        assert [ts for ts, _ in counter] == pytest.approx([one.end * 1000 for one in row])
    assert not events([*merge(made_run(build("zb-h1", 2, 3), counted=False)).measured], "C")


def test_arrows_of_all_iterations_are_apart() -> None:
    found = job()
    starts = Counter(one["id"] for one in events(found, "s"))
    ends = Counter(one["id"] for one in events(found, "f"))
    assert starts == ends
    assert set(starts.values()) == {1}
    # Positions 0..5 of the V: the turn from 2 to 3 is no message. Six microbatches, both ways.
    assert len(starts) == 3 * 4 * 6 * 2


def test_threads_are_stages_with_their_ranks(tmp_path: Path) -> None:
    schedule = Schedule(linear(1), 1, (build("1f1b", 1, 1).passes[0],))
    (measured,) = merge(made_run(schedule, first_rank=4)).measured
    save_trace([measured], tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    names = [one["args"]["name"] for one in data["traceEvents"] if one["name"].endswith("_name")]
    assert names == ["pipeline of ranks 4", "stage 0 (rank 4)"]
    assert data["otherData"]["iterations"][0]["bubble_rate"] == measured.bubble_rate
    assert data == trace([measured])
