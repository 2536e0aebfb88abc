"""Timelines as Chrome traces, for chrome://tracing and https://ui.perfetto.dev.

The JSON object form of the Trace Event Format: a process for the pipeline, a thread a stage, a
complete event ("X") a pass, flow arrows ("s", "f") for messages and a counter ("C") a stage for
its memory. Times there are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero_bubble.schedule import Kind
from zero_bubble.simulate import Span, Timeline

__all__ = ["save_trace", "trace"]

_MICROSECONDS = 1000.0  # in a millisecond
_PIPELINE = 0
_COLOUR = {
    Kind.F: "rail_response",
    Kind.B: "thread_state_runnable",
    Kind.W: "good",
    Kind.BW: "olive",
    Kind.R: "thread_state_iowait",
}
"""Names of chrome://tracing's palette; Perfetto chooses its own by the event's name."""


def trace(timeline: Timeline) -> dict[str, Any]:
    """The trace of a timeline, as what `json.dumps` takes.

    A pass is called ``F3``, ``B3``, ``W3``, ``BW3`` or ``R3``; its arguments are microbatch, chunk
    and the chunk's position in the model. ``memory of stage 0`` counts what the stage holds, in the
    unit of the costs (paper, section 3.1): F takes M_B at its start, B frees M_B - M_W and W frees
    M_W at their ends, BW frees M_B. With recomputation F takes M_R, and R, or B and BW without it,
    the rest of M_B at its start.
    """
    events = list(_names(timeline))
    for stage, row in enumerate(timeline.spans):
        events += (_pass(timeline, stage, span) for span in row)
        events += _memory(timeline, stage)
    events += _messages(timeline)
    schedule = timeline.schedule
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": schedule.name,
            "placement": schedule.placement.name,
            "microbatches": schedule.num_microbatches,
            "cost_ms": timeline.cost,
            "bubble_rate": timeline.bubble_rate,
        },
    }


def save_trace(timeline: Timeline, path: str | Path) -> None:
    """Write the trace as a file."""
    data = trace(timeline)
    # An event a line: large files then open in an editor, and compare.
    events = ",\n".join(map(json.dumps, data.pop("traceEvents")))
    rest = json.dumps(data)[1:]
    Path(path).write_text(f'{{"traceEvents": [\n{events}\n], {rest}\n', encoding="utf-8")


def _names(timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", 0, name=timeline.schedule.name or "pipeline")
    for stage in range(timeline.schedule.num_stages):
        yield _metadata("thread_name", stage, name=f"stage {stage}")
        yield _metadata("thread_sort_index", stage, sort_index=stage)


def _metadata(what: str, thread: int, **arguments: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": _PIPELINE, "tid": thread, "args": arguments}


def _pass(timeline: Timeline, stage: int, span: Span) -> dict[str, Any]:
    what = span.what
    return {
        "name": f"{what.kind}{what.microbatch}",
        "cat": str(what.kind),
        "ph": "X",
        "ts": span.start * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "pid": _PIPELINE,
        "tid": stage,
        "cname": _COLOUR[what.kind],
        "args": {
            "microbatch": what.microbatch,
            "chunk": what.chunk,
            "position": timeline.schedule.placement.positions[stage][what.chunk],
        },
    }


def _memory(timeline: Timeline, stage: int) -> Iterator[dict[str, Any]]:
    costs = timeline.costs
    m_b, m_w = costs.m_b[stage], costs.m_w[stage]
    m_r = [costs.kept(stage, chunk) for chunk in range(len(m_b))]
    recomputed = {span.what.chunk for span in timeline.spans[stage] if span.what.kind is Kind.R}
    # Whole counts, not a running sum: a sum of fractions would drift with m.
    kept, held, waiting = [0] * len(m_b), [0] * len(m_b), [0] * len(m_b)

    def counter(at: float) -> dict[str, Any]:
        table = zip(kept, m_r, held, m_b, waiting, m_w, strict=True)
        return {
            "name": f"memory of stage {stage}",
            "ph": "C",
            "ts": at * _MICROSECONDS,
            "pid": _PIPELINE,
            "args": {"held": sum(a * r + n * b + k * w for a, r, n, b, k, w in table)},
        }

    for span in timeline.spans[stage]:
        kind, chunk = span.what.kind, span.what.chunk
        if kind is Kind.F:
            kept[chunk] += 1
            yield counter(span.start)
        elif kind is Kind.W:
            waiting[chunk] -= 1
            yield counter(span.end)
        elif kind is Kind.R or chunk not in recomputed:
            kept[chunk] -= 1
            held[chunk] += 1
            if m_r[chunk] != m_b[chunk]:
                yield counter(span.start)
        if kind in (Kind.B, Kind.BW):
            held[chunk] -= 1
            waiting[chunk] += kind is Kind.B
            yield counter(span.end)


def _messages(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """An arrow from the middle of each pass whose result goes to another stage to its reader."""
    placement = timeline.schedule.placement
    by_pass = {
        (Kind.B if span.what.kind is Kind.BW else span.what.kind, position, span.what.microbatch): (
            stage,
            span,
        )
        for stage, row in enumerate(timeline.spans)
        for span in row
        for position in (placement.positions[stage][span.what.chunk],)
    }
    number = 0
    for (kind, position, microbatch), (stage, span) in by_pass.items():
        if kind in (Kind.W, Kind.R):
            continue
        target = by_pass.get((kind, position + (1 if kind is Kind.F else -1), microbatch))
        if target is None or target[0] == stage:
            continue
        name = "activation" if kind is Kind.F else "gradient"
        ends: tuple[tuple[str, int, Span], ...] = (("s", stage, span), ("f", *target))
        for phase, thread, where in ends:
            yield {
                "name": name,
                "cat": "message",
                "ph": phase,
                "id": number,
                "ts": (where.start + where.end) / 2 * _MICROSECONDS,
                "pid": _PIPELINE,
                "tid": thread,
                # The arrow ends at the pass around this time, not at the next one.
                **({"bp": "e"} if phase == "f" else {}),
            }
        number += 1
