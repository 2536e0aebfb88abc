"""Reduction of gradients in ``zero-bubble simulate``: how much of it is exposed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from zero_bubble.cli.common import UsageError
from zero_bubble.cli.inputs import Input
from zero_bubble.cli.table import table
from zero_bubble.costs import Costs
from zero_bubble.reduction import exposed_reduction
from zero_bubble.simulate import Timeline

__all__ = ["add_reduction", "reduction_table"]

_BUCKETS = 8
_HEADER = (
    "exposed reduction, ms",
    "iteration (behind a barrier)",
    "W's reordered",
    "mean of the stages",
    "W's reordered",
)


def add_reduction(parser: argparse.ArgumentParser) -> None:
    """``--t-reduce`` and ``--buckets``; see `reduction_table`."""
    group = parser.add_argument_group("reduction of gradients over data-parallel ranks")
    group.add_argument(
        "--t-reduce",
        metavar="MS|XW",
        help="time to reduce a stage's gradients, in ms or W's: 8W is as long as 8 W's of the "
        "stage. Prints how much of it comes after the last pass, with W's at the tail as they "
        "are and reordered by parameter",
    )
    group.add_argument(
        "--buckets",
        type=int,
        metavar="N",
        help=f"into how many buckets each chunk's gradients are cut ({_BUCKETS})",
    )


def reduction_table(found: Sequence[Input], arguments: argparse.Namespace) -> str | None:
    """How much later iterations and stages end for the reduction of gradients.

    An iteration's step waits for all stages. None if neither ``--t-reduce`` nor all costs say how
    long reductions take. UsageError for a flag that says nothing of use.
    """
    if arguments.buckets is not None and arguments.buckets < 1:
        raise UsageError(f"--buckets {arguments.buckets}: at least 1 bucket is needed")
    timelines = [_with_reduction(one.timeline(), arguments.t_reduce) for one in found]
    if any(one.costs.t_reduce is None for one in timelines):
        if arguments.buckets is not None:
            raise UsageError(f"--buckets {arguments.buckets} needs --t-reduce: 8W, for example")
        return None
    buckets = arguments.buckets or _BUCKETS
    rows = []
    for one, timeline in zip(found, timelines, strict=True):
        plain, reordered = (
            exposed_reduction(timeline, buckets, reordered=how) for how in (False, True)
        )
        times = (
            plain.behind_barrier,
            reordered.behind_barrier,
            fmean(plain.exposed),
            fmean(reordered.exposed),
        )
        rows.append((one.label, *(f"{time:.6g}" for time in times)))
    return table(_HEADER, rows)


def _with_reduction(timeline: Timeline, text: str | None) -> Timeline:
    if text is None:
        return timeline
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)(W?)", text)
    if match is None:
        raise UsageError(f"--t-reduce {text}: expected milliseconds, or W's such as 8W")
    number = float(match[1])
    costs: Costs = timeline.costs
    if match[2]:
        times = tuple(tuple(number * one for one in row) for row in costs.t_w)
    else:
        times = tuple((number / len(row),) * len(row) for row in costs.t_w)
    return replace(timeline, costs=replace(costs, t_reduce=times))
