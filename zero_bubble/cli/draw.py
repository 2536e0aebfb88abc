"""``zero-bubble draw``: schedules as text, or as a picture."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zero_bubble.builders import BUILDERS
from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import (
    Commands,
    add_chunks,
    add_command,
    add_costs,
    add_recompute,
    add_size,
)
from zero_bubble.cli.drawing import add_drawing, drawing
from zero_bubble.cli.inputs import Input, inputs, say, warn_of_illegal
from zero_bubble.export import svg
from zero_bubble.simulate import Timeline

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    names = ", ".join(BUILDERS)
    parser = add_command(
        commands,
        "draw",
        run,
        summary="draw schedules as text, or as a picture",
        description="Rows are stages, time goes right, dots are idle. F3, B3, W3: forward, input\n"
        "gradient and weight gradient of microbatch 3; BW3: a fused backward; R3:\n"
        "recomputation. Time is to scale, a label that does not fit is cut. Names take\n"
        "stages, microbatches and costs from the first file, if no flag gives them.",
        examples="""
            zero-bubble draw 1f1b zb-h2 --stages 4 --microbatches 8
            zero-bubble draw zb-h1.json --width 160
            zero-bubble draw 1f1b zb-h2 --stages 4 --microbatches 8 --svg both.svg --width 1600
        """,
    )
    parser.add_argument(
        "what", nargs="+", metavar="NAME|FILE", help=f"{names}, or a .json or .csv file"
    )
    add_size(parser, required=False)
    add_chunks(parser)
    add_costs(parser)
    add_recompute(parser)
    add_drawing(parser, picture=True)
    parser.add_argument("--svg", metavar="FILE.svg", help="write a picture to this file instead")


def run(arguments: argparse.Namespace) -> int:
    found = inputs(arguments.what, arguments)
    timelines = _titled(found)
    say(found)
    warn_of_illegal(found)
    if arguments.svg is not None:
        width = svg.WIDTH if arguments.width is None else arguments.width
        picture = svg.draw_all(timelines, width=width, amount=amount)
        Path(arguments.svg).write_text(picture, encoding="utf-8")
        print(f"wrote {arguments.svg}")
        return 0
    print("\n\n".join(drawing(timeline, arguments) for timeline in timelines))
    return 0


def _titled(found: Sequence[Input]) -> list[Timeline]:
    """Timelines under the schedules' names; those of one name are called after their files."""
    timelines = [one.timeline() for one in found]
    names = Counter(one.schedule.name for one in timelines)
    return [
        timeline
        if names[timeline.schedule.name] == 1
        else replace(timeline, schedule=replace(timeline.schedule, name=one.label))
        for one, timeline in zip(found, timelines, strict=True)
    ]
