"""A drawing in the terminal: its flags, and what it shows."""

from __future__ import annotations

import argparse
import sys

from zero_bubble.export import text
from zero_bubble.simulate import Timeline

__all__ = ["add_drawing", "drawing", "figures"]


def add_drawing(parser: argparse.ArgumentParser, *, picture: bool = False) -> None:
    """``--width`` and ``--colour``; see `drawing`. ``picture``: there is an ``--svg`` too."""
    unit = "columns of the drawing, or pixels of the picture" if picture else "columns"
    parser.add_argument("--width", type=int, metavar="N", help=unit)
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto")


def drawing(timeline: Timeline, arguments: argparse.Namespace) -> str:
    """A line of figures, then the timeline as text."""
    colour = arguments.colour == "always" or (arguments.colour == "auto" and sys.stdout.isatty())
    return figures(timeline) + "\n" + text.draw(timeline, width=arguments.width, colour=colour)


def figures(timeline: Timeline) -> str:
    """The schedule's name, cost, bubble rate, and the peak memory of each stage: one line."""
    memory = ", ".join(f"{one:.4g}" for one in timeline.peak_memory)
    return (
        f"{timeline.schedule.name}: cost {timeline.cost:.6g} ms, bubble rate "
        f"{timeline.bubble_rate:.2%}, peak memory {memory}"
    )
