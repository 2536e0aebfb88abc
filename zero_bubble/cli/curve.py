"""``zero-bubble curve``: the bubble rate over the memory limit."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import (
    Commands,
    ProgressBar,
    UsageError,
    add_command,
    add_costs,
    add_placement,
    add_size,
    costs_of,
    placement_of,
)
from zero_bubble.cli.compiling import announce_compiling
from zero_bubble.cli.searching import add_effort
from zero_bubble.cli.table import table
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement

if TYPE_CHECKING:
    from zero_bubble.search.problem import Problem
    from zero_bubble.search.solution import Solution

__all__ = ["add", "run"]

_FACTORS = (1 / 3, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5)
"""The limits if no number of them is given."""
_EFFORT = "quick"
_GRAMMAR = re.compile(r"(\d+\.?\d*|\.\d+)p?", re.IGNORECASE)


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "curve",
        run,
        summary="the bubble rate over the memory limit",
        description="Searches for the best schedule at each of several memory limits, and prints\n"
        "the bubble rates found beside the lower bounds. Limits are multiples of\n"
        "p M_B, the memory of 1F1B.",
        examples="""
            zero-bubble curve --stages 4 --microbatches 8 --steps 4
            zero-bubble curve --stages 4 --microbatches 8 --placement v --to 1p --steps 3
            zero-bubble curve --stages 4 --microbatches 8 --placement linear --t-w 0.5 --steps 3
        """,
    )
    add_size(parser)
    add_placement(parser)
    # Without --placement both of the usual ones are shown.
    parser.set_defaults(placement=None)
    parser.add_argument(
        "--from",
        dest="least",
        metavar="Xp",
        help="smallest limit (1/3p, or one microbatch if that is more)",
    )
    parser.add_argument(
        "--to", dest="most", metavar="Xp", help=f"largest limit ({_shown(_FACTORS[-1])})"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help=f"number of limits, evenly spaced (without it {', '.join(map(_shown, _FACTORS))})",
    )
    add_effort(parser, _EFFORT)
    add_costs(parser)


def run(arguments: argparse.Namespace) -> int:
    shown = _placements(arguments)
    factors = _factors(arguments)
    if arguments.microbatches < 1:
        raise UsageError(f"--microbatches {arguments.microbatches}: at least 1 is needed")
    announce_compiling()
    curves = [_curve(placement, costs, factors, arguments) for placement, costs in shown]
    header = ["limit"]
    for placement, _ in shown:
        header += [f"{placement.name} found", "bound", "found above bound"]
    rows = []
    for index, factor in enumerate(factors):
        row = [_shown(factor)]
        for curve in curves:
            problem, solution = curve[index]
            row += [
                f"{problem.bubble_rate(solution.cost):.2%}",
                f"{problem.bubble_rate(solution.bound):.2%}",
                f"{solution.gap:.2%}",
            ]
        rows.append(row)
    print(
        f"bubble rates, found with effort {arguments.effort or _EFFORT}, and their lower bounds:\n"
    )
    print(table(header, rows))
    for placement, costs in shown:
        if line := _flattening(placement, costs):
            print(f"\n{line}")
    return 0


def _placements(arguments: argparse.Namespace) -> list[tuple[Placement, Costs]]:
    """What to show, with its costs: a file's are for one placement, the flags' for any."""
    names = [arguments.placement]
    if arguments.placement is None:
        names = ["linear", "v"] if arguments.costs is None else ["linear"]
    shown = []
    for name in names:
        arguments.placement = name
        placement = placement_of(arguments)
        shown.append((placement, costs_of(arguments, placement)))
    return shown


def _factors(arguments: argparse.Namespace) -> list[float]:
    """The limits in units of p M_B."""
    one = 1 / arguments.stages
    least, most = max(_FACTORS[0], one), _FACTORS[-1]
    if arguments.least is not None:
        least = _factor("--from", arguments.least)
        if least < one * (1 - 1e-9):
            raise UsageError(
                f"--from {arguments.least}: one microbatch takes {one:.3g}p, the least that works"
            )
    if arguments.most is not None:
        most = _factor("--to", arguments.most)
    if most < least:
        raise UsageError(f"--to {most:.3g}p is below --from {least:.3g}p: limits must rise")
    steps: int | None = arguments.steps
    if steps is None:
        inner = [factor for factor in _FACTORS if least < factor < most]
        return [least, *inner, most] if least < most else [least]
    if steps < 1:
        raise UsageError(f"--steps {steps}: at least 1 limit is needed")
    return [least + (most - least) * step / max(1, steps - 1) for step in range(steps)]


def _shown(factor: float) -> str:
    return "1/3p" if factor == 1 / 3 else f"{factor:.3g}p"


def _factor(flag: str, text: str) -> float:
    match = _GRAMMAR.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} {text}: expected a multiple of p M_B, such as 0.5p")
    return float(match[1])


def _curve(
    placement: Placement, costs: Costs, factors: list[float], arguments: argparse.Namespace
) -> list[tuple[Problem, Solution]]:
    from zero_bubble.search.curve import memory_curve

    stages = placement.num_stages
    limits = [[factor * stages * sum(row) for row in costs.m_b] for factor in factors]
    found: list[tuple[Problem, Solution]] = []
    with ProgressBar(placement.name) as bar:

        def show(problem: Problem, solution: Solution) -> None:
            found.append((problem, solution))
            rate, bound = problem.bubble_rate(solution.cost), problem.bubble_rate(solution.bound)
            bar.update(rate, bound, solution.gap)

        memory_curve(
            placement,
            costs,
            arguments.microbatches,
            limits,
            effort=arguments.effort or _EFFORT,
            progress=show,
        )
    return found


def _flattening(placement: Placement, costs: Costs) -> str:
    """The paper's estimate of where more memory stops paying, if it has one."""
    from zero_bubble.search.appendix_b import flattening

    found = flattening(placement, costs)
    whole = sum(map(sum, costs.m_b))  # p M_B, with the mean M_B
    if found is None or not whole:
        return ""
    return (
        f"{placement.name}, by the paper's appendix B: the bubble rate falls almost linearly up to "
        f"{amount(found.knee)} ({found.knee / whole:.3g}p), the last bubbles go at "
        f"{amount(found.last_bubbles)} ({found.last_bubbles / whole:.3g}p)"
    )
