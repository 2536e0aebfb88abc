"""Curves of bubble rate over memory limit as one self-contained SVG, for light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Curve", "Panel", "picture"]

type Points = tuple[tuple[float, float], ...]

_PER_ROW = 2
_WIDTH, _HEIGHT = 520, 300
"""Of a panel, in pixels."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 40, 42
_LEGEND = 40
_NAMES = {"linear": "one chunk a stage", "v": "V: two chunks a stage"}

_STYLE = """
  text { font: 12px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
  .title { font-size: 13px; font-weight: 600; fill: #1f2328; }
  .tick { fill: #59636e; }
  .grid { stroke: #d8dee4; stroke-width: 1; }
  .mark { stroke: #8c959f; stroke-width: 1.2; stroke-dasharray: 2 3; }
  .found { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
  .bound { fill: none; stroke-width: 1.4; stroke-dasharray: 5 4; opacity: 0.85; }
  .linear { stroke: #3b6fd6; }
  .v { stroke: #c26a12; }
  .dot { stroke: none; }
  .dot.linear { fill: #3b6fd6; }
  .dot.v { fill: #c26a12; }
  @media (prefers-color-scheme: dark) {
    .title { fill: #f0f6fc; }
    .tick { fill: #9198a1; }
    .grid { stroke: #3d444d; }
    .mark { stroke: #768390; }
    .linear { stroke: #6f9bf5; }
    .v { stroke: #e09a4b; }
    .dot.linear { fill: #6f9bf5; }
    .dot.v { fill: #e09a4b; }
  }
"""


@dataclass(frozen=True, slots=True)
class Curve:
    """What was found and what is possible: (memory limit in p M_B, bubble rate)."""

    shade: str
    """``linear`` or ``v``."""
    found: Points
    bound: Points


@dataclass(frozen=True, slots=True)
class Panel:
    """The curves of one setting."""

    title: str
    curves: tuple[Curve, ...]
    mark: float | None
    """Limit, in p M_B, where the paper's appendix B expects the linear curve to flatten."""


def picture(panels: Sequence[Panel]) -> str:
    """The SVG of all panels, two a row, each with its own scale of bubble rates."""
    width = _PER_ROW * _WIDTH
    rows = math.ceil(len(panels) / _PER_ROW)
    height = rows * _HEIGHT + _LEGEND
    body: list[str] = []
    for index, panel in enumerate(panels):
        row, column = divmod(index, _PER_ROW)
        body.append(f'<g transform="translate({column * _WIDTH} {row * _HEIGHT})">')
        body += _panel(panel)
        body.append("</g>")
    body += _legend(rows * _HEIGHT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="Bubble rate over memory limit">\n'
        f"<style>{_STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where a limit and a rate are in a panel."""

    right: float
    top: float

    def x(self, limit: float) -> float:
        return _LEFT + limit / self.right * (_WIDTH - _LEFT - _RIGHT)

    def y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / self.top * (_HEIGHT - _TOP - _BOTTOM)


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for curve in panel.curves for point in (*curve.found, *curve.bound)]
    frame = _Frame(
        right=max(limit for limit, _ in points) * 1.02,
        top=max(0.1, math.ceil(max(rate for _, rate in points) * 10) / 10),
    )
    yield _text(_LEFT, 22, panel.title, "title")
    for tenth in range(round(frame.top * 10) + 1):
        y = frame.y(tenth / 10)
        yield _line("grid", _LEFT, y, _WIDTH - _RIGHT, y)
        yield _text(_LEFT - 8, y + 4, f"{tenth * 10} %", "tick", "end")
    for half in range(int(frame.right * 2) + 1):
        x = frame.x(half / 2)
        yield _line("grid", x, frame.y(0), x, frame.y(0) + 5)
        yield _text(x, frame.y(0) + 19, f"{half / 2:g}p" if half else "0", "tick", "middle")
    if panel.mark is not None:
        x = frame.x(panel.mark)
        yield _line("mark", x, frame.y(0), x, frame.y(frame.top))
    for curve in panel.curves:
        yield _path(f"bound {curve.shade}", curve.bound, frame)
        yield _path(f"found {curve.shade}", curve.found, frame)
        for limit, rate in curve.found:
            x, y = frame.x(limit), frame.y(rate)
            yield (
                f'<circle class="dot {curve.shade}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{_NAMES[curve.shade]}, limit {limit:.3g}p: {rate:.2%}</title></circle>"
            )


def _path(shade: str, points: Points, frame: _Frame) -> str:
    where = " ".join(f"{frame.x(limit):.1f},{frame.y(rate):.1f}" for limit, rate in points)
    return f'<polyline class="{shade}" points="{where}"/>'


def _legend(y: int) -> Iterator[str]:
    entries = [
        *((f"found {shade}", name) for shade, name in _NAMES.items()),
        *((f"bound {shade}", "lower bound") for shade in _NAMES),
        ("mark", "appendix B's estimate, one chunk"),
    ]
    x = float(_LEFT)
    for shade, name in entries:
        yield _line(shade, x, y + 14, x + 26, y + 14)
        yield _text(x + 32, y + 18, name, "tick")
        x += 32 + 6.4 * len(name) + 22
    yield _text(
        _LEFT,
        y + 36,
        "bubble rate over the memory limit of a stage; 1p is p M_B, the memory of 1F1B",
        "tick",
    )


def _line(shade: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{shade}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, shade: str, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{shade}" {place}>{escape(text)}</text>'
