"""``zero-bubble schedule``: build a known schedule, or search for the best; print and save it."""

from __future__ import annotations

import argparse

from zero_bubble.builders import BUILDERS
from zero_bubble.check import check
from zero_bubble.cli.common import Commands, UsageError, add_command, memory_limits
from zero_bubble.cli.drawing import add_drawing, drawing, figures
from zero_bubble.cli.searching import (
    METHODS,
    add_effort,
    add_problem,
    advice_lines,
    bound_line,
    problem_of,
    search,
    verdict,
)
from zero_bubble.cli.sources import build_named
from zero_bubble.costs import Costs
from zero_bubble.export import text
from zero_bubble.export.json_io import save_schedule
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate

__all__ = ["add", "run"]

_MOST_PASSES = 2000
"""Larger schedules are shown in part."""
_SHOWN_FIRST, _SHOWN_LAST = 12, 4
_ROBUST = 0.05


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "schedule",
        run,
        summary="build a schedule, or search for the best; print and save it",
        description="Builds a known schedule, or (auto) searches for the cheapest one within a\n"
        "memory limit: by default 1p, what 1F1B needs. With auto it also says how far from the\n"
        "optimum the result can be at most, and where more memory would pay.",
        examples="""
            zero-bubble schedule zb-h1 --stages 4 --microbatches 8
            zero-bubble schedule zb-h2 --stages 8 --microbatches 32 --t-f 18.5 --t-b 18.1 --t-w 9.3
            zero-bubble schedule 1f1b --stages 4 --microbatches 8 --output 1f1b.json
            zero-bubble schedule auto --stages 4 --microbatches 8 --memory-limit 1.5p
            zero-bubble schedule auto --stages 4 --microbatches 12 --placement v --effort quick
        """,
    )
    parser.add_argument("name", metavar="NAME", help=f"auto, {', '.join(BUILDERS)}")
    add_problem(parser)
    # Named schedules have their own placement: whether it is given matters.
    parser.set_defaults(placement=None)
    group = parser.add_argument_group("search (auto)")
    add_effort(group, "normal")
    group.add_argument(
        "--method",
        choices=METHODS,
        help="what searches (auto): paper is the paper's own heuristic; cp-sat, highs and windows "
        "are solvers that start from what auto finds",
    )
    group.add_argument("--time-limit", type=float, metavar="S", help="seconds for the solver (60)")
    group.add_argument(
        "--robust",
        type=float,
        nargs="?",
        const=_ROBUST,
        metavar="SIGMA",
        help="prefer the schedule with the least mean cost when times vary by so much: 0.05 is 5 "
        f"%%, relative standard deviation ({_ROBUST})",
    )
    add_drawing(parser)
    parser.add_argument(
        "--print-order",
        action="store_true",
        help=f"print all passes and the drawing, also of more than {_MOST_PASSES} passes",
    )
    parser.add_argument("--output", metavar="FILE.json", help="save the schedule and its costs")


def run(arguments: argparse.Namespace) -> int:
    return _run_auto(arguments) if arguments.name == "auto" else _run_named(arguments)


def _run_named(arguments: argparse.Namespace) -> int:
    name: str = arguments.name
    for flag in ("placement", "effort", "method", "time_limit", "robust"):
        if name in BUILDERS and getattr(arguments, flag) is not None:
            raise UsageError(
                f"--{flag.replace('_', '-')} is for auto: {name} is one fixed schedule"
            )
    schedule, costs = build_named(name, arguments)
    limits = None
    if arguments.memory_limit is not None:
        limits = memory_limits(arguments.memory_limit, schedule.placement, costs)
    _show(schedule, costs, limits, arguments)
    if limits is None:
        return 0
    violations = check(schedule, costs=costs, memory_limit=limits)
    print("")
    for violation in violations:
        print(f"--memory-limit {arguments.memory_limit}: {violation}")
    if not violations:
        print(f"--memory-limit {arguments.memory_limit}: kept")
    return 1 if violations else 0


def _run_auto(arguments: argparse.Namespace) -> int:
    arguments.placement = arguments.placement or "linear"
    problem = problem_of(arguments)
    from zero_bubble.search.bounds import lower_bound

    bound = lower_bound(problem)
    solution = search(
        problem,
        bound,
        effort=arguments.effort,
        method=arguments.method or "auto",
        time_limit=arguments.time_limit,
        jitter=arguments.robust,
    )
    _show(solution.schedule, problem.costs, problem.memory_limit, arguments)
    print(f"\n{bound_line(problem, bound)}")
    print(verdict(problem, solution, bound))
    for line in advice_lines(problem, bound):
        print(line)
    return 0


def _show(
    schedule: Schedule,
    costs: Costs,
    limits: tuple[float, ...] | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the schedule, and save it if a file is named."""
    timeline = simulate(schedule, costs)
    whole = arguments.print_order or sum(map(len, schedule.passes)) <= _MOST_PASSES
    drawn = whole or arguments.width is not None
    picture = drawing(timeline, arguments) if drawn else figures(timeline)
    if arguments.output is not None:
        save_schedule(schedule, arguments.output, costs, memory_limit=limits)
    order = text.order(schedule) if whole else _ends(schedule)
    print(f"{order}\n\n{picture}")


def _ends(schedule: Schedule) -> str:
    """The first and last passes of each stage."""
    digits = len(str(schedule.num_stages - 1))
    lines = []
    for stage, row in enumerate(schedule.passes):
        passes = [str(one) for one in row[:_SHOWN_FIRST]] + ["..."]
        passes += [str(one) for one in row[_SHOWN_FIRST:][-_SHOWN_LAST:]]
        lines.append(f"stage {stage:>{digits}}  {' '.join(passes)}")
    return "\n".join(lines) + "\n--print-order prints all passes"
