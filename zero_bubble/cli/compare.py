"""``zero-bubble compare``: a table of all schedules: time, bubble, memory."""

from __future__ import annotations

import argparse
import sys
from copy import copy

from zero_bubble.builders import BUILDERS
from zero_bubble.cli.common import (
    Commands,
    UsageError,
    add_chunks,
    add_command,
    add_costs,
    add_size,
)
from zero_bubble.cli.sources import build_named
from zero_bubble.compare import comparison
from zero_bubble.simulate import Timeline, simulate

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "compare",
        run,
        summary="a table of all schedules: time, bubble, memory",
        examples="""
            zero-bubble compare --stages 4 --microbatches 8
            zero-bubble compare --stages 8 --microbatches 24 --t-f 18.5 --t-b 18.1 --t-w 9.3
            zero-bubble compare --stages 4 --microbatches 8 --costs costs.json
        """,
    )
    add_size(parser)
    add_chunks(parser)
    add_costs(parser)


def run(arguments: argparse.Namespace) -> int:
    timelines: list[Timeline] = []
    refused: dict[str, ValueError] = {}
    for name, builder in BUILDERS.items():
        its_own = copy(arguments)
        if not builder.takes_chunks:
            its_own.chunks = None
        try:
            timelines.append(simulate(*build_named(name, its_own)))
        except UsageError:
            raise
        except ValueError as error:
            refused[name] = error
    if not timelines:
        raise next(iter(refused.values()))
    print(comparison(timelines))
    for name, reason in refused.items():
        print(f"zero-bubble: {name} is left out: {reason}", file=sys.stderr)
    return 0
