"""``zero-bubble check``: whether a schedule is legal, and bit-identical to 1F1B."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zero_bubble.builders import BUILDERS
from zero_bubble.check import Rule, bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import (
    Commands,
    UsageError,
    add_command,
    add_costs,
    add_memory_limit,
    costs_of,
    has_cost_flags,
    memory_limits,
)
from zero_bubble.cli.inputs import counted
from zero_bubble.cli.sources import read
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import ScheduleFile
from zero_bubble.lower import lower
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "check",
        run,
        summary="whether a schedule is legal; exit 1 if not",
        description="Whether the schedule in a file can run, computes what it should and keeps to\n"
        "its memory limit: --memory-limit, or the file's own. Exit 1 if not. Without\n"
        "costs, in the file or here, a microbatch counts 1 on each chunk from F to W.",
        examples="""
            zero-bubble check zb-h1.json
            zero-bubble check zb-h1.json --memory-limit 1p
            zero-bubble check zb-h1.json --memory-limit 4,4,5,6
            zero-bubble check from-pytorch.csv --m-b 2e9 --m-w 1e9 --memory-limit 12GiB
        """,
    )
    parser.add_argument("file", metavar="FILE", help="a .json or .csv file")
    add_memory_limit(parser)
    add_costs(parser)


def run(arguments: argparse.Namespace) -> int:
    name: str = arguments.file
    if (name in BUILDERS or name == "auto") and not Path(name).exists():
        raise UsageError(
            f"{name} is no file: save the schedule with zero-bubble schedule {name} --stages P "
            "--microbatches M --output FILE.json, and give FILE.json here"
        )
    file = read(name)
    schedule = file.schedule
    costs, limits = _costs_and_limits(file, arguments)
    found = check(schedule, costs=costs, memory_limit=limits)
    if not found:
        found = check_program(lower(schedule)) + check_program(lower(schedule, forward_only=True))
    for one in found:
        print(f"{name}: {one}")
    if limits is not None and all(one.rule is Rule.MEMORY for one in found):
        peak = _amounts(simulate(schedule, costs).peak_memory)
        print(f"{name}: peak memory {peak}; limit {_amounts(limits)}")
        if file.costs is None and not has_cost_flags(arguments):
            print(f"{name}: note: without costs a chunk counts 1 for each microbatch")
    if found:
        print(f"{name}: illegal, {counted(len(found), 'violation')}")
        return 1
    print(f"{name}: legal: {_size(schedule)}")
    notes = bit_identical_order(schedule)
    for one in notes:
        print(f"{name}: note: {one}")
    if not notes:
        print(f"{name}: bit-identical to 1F1B")
    return 0


def _amounts(memory: Sequence[float]) -> str:
    """Of each stage, or once if all are the same."""
    texts = [*map(amount, memory)]
    return texts[0] if len({*texts}) == 1 else ", ".join(texts)


def _size(schedule: Schedule) -> str:
    counts = sorted({len(held) for held in schedule.placement.positions})
    chunks = (
        counted(counts[0], "chunk") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} chunks"
    )
    return (
        f"{counted(schedule.num_stages, 'stage')}, {chunks} a stage, "
        f"{counted(schedule.num_microbatches, 'microbatch')}"
    )


def _costs_and_limits(
    file: ScheduleFile, arguments: argparse.Namespace
) -> tuple[Costs, tuple[float, ...] | None]:
    placement = file.schedule.placement
    own_limit = file.memory_limit
    if has_cost_flags(arguments):
        costs = costs_of(arguments, placement)
        own_limit = None  # it is in the unit of the file's costs
    else:
        costs = file.costs or Costs.uniform(placement, 1, 1, 1)
    if arguments.memory_limit is not None:
        return costs, memory_limits(arguments.memory_limit, placement, costs)
    return costs, own_limit
