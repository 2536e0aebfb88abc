"""Timelines as one self-contained SVG picture, readable on light and on dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from html import escape

from zero_bubble.schedule import Kind
from zero_bubble.simulate import Span, Timeline

__all__ = ["WIDTH", "draw", "draw_all"]

WIDTH = 1100
"""Of a picture, in pixels, if nothing else is asked for."""

_LEFT, _RIGHT, _TOP = 78, 96, 14
_TITLE, _ROW, _GAP, _BETWEEN = 34, 26, 4, 26
_AXIS, _LEGEND = 34, 40
_LABEL_WIDTH = 6.6
"""Width of a digit of a pass's label, in pixels."""

_STYLE = """
  text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
  .title { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .figure, .name, .tick { fill: #59636e; }
  .strong { fill: #1f2328; font-weight: 600; }
  .mb { font-size: 11px; text-anchor: middle; fill: #fff; }
  .mb.dark { fill: #06281c; }
  .track { fill: #f4f6f8; }
  .idle { fill: #d8dee4; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .F { fill: #3b6fd6; }
  .B { fill: #0f9aa0; }
  .W { fill: #63c27c; }
  .R { fill: #b0568f; }
  .F.other { fill: #7c3fc4; }
  .B.other { fill: #c26a12; }
  .W.other { fill: #d9b23c; }
  .R.other { fill: #8f4a4a; }
  @media (prefers-color-scheme: dark) {
    .figure, .name, .tick { fill: #9198a1; }
    .title, .strong { fill: #f0f6fc; }
    .track { fill: #161b22; }
    .idle { fill: #30363d; }
    .grid { stroke: #3d444d; }
    .F { fill: #4a7ee6; }
    .B { fill: #12a5ab; }
    .W { fill: #5cb874; }
    .R { fill: #c465a0; }
  }
"""


def _plain(memory: float) -> str:
    return f"{memory:.4g}"


def draw(
    timeline: Timeline,
    *,
    title: str | None = None,
    width: int = WIDTH,
    amount: Callable[[float], str] = _plain,
) -> str:
    """The SVG of one timeline; see `draw_all`."""
    titles = None if title is None else [title]
    return draw_all([timeline], titles=titles, width=width, amount=amount)


def draw_all(
    timelines: Sequence[Timeline],
    *,
    titles: Sequence[str] | None = None,
    width: int = WIDTH,
    amount: Callable[[float], str] = _plain,
) -> str:
    """The SVG of several timelines below each other, on one time scale.

    A row a stage: F blue, B teal, W green, R purple, the fused backward half teal and half green,
    microbatch numbers in them where those of all of a timeline's passes of a kind fit, gray where a
    stage idles between its first and its last pass. A stage's second and later chunks have colours
    of their own. At the right the bubble rate, and each stage's peak memory, in the unit of the
    costs and written by ``amount``.
    ``titles`` are the schedules' names by default; ``width`` is in pixels. ValueError for no
    timeline, a number of titles that differs, or a width below 400.
    """
    if not timelines:
        raise ValueError("at least one timeline is needed for a picture")
    if titles is None:
        titles = [one.schedule.name or "schedule" for one in timelines]
    if len(titles) != len(timelines):
        raise ValueError(f"{len(titles)} titles for {len(timelines)} timelines: one each is needed")
    if width < 400:
        raise ValueError(f"width must be at least 400 pixels, not {width}")
    end = max((span.end for one in timelines for row in one.spans for span in row), default=0.0)
    scale = _Scale(end or 1.0, width - _LEFT - _RIGHT)
    top, body = _TOP, list[str]()
    for timeline, title in zip(timelines, titles, strict=True):
        body += _panel(timeline, title, scale, top, amount)
        top += _TITLE + timeline.schedule.num_stages * (_ROW + _GAP) + _BETWEEN
    body += _axis(scale, top - _BETWEEN + 6)
    top += _AXIS - _BETWEEN + 6
    chunks = max(len(held) for one in timelines for held in one.schedule.placement.positions)
    kinds = {span.what.kind for one in timelines for row in one.spans for span in row}
    body += _legend(top, chunks, kinds)
    height = top + _LEGEND
    name = _escaped(", ".join(titles))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Pipeline timelines: {name}">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    end: float
    """Last end of all timelines, in ms."""
    pixels: int
    """Width of the part of the picture that shows time."""

    def x(self, time: float) -> float:
        return _LEFT + time / self.end * self.pixels


def _panel(
    timeline: Timeline, title: str, scale: _Scale, top: int, amount: Callable[[float], str]
) -> Iterator[str]:
    margin = _LEFT + scale.pixels + 12
    base = top + 16
    rate = f"{timeline.bubble_rate:.2%}".replace("%", " %")
    figures = f"bubble {rate} · cost {timeline.cost:.6g} ms"
    yield _text(_LEFT, base, title, "title")
    yield _text(_LEFT + scale.pixels, base, figures, "figure strong", anchor="end")
    yield _text(margin, base, "peak memory", "figure")
    labelled = _labelled_kinds(timeline, scale)
    for stage, memory in enumerate(timeline.peak_memory):
        y = top + _TITLE - 6 + stage * (_ROW + _GAP)
        middle = y + _ROW / 2 + 4
        yield _text(_LEFT - 12, middle, f"stage {stage}", "name", anchor="end")
        yield _box(_LEFT, y, scale.pixels, "track")
        if spans := timeline.spans[stage]:
            left, right = scale.x(spans[0].start), scale.x(spans[-1].end)
            yield _box(left, y, right - left, "idle")
        for span in timeline.spans[stage]:
            yield from _pass(timeline, stage, span, scale, y, span.what.kind in labelled)
        yield _text(margin, middle, amount(memory), "figure strong")


def _labelled_kinds(timeline: Timeline, scale: _Scale) -> set[Kind]:
    """Kinds whose labels all fit: with some of a kind only, stages would look different.

    A pass that takes no time has no room for any; it does not count.
    """
    crowded = {
        span.what.kind
        for stage, row in enumerate(timeline.spans)
        for span in row
        if span.end > span.start
        and len(str(span.what.microbatch)) * _LABEL_WIDTH >= _room(timeline, stage, span, scale)
    }
    return {*Kind} - crowded


def _room(timeline: Timeline, stage: int, span: Span, scale: _Scale) -> float:
    """Pixels for the label, which does not cross the seam of a fused backward."""
    return _width(span, scale) * _share(timeline, stage, span)


def _width(span: Span, scale: _Scale) -> float:
    # A hair between passes, so that neighbours of one kind can be told apart.
    return max(scale.x(span.end) - scale.x(span.start) - 0.8, 0.4)


def _share(timeline: Timeline, stage: int, span: Span) -> float:
    """The part of a pass before its seam; 1 but for a fused backward."""
    if span.what.kind is not Kind.BW:
        return 1.0
    b, w = (timeline.duration(replace(span.what, kind=kind), stage) for kind in (Kind.B, Kind.W))
    return b / (b + w) if b + w else 1.0


def _pass(
    timeline: Timeline, stage: int, span: Span, scale: _Scale, y: int, is_labelled: bool
) -> Iterator[str]:
    left, width, what = scale.x(span.start), _width(span, scale), span.what
    room = _room(timeline, stage, span, scale)
    other = " other" if what.chunk else ""
    yield f"<g><title>stage {stage}, {what}: {span.start:.6g} to {span.end:.6g} ms</title>"
    if what.kind is Kind.BW:
        yield _box(left, y, room, f"B{other}")
        yield _box(left + room, y, width - room, f"W{other}")
    else:
        yield _box(left, y, width, f"{what.kind}{other}")
    if is_labelled and span.end > span.start:
        shade = "mb dark" if what.kind is Kind.W else "mb"
        yield _text(left + room / 2, y + _ROW / 2 + 4, str(what.microbatch), shade)
    yield "</g>"


def _axis(scale: _Scale, y: int) -> Iterator[str]:
    yield (f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{_LEFT + scale.pixels}" y2="{y}"/>')
    step = _step(scale.end)
    for number in range(int(scale.end / step * (1 + 1e-9)) + 1):
        x = scale.x(number * step)
        yield f'<line class="grid" x1="{x:.2f}" y1="{y}" x2="{x:.2f}" y2="{y + 5}"/>'
        yield _text(x, y + 19, f"{number * step:.6g}", "tick", anchor="middle")
    yield _text(_LEFT + scale.pixels + 12, y + 19, "ms", "tick")


def _step(end: float) -> float:
    """A round distance between ticks (1, 2 or 5 times a power of ten), 5 to 12 of them."""
    power = 10.0 ** math.floor(math.log10(end / 6))
    return next(power * n for n in (1, 2, 5, 10) if end / (power * n) <= 12)


def _legend(y: int, chunks: int, kinds: Set[Kind]) -> Iterator[str]:
    entries: list[tuple[tuple[str, ...], str]] = [
        (("F",), "F: forward"),
        (("B",), "B: gradient of the input"),
        (("W",), "W: gradient of the weights"),
    ]
    if Kind.R in kinds:
        entries.append((("R",), "R: the forward again"))
    if Kind.BW in kinds:
        entries.append((("B", "W"), "fused backward"))
    if chunks > 1:
        later = [*"FBW", *(["R"] if Kind.R in kinds else [])]
        shades = tuple(f"{one} other" for one in later)
        entries.append((shades, f"{', '.join(later)} of later chunks"))
    entries.append((("idle",), "idle"))
    x = float(_LEFT)
    for classes, label in entries:
        for shade in classes:
            yield f'<rect class="{shade}" x="{x:.1f}" y="{y + 8}" width="12" height="12"/>'
            x += 12
        yield _text(x + 6, y + 18, label, "name")
        x += 6 + len(label) * _LABEL_WIDTH + 18


def _box(x: float, y: float, width: float, shade: str) -> str:
    return (
        f'<rect class="{shade}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW}" rx="1.5"/>'
    )


def _text(x: float, y: float, text: str, shade: str, anchor: str = "") -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{shade}" x="{x:.2f}" y="{y:.1f}"{place}>{_escaped(text)}</text>'


def _escaped(text: str) -> str:
    """For XML, without what XML does not allow: a name may come from a file."""
    return escape("".join(filter(str.isprintable, text)), quote=True)
