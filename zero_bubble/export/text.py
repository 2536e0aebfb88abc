"""Schedules as text for a terminal."""

from __future__ import annotations

from dataclasses import replace

from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import Span, Timeline

__all__ = ["draw", "order"]

_IDLE = "."
_MOST_COLUMNS = 100_000
_RESET = "\x1b[0m"
_COLOUR = {
    Kind.F: "\x1b[30;104m",
    Kind.B: "\x1b[30;106m",
    Kind.W: "\x1b[30;102m",
    Kind.R: "\x1b[30;105m",
}


def order(schedule: Schedule) -> str:
    """The passes of each stage in PyTorch's grammar, a row a stage, as in ``0F0 0I0 0W0``."""
    rows = zip(_names(schedule.num_stages), schedule.passes, strict=True)
    return "\n".join(f"{name}  {' '.join(map(str, row))}" for name, row in rows)


def draw(timeline: Timeline, *, width: int | None = None, colour: bool = False) -> str:
    """A row a stage, time to the right and to scale; dots where a stage idles.

    A pass reads ``F3``, ``B3``, ``W3``, ``R3`` or, fused, ``BW3``, with the chunk in front where
    stages hold several (``1F3``). ``width`` is the number of columns of the drawing, by default as
    many as the shortest pass needs to show its label; what does not fit is cut. ``colour`` adds
    ANSI colours: F blue, B teal, W green, R purple, the fused backward teal and green. ValueError
    for a width below 1.
    """
    if width is not None and width < 1:
        raise ValueError(f"width must be at least 1 column, not {width}")
    spans = [span for row in timeline.spans for span in row]
    end = max((span.end for span in spans), default=0.0)
    chunks = any(len(held) > 1 for held in timeline.schedule.placement.positions)
    if width is None:
        scale = max(
            (
                (len(_label(span.what, chunks)) + 1) / (span.end - span.start)
                for span in spans
                if span.end > span.start
            ),
            default=1.0,
        )
    else:
        scale = width / end if end else 1.0
    # Where one pass is far shorter than the others its label gives way, not the terminal.
    scale = min(scale, _MOST_COLUMNS / end) if end else scale
    columns = round(end * scale)
    names = _names(timeline.schedule.num_stages)
    lines = []
    for stage, name in enumerate(names):
        cells = [_IDLE] * columns
        for span in timeline.spans[stage]:
            _paint(cells, span, _share(timeline, stage, span.what), scale, chunks, colour)
        lines.append(f"{name}  {''.join(cells)}")
    return "\n".join(lines)


def _names(stages: int) -> list[str]:
    digits = len(str(stages - 1))
    return [f"stage {stage:>{digits}}" for stage in range(stages)]


def _label(what: Pass, chunks: bool) -> str:
    return f"{what.chunk if chunks else ''}{what.kind}{what.microbatch}"


def _share(timeline: Timeline, stage: int, what: Pass) -> float:
    """The part of a pass in the colour of its first letter; the rest of a fused backward is W."""
    if what.kind is not Kind.BW:
        return 1.0
    b, w = (timeline.duration(replace(what, kind=kind), stage) for kind in (Kind.B, Kind.W))
    return b / (b + w) if b + w else 1.0


def _paint(
    cells: list[str], span: Span, share: float, scale: float, chunks: bool, colour: bool
) -> None:
    first, last = round(span.start * scale), round(span.end * scale)
    text = _label(span.what, chunks)[: last - first].ljust(last - first)
    cells[first:last] = text
    if not colour or first == last:
        return
    kind = Kind.B if span.what.kind is Kind.BW else span.what.kind
    turn = first + round((last - first) * share)
    cells[first] = _COLOUR[kind] + cells[first]
    if first < turn < last:
        cells[turn] = _COLOUR[Kind.W] + cells[turn]
    cells[last - 1] += _RESET
