"""``zero-bubble schedule``: build a known schedule, or search for the best; print and save it."""

from __future__ import annotations

import argparse
from dataclasses import replace

from zero_bubble.builders import BUILDERS
from zero_bubble.check import check
from zero_bubble.cli.common import Commands, UsageError, add_command, memory_limits
from zero_bubble.cli.drawing import add_drawing, figures, picture
from zero_bubble.cli.memory_limit import limit_line
from zero_bubble.cli.output import require_json
from zero_bubble.cli.searching import (
    METHODS,
    add_effort,
    add_problem,
    limit_text,
    name_of,
    problem_of,
    search,
)
from zero_bubble.cli.sources import build_named
from zero_bubble.cli.summary import advice_lines, bound_line, robust_line, verdict
from zero_bubble.costs import Costs
from zero_bubble.export import text
from zero_bubble.export.json_io import save_schedule
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate

__all__ = ["add", "run"]

_MOST_PASSES = 300
"""Of larger schedules only the figures are shown."""
_ROBUST = 0.05
_COSTS_FILE = """\
costs of each stage and chunk, for --costs FILE.json; here of two stages of one chunk:
  {"t_f": [[18.5], [18.1]], "t_b": [[18.1], [17.9]], "t_w": [[9.3], [9.4]],
   "m_b": [[2e9], [2e9]], "m_w": [[1e9], [1e9]], "t_comm": 0.5}
t_* are ms, m_b is memory from F to B and m_w its part that stays to W, both in any one unit.
With recomputation also t_r, its time, and m_r, the memory that is kept from F until then.
Where every stage has one chunk, [18.5, 18.1] is the same as [[18.5], [18.1]]."""


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "schedule",
        run,
        summary="build a schedule, or search for the best; print and save it",
        description="Builds a known schedule, or (auto) searches for the cheapest one within a\n"
        "memory limit: by default 1p, what 1F1B needs. With auto it also says how far from the\n"
        "optimum the result can be at most, and where more memory would pay.",
        notes=_COSTS_FILE,
        examples="""
            zero-bubble schedule zb-h1 --stages 4 --microbatches 8
            zero-bubble schedule zb-h2 --stages 8 --microbatches 32 --t-f 18.5 --t-b 18.1 --t-w 9.3
            zero-bubble schedule 1f1b --stages 4 --microbatches 8 --output 1f1b.json
            zero-bubble schedule auto --stages 4 --microbatches 8 --memory-limit 1.5p
            zero-bubble schedule auto --stages 4 --microbatches 12 --placement v --effort quick
            zero-bubble schedule auto --stages 4 --microbatches 8 --m-r 0.05 --memory-limit 0.5p
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
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="S",
        help="seconds for the solver, in addition to the search of auto that it starts from (60)",
    )
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
        help=f"print the order and the drawing, also of more than {_MOST_PASSES} passes",
    )
    parser.add_argument("--output", metavar="FILE.json", help="save the schedule and its costs")


def run(arguments: argparse.Namespace) -> int:
    name: str = arguments.name
    if name != "auto" and name not in BUILDERS:
        raise UsageError(f"no schedule is called {name!r}; known: auto, {', '.join(BUILDERS)}")
    if arguments.output is not None:
        require_json("--output", arguments.output)
    return _run_auto(arguments) if name == "auto" else _run_named(arguments)


def _run_named(arguments: argparse.Namespace) -> int:
    name: str = arguments.name
    for flag in ("placement", "effort", "method", "time_limit", "robust"):
        if getattr(arguments, flag) is not None:
            raise UsageError(
                f"--{flag.replace('_', '-')} is for auto: {name} is one fixed schedule"
            )
    schedule, costs = build_named(name, arguments)
    given: str | None = arguments.memory_limit
    limits = None if given is None else memory_limits(given, schedule.placement, costs)
    _show(schedule, costs, limits, arguments)
    if given is None or limits is None:
        return 0
    print(limit_line(given, limits, costs))
    violations = check(schedule, costs=costs, memory_limit=limits)
    for violation in violations:
        print(f"--memory-limit {given}: {violation}")
    if not violations:
        print(f"--memory-limit {given}: kept")
    return 1 if violations else 0


def _run_auto(arguments: argparse.Namespace) -> int:
    arguments.placement = arguments.placement or "linear"
    problem = problem_of(arguments)
    from zero_bubble.search.bounds import lower_bound

    bound = lower_bound(problem)
    found = search(
        problem,
        bound,
        effort=arguments.effort,
        method=arguments.method or "auto",
        time_limit=arguments.time_limit,
        jitter=arguments.robust,
    )
    schedule = replace(found.solution.schedule, name=name_of(arguments))
    _show(schedule, problem.costs, problem.memory_limit, arguments)
    print(limit_line(limit_text(arguments), problem.memory_limit, problem.costs))
    print(bound_line(problem, bound, found))
    print(verdict(found))
    if found.plain is not None:
        print(robust_line(found, found.plain, arguments.robust))
    if not found.solver_proves:
        # What a solver proves for these limits says nothing about others.
        for line in advice_lines(problem, bound):
            print(line)
    return 0


def _show(
    schedule: Schedule,
    costs: Costs,
    limits: tuple[float, ...] | None,
    arguments: argparse.Namespace,
) -> None:
    """Print the schedule and its figures, and save it if a file is named."""
    timeline = simulate(schedule, costs)
    count = sum(map(len, schedule.passes))
    whole = arguments.print_order or count <= _MOST_PASSES
    parts = [text.order(schedule)] if whole else []
    if whole or arguments.width is not None:
        parts.append(picture(timeline, arguments))
    if arguments.output is not None:
        save_schedule(schedule, arguments.output, costs, memory_limit=limits)
    if not whole:
        parts.append(f"--print-order prints the order and the drawing of all {count} passes")
    print("\n\n".join([*parts, figures(timeline)]))
