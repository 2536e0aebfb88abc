"""``zero-bubble schedule``: build a schedule; print and save it."""

from __future__ import annotations

import argparse

from zero_bubble.builders import BUILDERS
from zero_bubble.cli.common import Commands, add_chunks, add_command, add_costs, add_size
from zero_bubble.cli.drawing import add_drawing, drawing
from zero_bubble.cli.sources import build_named
from zero_bubble.export import text
from zero_bubble.export.json_io import save_schedule
from zero_bubble.simulate import simulate

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "schedule",
        run,
        summary="build a schedule; print and save it",
        examples="""
            zero-bubble schedule zb-h1 --stages 4 --microbatches 8
            zero-bubble schedule zb-h2 --stages 8 --microbatches 32 --t-f 18.5 --t-b 18.1 --t-w 9.3
            zero-bubble schedule 1f1b --stages 4 --microbatches 8 --output 1f1b.json
        """,
    )
    parser.add_argument("name", metavar="NAME", help=", ".join(BUILDERS))
    add_size(parser)
    add_chunks(parser)
    add_costs(parser)
    add_drawing(parser)
    parser.add_argument("--output", metavar="FILE.json", help="save the schedule and its costs")


def run(arguments: argparse.Namespace) -> int:
    schedule, costs = build_named(arguments.name, arguments)
    picture = drawing(simulate(schedule, costs), arguments)
    if arguments.output is not None:
        save_schedule(schedule, arguments.output, costs)
    print(f"{text.order(schedule)}\n\n{picture}")
    return 0
