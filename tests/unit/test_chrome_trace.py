"""Chrome traces: each pass once, at the simulator's times, with its memory and its messages."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export.chrome_trace import save_trace, trace
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind
from zero_bubble.simulate import Timeline, simulate

seeds = st.integers(0, 10**6)
placements = st.sampled_from([linear(1), linear(3), v_shape(2), interleaved(2, 3)])


def random_timeline(placement: Placement, seed: int) -> Timeline:
    return simulate(random_order(placement, 3, seed), random_costs(placement, seed))


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [one for one in trace(timeline)["traceEvents"] if one["ph"] == phase]


@given(seed=seeds, placement=placements)
def test_each_pass_once_at_its_time(seed: int, placement: Placement) -> None:
    timeline = random_timeline(placement, seed)
    found = Counter(
        (one["tid"], one["name"], one["args"]["chunk"], one["args"]["microbatch"])
        for one in events(timeline, "X")
    )
    expected = Counter(
        (stage, f"{one.kind}{one.microbatch}", one.chunk, one.microbatch)
        for stage, row in enumerate(timeline.schedule.passes)
        for one in row
    )
    assert found == expected
    times = {
        (one["tid"], one["cat"], one["args"]["position"], one["args"]["microbatch"]): one
        for one in events(timeline, "X")
    }
    for stage, row in enumerate(timeline.spans):
        for span in row:
            position = placement.positions[stage][span.what.chunk]
            one = times[stage, span.what.kind, position, span.what.microbatch]
            assert one["ts"] == pytest.approx(span.start * 1000)
            assert one["ts"] + one["dur"] == pytest.approx(span.end * 1000)


@given(seed=seeds, placement=placements)
def test_memory_peaks_where_the_simulator_says_and_ends_at_nothing(
    seed: int, placement: Placement
) -> None:
    timeline = random_timeline(placement, seed)
    for stage, peak in enumerate(timeline.peak_memory):
        counter = [
            one for one in events(timeline, "C") if one["name"] == f"memory of stage {stage}"
        ]
        assert max(one["args"]["held"] for one in counter) == pytest.approx(peak)
        assert counter[-1]["args"]["held"] == 0
        assert [one["ts"] for one in counter] == sorted(one["ts"] for one in counter)


@given(seed=seeds, placement=placements)
def test_an_arrow_for_each_message(seed: int, placement: Placement) -> None:
    timeline = random_timeline(placement, seed)
    borders = sum(
        placement.owner(one)[0] != placement.owner(one + 1)[0]
        for one in range(placement.num_positions - 1)
    )
    starts, ends = events(timeline, "s"), events(timeline, "f")
    assert len(starts) == 2 * borders * 3  # both ways, 3 microbatches
    for start, end in zip(starts, ends, strict=True):
        assert (start["id"], start["name"]) == (end["id"], end["name"])
        assert start["tid"] != end["tid"]
        assert start["ts"] <= end["ts"]
        for one in (start, end):
            assert any(
                span.start * 1000 <= one["ts"] <= span.end * 1000 and span.what.kind is not Kind.W
                for span in timeline.spans[one["tid"]]
            )


def test_the_file_is_the_trace(tmp_path: Path) -> None:
    """The fields that the Trace Event Format asks of each kind of event are there."""
    timeline = simulate(build("zb-h1", 2, 3), Costs.uniform(linear(2), 1.5, 1, 1))
    save_trace(timeline, tmp_path / "one.trace.json")
    data = json.loads((tmp_path / "one.trace.json").read_text())
    assert data == trace(timeline)
    needed = {
        "M": {"name", "pid", "args"},
        "X": {"name", "cat", "ts", "dur", "pid", "tid"},
        "C": {"name", "ts", "pid", "args"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    }
    for one in data["traceEvents"]:
        assert needed[one["ph"]] <= set(one)
        assert one.get("ts", 0) >= 0
        assert one.get("dur", 0) >= 0
    names = {one["args"]["name"] for one in data["traceEvents"] if one["name"] == "thread_name"}
    assert names == {"stage 0", "stage 1"}
    assert data["otherData"]["cost_ms"] == timeline.cost
