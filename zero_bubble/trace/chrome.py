"""Merged traces as one Chrome trace, for chrome://tracing and https://ui.perfetto.dev.

A process a pipeline, a thread a stage. Passes are named as the ranges of profilers, ``F 3 c0``:
kind, microbatch, chunk. Times there are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zero_bubble.export.chrome_trace import trace as timeline_trace
from zero_bubble.schedule import Kind, Pass
from zero_bubble.trace.idle import Cause, Gap, measured_gaps
from zero_bubble.trace.measured import Measured

__all__ = ["pass_name", "save_trace", "trace"]

_MICROSECONDS = 1000.0  # in a millisecond


def pass_name(what: Pass) -> str:
    """``F 3 c0``: kind, microbatch, chunk."""
    return f"{what.kind} {what.microbatch} c{what.chunk}"


def trace(measured: Sequence[Measured]) -> dict[str, Any]:
    """The trace of merged iterations, as what `json.dumps` takes.

    A pipeline's iterations follow each other on the clock of its stage 0, from 0 at the first event
    of the first of them; pipelines have no common clock. Idle time that has a cause is an event
    too; where a stage has no work, nothing is drawn. ``memory of stage 0`` is the bytes held after
    each pass, where they were counted.
    """
    pipelines = sorted({one.pipeline for one in measured})
    events: list[dict[str, Any]] = []
    for process, pipeline in enumerate(pipelines):
        ours = [one for one in measured if one.pipeline == pipeline]
        origin = min(one.start for one in ours)
        events += _names(process, ours[0])
        for one in ours:
            events += _iteration(process, one, one.start - origin)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "iterations": [
                {
                    "pipeline": pipelines.index(one.pipeline),
                    "iteration": one.iteration,
                    "schedule": one.schedule.name,
                    "microbatches": one.schedule.num_microbatches,
                    "cost_ms": one.cost,
                    "bubble_rate": one.bubble_rate,
                }
                for one in measured
            ]
        },
    }


def save_trace(measured: Sequence[Measured], path: str | Path) -> None:
    """Write the trace as a file, an event a line."""
    data = trace(measured)
    events = ",\n".join(map(json.dumps, data.pop("traceEvents")))
    rest = json.dumps(data)[1:]
    Path(path).write_text(f'{{"traceEvents": [\n{events}\n], {rest}\n', encoding="utf-8")


def _names(process: int, measured: Measured) -> Iterator[dict[str, Any]]:
    ranks = "-".join(map(str, measured.pipeline))
    yield _metadata("process_name", process, 0, name=f"pipeline of ranks {ranks}")
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    for stage, rank in enumerate(measured.pipeline):
        yield _metadata("thread_name", process, stage, name=f"stage {stage} (rank {rank})")
        yield _metadata("thread_sort_index", process, stage, sort_index=stage)


def _metadata(what: str, process: int, thread: int, **arguments: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": arguments}


def _iteration(process: int, measured: Measured, begin: float) -> Iterator[dict[str, Any]]:
    yield from _passes_and_messages(process, measured, begin)
    gaps = measured_gaps(measured)
    for stage, row in enumerate(measured.rows):
        for gap in gaps[stage]:
            if gap.duration > 0 and gap.cause is not Cause.NO_WORK:
                yield _gap(process, stage, gap, begin)
        for one in row:
            if one.held is not None:
                yield {
                    "name": f"memory of stage {stage}",
                    "ph": "C",
                    "ts": (begin + one.end) * _MICROSECONDS,
                    "pid": process,
                    "args": {"held": one.held},
                }


def _passes_and_messages(
    process: int, measured: Measured, begin: float
) -> Iterator[dict[str, Any]]:
    """What a timeline's own trace has, in this process, at this time, and by these names."""
    for event in timeline_trace(measured.timeline)["traceEvents"]:
        if event["ph"] not in {"X", "s", "f"}:
            continue
        moved = {**event, "pid": process, "ts": event["ts"] + begin * _MICROSECONDS}
        if event["ph"] == "X":
            about = event["args"]
            what = Pass(Kind(event["cat"]), about["microbatch"], about["chunk"])
            moved["name"] = pass_name(what)
            moved["args"] = {**about, "iteration": measured.iteration}
        else:
            moved["id"] = f"{process}.{measured.iteration}.{event['id']}"
        yield moved


def _gap(process: int, stage: int, gap: Gap, begin: float) -> dict[str, Any]:
    about: dict[str, Any] = {"cause": str(gap.cause)}
    if gap.before is not None:
        about["before"] = pass_name(gap.before)
    if gap.source is not None:
        about["source stage"] = gap.source
    name = gap.phase or str(gap.cause)
    return {
        "name": name if gap.source is None else f"{name} from stage {gap.source}",
        "cat": "phase" if gap.phase else "idle",
        "ph": "X",
        "ts": (begin + gap.begin) * _MICROSECONDS,
        "dur": gap.duration * _MICROSECONDS,
        "pid": process,
        "tid": stage,
        "cname": "grey",
        "args": about,
    }
