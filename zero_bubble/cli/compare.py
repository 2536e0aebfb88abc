"""``zero-bubble compare``: a table of all schedules: time, bubble, memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from zero_bubble.builders import BUILDERS
from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import (
    Commands,
    UsageError,
    add_chunks,
    add_command,
    add_costs,
    add_recompute,
    add_size,
    costs_of,
    recomputes_in_a_pass,
)
from zero_bubble.cli.compiling import announce_compiling
from zero_bubble.cli.sources import build_named
from zero_bubble.compare import comparison
from zero_bubble.placement import linear, v_shape
from zero_bubble.simulate import Timeline, simulate

__all__ = ["add", "run"]

_SEARCHES = (
    ("auto-linear-1p", linear, 1),
    ("auto-linear-2p", linear, 2),
    ("auto-v-1p", v_shape, 1),
)
"""Name, placement, and memory limit in units of p M_B."""


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
            zero-bubble compare --stages 4 --microbatches 8 --t-comm 0.1 --auto
        """,
    )
    add_size(parser)
    parser.add_argument(
        "--auto",
        action="store_true",
        help="also search (effort quick): one chunk a stage at 1p and 2p, V at 1p",
    )
    add_chunks(parser)
    add_costs(parser)
    add_recompute(parser)


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
    if arguments.auto:
        announce_compiling()
        timelines += _found(arguments, refused)
    if not timelines:
        raise next(iter(refused.values()))
    print(comparison(timelines, amount=amount))
    if refused:
        print(f"zero-bubble: left out: {_reasons(refused)}", file=sys.stderr)
    return 0


def _reasons(refused: dict[str, ValueError]) -> str:
    """Why which schedules are left out; those with one reason are named together."""
    names: dict[str, list[str]] = {}
    for name, reason in refused.items():
        names.setdefault(str(reason), []).append(name)
    return "; ".join(f"{', '.join(which)} ({reason})" for reason, which in names.items())


def _found(arguments: argparse.Namespace, refused: dict[str, ValueError]) -> Iterator[Timeline]:
    """What the search finds; what it cannot do goes to ``refused``."""
    from zero_bubble.search.auto import auto
    from zero_bubble.search.problem import Problem

    for name, arrange, factor in _SEARCHES:
        try:
            placement = arrange(arguments.stages)
            costs = costs_of(arguments, placement)
            limits = [factor * placement.num_stages * sum(row) for row in costs.m_b]
            within = not recomputes_in_a_pass(arguments, costs)
            problem = Problem.of(
                placement, costs, arguments.microbatches, limits, recompute_in_backward=within
            )
            schedule = auto(problem, effort="quick").schedule
            yield simulate(replace(schedule, name=name), costs)
        except ValueError as error:
            refused[name] = error
