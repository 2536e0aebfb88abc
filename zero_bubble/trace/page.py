"""One self-contained HTML page of merged traces: predicted above measured, with idle time by cause.

The page is ``page.html`` with the other files ``page.*`` and the data written into it. It loads
nothing, so that it can be mailed and opened anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from zero_bubble.simulate import Timeline
from zero_bubble.trace.chrome import pass_name
from zero_bubble.trace.idle import (
    Cause,
    Gap,
    idle_by_cause,
    measured_gaps,
    predicted_gaps,
    waits_by_source,
)
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.memory import held_after

__all__ = ["page", "save_page"]

_DIGITS = 4
"""Times are shown to 0.1 microseconds at most."""
_CAUSES = tuple(Cause)
_PARTS = ("page.css", "page.model.js", "page.draw.js", "page.table.js", "page.js")


def page(measured: Sequence[Measured]) -> str:
    """The page's HTML, with a choice among the iterations; ValueError if there is none."""
    if not measured:
        raise ValueError("at least one measured iteration is needed for a page")
    data = {
        "causes": [{"key": cause.name.lower(), "label": str(cause)} for cause in _CAUSES],
        "runs": [*map(_run, measured)],
    }
    # Nothing in a name can end the script that holds the data.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    html = _part("page.html")
    for name in _PARTS:
        html = html.replace(f"{{{{ {name} }}}}", _part(name))
    return html.replace("{{ data }}", text)


def save_page(measured: Sequence[Measured], path: str | Path) -> None:
    """Write the page as a file."""
    Path(path).write_text(page(measured), encoding="utf-8")


def _part(name: str) -> str:
    return files("zero_bubble").joinpath("trace", name).read_text(encoding="utf-8")


def _run(measured: Measured) -> dict[str, Any]:
    predicted = measured.predict()
    # Both timelines begin with the same pass at the same place of the picture.
    shift = min(row[0].ready for row in measured.rows)
    return {
        "pipeline": measured.pipeline,
        "iteration": measured.iteration,
        "schedule": measured.schedule.name,
        "placement": measured.placement.name,
        "positions": measured.placement.positions,
        "microbatches": measured.schedule.num_microbatches,
        "length": measured.length,
        "cost": measured.cost,
        "bubble_rate": measured.bubble_rate,
        "predicted": {
            "shift": shift,
            "cost": predicted.cost,
            "bubble_rate": predicted.bubble_rate,
            "work": predicted.work,
            "length": max(row[-1].end for row in predicted.spans),
        },
        "stages": _stages(measured, predicted, shift),
    }


def _stages(measured: Measured, predicted: Timeline, shift: float) -> list[dict[str, Any]]:
    gaps, expected = measured_gaps(measured), predicted_gaps(predicted)
    peaks = measured.peak_memory
    stages = []
    for stage, (row, spans) in enumerate(zip(measured.rows, predicted.spans, strict=True)):
        is_counted = peaks[stage] is not None
        held = held_after(predicted, stage) if is_counted else [None] * len(row)
        stages.append(
            {
                "passes": [[one.what.kind, one.what.microbatch, one.what.chunk] for one in row],
                "measured": [
                    [*map(_rounded, (one.begin, one.ready, one.end)), one.held] for one in row
                ],
                "predicted": [
                    [_rounded(span.start + shift), _rounded(span.end + shift), amount]
                    for span, amount in zip(spans, held, strict=True)
                ],
                "gaps": [*map(_gap, gaps[stage])],
                "predicted_gaps": [_gap(gap, shift) for gap in expected[stage]],
                "work": measured.work[stage],
                "cost": row[-1].end - row[0].ready,
                "bubble_rate": measured.stage_bubble_rates[stage],
                "idle": [*idle_by_cause(gaps[stage]).values()],
                "predicted_idle": [*idle_by_cause(expected[stage]).values()],
                "waits": [
                    [_CAUSES.index(cause), source, ms]
                    for (cause, source), ms in sorted(waits_by_source(gaps[stage]).items())
                ],
                "peak": peaks[stage],
                "predicted_peak": predicted.peak_memory[stage] if is_counted else None,
            }
        )
    return stages


def _gap(gap: Gap, shift: float = 0.0) -> list[Any]:
    return [
        _CAUSES.index(gap.cause),
        _rounded(gap.begin + shift),
        _rounded(gap.end + shift),
        gap.source,
        "" if gap.before is None else pass_name(gap.before),
        gap.phase,
    ]


def _rounded(time: float) -> float:
    return round(time, _DIGITS)
