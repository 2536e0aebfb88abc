"""A drawing in the terminal: its flags, and what it shows."""

from __future__ import annotations

import argparse
import shutil
import sys

from zero_bubble.cli.amount import amount
from zero_bubble.export import text
from zero_bubble.simulate import Timeline

__all__ = ["add_drawing", "drawing", "figures", "picture"]


def add_drawing(parser: argparse.ArgumentParser, *, picture: bool = False) -> None:
    """``--width`` and ``--colour``; see `drawing`. ``picture``: there is an ``--svg`` too."""
    unit = "columns of the drawing, or pixels of the picture" if picture else "columns"
    parser.add_argument("--width", type=int, metavar="N", help=unit)
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto")


def drawing(timeline: Timeline, arguments: argparse.Namespace) -> str:
    """A line of figures, then the timeline as text."""
    return f"{figures(timeline)}\n{picture(timeline, arguments)}"


def picture(timeline: Timeline, arguments: argparse.Namespace) -> str:
    """The timeline as text; on a terminal no wider than that, unless ``--width`` says so."""
    terminal = sys.stdout.isatty()
    colour = arguments.colour == "always" or (arguments.colour == "auto" and terminal)
    width: int | None = arguments.width
    if width is None and terminal:
        widest = max(map(len, text.draw(timeline).splitlines()))
        columns = shutil.get_terminal_size().columns
        if widest > columns:
            names = max(map(len, text.draw(timeline, width=1).splitlines())) - 1
            width = max(1, columns - names)
    return text.draw(timeline, width=width, colour=colour)


def figures(timeline: Timeline) -> str:
    """The schedule's name, cost, bubble rate, and the peak memory of each stage: one line."""
    memory = ", ".join(map(amount, timeline.peak_memory))
    return (
        f"{timeline.schedule.name}: cost {timeline.cost:.6g} ms, bubble rate "
        f"{timeline.bubble_rate:.2%}, peak memory {memory}"
    )
