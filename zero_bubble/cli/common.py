"""What the commands' parsers share: sizes, costs, placements, memory limits, progress."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from zero_bubble.cli.amount import parse_amount
from zero_bubble.cli.memory_limit import add_memory_limit, memory_limits
from zero_bubble.cli.progress import ProgressBar
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import load_costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape

__all__ = [
    "Commands",
    "Parser",
    "ProgressBar",
    "UsageError",
    "add_chunks",
    "add_command",
    "add_costs",
    "add_memory_limit",
    "add_placement",
    "add_recompute",
    "add_size",
    "costs_of",
    "has_cost_flags",
    "memory_limits",
    "placement_of",
    "recomputes_in_a_pass",
    "require_size",
]

_MOST = 1_000_000
"""Stages x microbatches x chunks."""
_COST_FLAGS = ("t_f", "t_b", "t_w", "t_comm", "m_b", "m_w", "t_r", "m_r")
_RECOMPUTE = ("in-backward", "pass")
"""Where recomputation can be."""


class UsageError(ValueError):
    """Arguments that can't be understood."""


class Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that all user errors read alike."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


type Commands = argparse._SubParsersAction[Parser]
"""What ``add_subparsers`` returns: where a command registers itself."""


def add_command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    examples: str,
    description: str = "",
    notes: str = "",
) -> argparse.ArgumentParser:
    """Register a command; ``run`` gets its arguments and returns the exit code.

    ``summary`` is its line in ``zero-bubble --help``. Its own help ends with ``notes`` and
    ``examples``: command lines that work as they stand, one a line.
    """
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser = commands.add_parser(
        name,
        help=summary,
        description=description or f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"{notes}\n\nexamples:\n{lines}" if notes else f"examples:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_size(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """``--stages`` and ``--microbatches``."""
    unless = "" if required else " (not for files, which have their own)"
    parser.add_argument(
        "--stages", type=int, required=required, metavar="P", help=f"pipeline stages{unless}"
    )
    parser.add_argument(
        "--microbatches",
        type=int,
        required=required,
        metavar="M",
        help=f"microbatches of a batch on one data-parallel replica{unless}",
    )


def require_size(arguments: argparse.Namespace) -> None:
    """UsageError for a schedule that no memory could hold, before anything tries."""
    sizes = [getattr(arguments, name, None) or 1 for name in ("stages", "microbatches", "chunks")]
    if (passes := math.prod(map(abs, sizes))) > _MOST:
        raise UsageError(
            f"--stages {sizes[0]} and --microbatches {sizes[1]}: {passes:.3g} microbatches on all "
            f"stages together are more than the {_MOST:,} that can be handled"
        )


def add_chunks(parser: argparse.ArgumentParser) -> None:
    """``--chunks``, for the named schedules that have a choice."""
    parser.add_argument(
        "--chunks",
        type=int,
        metavar="V",
        help="parts of the model a stage holds, for interleaved and zb-interleaved (2)",
    )


def add_placement(parser: argparse.ArgumentParser) -> None:
    """``--placement`` and ``--chunks``; see `placement_of`."""
    parser.add_argument(
        "--placement",
        choices=("linear", "interleaved", "v"),
        default="linear",
        help="which parts of the model a stage holds: one (linear), parts i, i+p, i+2p, ... "
        "(interleaved), or parts i and 2p-1-i (v)",
    )
    parser.add_argument(
        "--chunks", type=int, metavar="V", help="parts a stage, with --placement interleaved (2)"
    )


def placement_of(arguments: argparse.Namespace) -> Placement:
    """The placement that `add_placement`'s and `add_size`'s flags name; ValueError if none."""
    name: str = arguments.placement
    chunks: int | None = arguments.chunks
    if chunks is not None and name != "interleaved":
        raise UsageError(
            f"--chunks {chunks} needs --placement interleaved: {name} has "
            f"{'1 chunk' if name == 'linear' else '2 chunks'} a stage"
        )
    stages: int = arguments.stages
    if stages < 1:
        raise UsageError(f"--stages {stages}: at least 1 stage is needed")
    if chunks is not None and chunks < 1:
        raise UsageError(f"--chunks {chunks}: at least 1 chunk a stage is needed")
    match name:
        case "linear":
            return linear(stages)
        case "v":
            return v_shape(stages)
        case _:
            return interleaved(stages, 2 if chunks is None else chunks)


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Times and memory of a whole stage, or ``--costs``, a file; see `costs_of`."""
    group = parser.add_argument_group("costs of a whole stage (divided among its chunks)")
    group.add_argument("--t-f", type=float, metavar="MS", help="time of F (1)")
    group.add_argument("--t-b", type=float, metavar="MS", help="time of B (as F)")
    group.add_argument("--t-w", type=float, metavar="MS", help="time of W (as B)")
    group.add_argument("--t-comm", type=float, metavar="MS", help="time of a message (0)")
    group.add_argument(
        "--m-b", type=parse_amount, metavar="X", help="memory from F to B, also in bytes: 3GiB (1)"
    )
    group.add_argument(
        "--m-w", type=parse_amount, metavar="X", help="its part that stays to W (as M_B)"
    )
    group.add_argument(
        "--t-r", type=float, metavar="MS", help="time of recomputation, with --m-r (as F)"
    )
    group.add_argument(
        "--m-r",
        type=parse_amount,
        metavar="X",
        help="memory from F until it is computed again: with it the job recomputes",
    )
    group.add_argument("--costs", metavar="FILE.json", help="profiled costs, instead of the above")


def costs_of(arguments: argparse.Namespace, placement: Placement) -> Costs:
    """The costs that `add_costs`'s flags name, for this placement.

    Flags are of a whole stage: each of a stage's v chunks gets a v-th, but for the time of a
    message, which is that of each. ``--m-r`` says that there is recomputation. ValueError for a
    number that is negative or not finite, flags beside a file, or a file for another placement.
    """
    given = [name for name in _COST_FLAGS if getattr(arguments, name) is not None]
    if arguments.costs is not None:
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise UsageError(f"{flag} and --costs exclude each other: give one of them")
        costs = load_costs(arguments.costs)
        if (stages := len(costs.shape)) != placement.num_stages:
            # `check` has no such flag, other commands need none for a file.
            flag = "--stages is" if vars(arguments).get("stages") else "the schedule has"
            raise UsageError(
                f"--costs {arguments.costs}: the file has costs for {stages} stages, {flag} "
                f"{placement.num_stages}"
            )
        try:
            costs.require(placement)
        except ValueError as error:
            raise ValueError(f"--costs {arguments.costs}: {error}") from error
        return costs

    def value(name: str, default: float) -> float:
        number = getattr(arguments, name)
        return default if number is None else float(number)

    t_f, m_b = value("t_f", 1.0), value("m_b", 1.0)
    t_b = value("t_b", t_f)
    t_w, m_w = value("t_w", t_b), value("m_w", m_b)
    if arguments.t_r is not None and arguments.m_r is None:
        raise UsageError(
            f"--t-r {arguments.t_r:g} needs --m-r, the memory that is kept until recomputation"
        )
    recomputed = arguments.m_r is not None
    counts = tuple(map(len, placement.positions))

    def spread(whole: float) -> tuple[tuple[float, ...], ...]:
        return tuple((whole / count,) * count for count in counts)

    return Costs(
        t_f=spread(t_f),
        t_b=spread(t_b),
        t_w=spread(t_w),
        m_b=spread(m_b),
        m_w=spread(m_w),
        t_r=spread(value("t_r", t_f)) if recomputed else None,
        m_r=spread(value("m_r", 0.0)) if recomputed else None,
        t_comm=value("t_comm", 0.0),
    )


def add_recompute(parser: argparse.ArgumentParser) -> None:
    """``--recompute``; see `recomputes_in_a_pass`."""
    parser.add_argument(
        "--recompute",
        choices=_RECOMPUTE,
        help="with costs of recomputation (--m-r): as a pass R of its own, as --pipeline-schedule "
        "has it (pass), or within B",
    )


def recomputes_in_a_pass(arguments: argparse.Namespace, costs: Costs) -> bool:
    """Whether schedules are to have R's; UsageError for the flag where nothing is recomputed."""
    where: str | None = getattr(arguments, "recompute", None)
    if where is not None and costs.t_r is None:
        raise UsageError(
            f"--recompute {where} needs costs of recomputation: --m-r and --t-r, or t_r and m_r in "
            "the file of --costs"
        )
    return costs.t_r is not None and where != "in-backward"


def has_cost_flags(arguments: argparse.Namespace) -> bool:
    """Whether any flag of `add_costs` was given."""
    return any(getattr(arguments, name) is not None for name in (*_COST_FLAGS, "costs"))
