"""``zero-bubble simulate``: what schedules cost when the times of their passes vary."""

from __future__ import annotations

import argparse
import re

from zero_bubble.builders import BUILDERS
from zero_bubble.cli.common import (
    Commands,
    UsageError,
    add_chunks,
    add_command,
    add_costs,
    add_recompute,
    add_size,
)
from zero_bubble.cli.inputs import inputs, say, warn_of_differences, warn_of_illegal
from zero_bubble.cli.reduction import add_reduction, reduction_table
from zero_bubble.cli.table import table

__all__ = ["add", "run"]

_HEADER = ("schedule", "without noise ms", "mean ms", "95 % below ms", "bubble rate")


def add(commands: Commands) -> None:
    names = ", ".join(BUILDERS)
    parser = add_command(
        commands,
        "simulate",
        run,
        summary="what schedules cost when the times of their passes vary",
        description="Runs each schedule's fixed order many times, with other times of passes and\n"
        "messages in each repeat; all schedules meet the same noise. The bubble rate is\n"
        "the mean over the repeats, measured against what the busiest stage computes.\n"
        "Names take stages, microbatches and costs from the first file, if no flag gives\n"
        "them.",
        examples="""
            zero-bubble simulate 1f1b --stages 4 --microbatches 8
            zero-bubble simulate zb-h1.json 1f1b
            zero-bubble simulate zb-h1 1f1b --stages 8 --microbatches 24 --jitter 0.1
            zero-bubble simulate zb-h2 zb-h1 --stages 8 --microbatches 24 --drift 3:1.1 --seed 7
            zero-bubble simulate zb-v zb-h2 --stages 8 --microbatches 32 --t-reduce 8W
        """,
    )
    parser.add_argument(
        "what", nargs="+", metavar="NAME|FILE", help=f"{names}, or a .json or .csv file"
    )
    parser.add_argument(
        "--jitter",
        type=float,
        default=0.05,
        metavar="X",
        help="relative standard deviation of the times, below 1: 0.05 is 5 %% (0.05)",
    )
    parser.add_argument(
        "--drift", metavar="STAGE:FACTOR", help="a slower stage: 3:1.1 is stage 3, 10 %% slower"
    )
    parser.add_argument("--repeats", type=int, default=100, metavar="N", help="how often (100)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the noise (0)")
    add_size(parser, required=False)
    add_chunks(parser)
    add_costs(parser)
    add_recompute(parser)
    add_reduction(parser)


def run(arguments: argparse.Namespace) -> int:
    # The other commands should not wait until a compiler is loaded.
    from zero_bubble.jitter import jittered

    if not 0 <= arguments.jitter < 1:
        raise UsageError(
            f"--jitter {arguments.jitter:g}: expected at least 0 and less than 1: 0.05 is 5 %"
        )
    drift = None if arguments.drift is None else _drift(arguments.drift)
    found = inputs(arguments.what, arguments)
    reduction = reduction_table(found, arguments)
    results = []
    for one in found:
        one.timeline()  # says which file it is that deadlocks
        results.append(
            jittered(
                one.source.schedule,
                one.source.costs,
                sigma=arguments.jitter,
                drift=drift,
                repeats=arguments.repeats,
                seed=arguments.seed,
            )
        )
    say(found)
    warn_of_illegal(found)
    warn_of_differences(found)
    rows = [
        (
            one.label,
            f"{result.cost:.6g}",
            f"{result.mean:.6g}",
            f"{result.p95:.6g}",
            f"{result.bubble_rate:.2%}",
        )
        for one, result in zip(found, results, strict=True)
    ]
    print(table(_HEADER, rows))
    for one, result in zip(found[1:], results[1:], strict=True):
        print(
            f"{found[0].label} beats {one.label} in {results[0].beats(result):.0%} of "
            f"{arguments.repeats} repeats"
        )
    if reduction is not None:
        print(f"\n{reduction}")
    return 0


def _drift(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"(\d+):(\d+\.?\d*|\.\d+)", text)
    if match is None:
        raise UsageError(
            f"--drift {text}: expected STAGE:FACTOR, such as 3:1.1 for stage 3, 10 % slower"
        )
    return int(match[1]), float(match[2])
