"""The ``zero-bubble`` command: build, compare, check and draw schedules."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from zero_bubble.builders import BUILDERS, build
from zero_bubble.check import bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.compare import comparison
from zero_bubble.costs import Costs
from zero_bubble.export import svg, text
from zero_bubble.export.json_io import load_costs, load_schedule_and_costs, save_schedule
from zero_bubble.lower import lower
from zero_bubble.placement import Placement
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import Timeline, simulate

__all__ = ["main"]


class _UsageError(ValueError):
    """Arguments that can't be understood."""


class _Parser(argparse.ArgumentParser):
    """Raises instead of leaving the process, so that all user errors read alike."""

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} (see {self.prog} --help)")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if ``check`` found a violation, 2 for a user's error."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"zero-bubble: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"zero-bubble: {error}", file=sys.stderr)
        return 2
    except (OverflowError, RecursionError, MemoryError) as error:
        print(f"zero-bubble: a number or file is too large: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zero-bubble", description="Pipeline schedules without bubbles.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    names = ", ".join(BUILDERS)

    one = commands.add_parser("schedule", help="build a schedule; print and save it")
    one.add_argument("name", metavar="NAME", help=names)
    _add_size(one)
    _add_costs(one)
    _add_drawing(one)
    one.add_argument("--output", metavar="FILE.json", help="save the schedule and its costs")
    one.set_defaults(command=_schedule)

    one = commands.add_parser("compare", help="a table of all schedules: time, bubble, memory")
    _add_size(one)
    _add_costs(one)
    one.set_defaults(command=_compare)

    one = commands.add_parser("check", help="whether a schedule is legal; exit 1 if not")
    one.add_argument("file", metavar="FILE.json")
    one.add_argument(
        "--memory-limit",
        type=float,
        metavar="X",
        help="of each stage, in the unit of the costs in the file; without costs, in units of a "
        "chunk's M_B",
    )
    one.set_defaults(command=_check)

    one = commands.add_parser(
        "draw",
        help="draw schedules as text, or as a picture",
        description="Rows are stages, time goes right, dots are idle. F3, B3, W3: forward, input "
        "gradient and weight gradient of microbatch 3; BW3: a fused backward. Time is to scale, a "
        "label that does not fit is cut.",
    )
    one.add_argument("what", nargs="+", metavar="NAME|FILE.json", help=f"{names}, or a file")
    _add_size(one, required=False)
    _add_costs(one)
    _add_drawing(one)
    one.add_argument("--svg", metavar="FILE.svg", help="write a picture instead")
    one.set_defaults(command=_draw)
    return parser


def _add_size(parser: argparse.ArgumentParser, required: bool = True) -> None:
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


def _add_costs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("costs of a whole stage (divided among its chunks)")
    group.add_argument("--t-f", type=float, metavar="MS", help="time of F (1)")
    group.add_argument("--t-b", type=float, metavar="MS", help="time of B (as F)")
    group.add_argument("--t-w", type=float, metavar="MS", help="time of W (as B)")
    group.add_argument("--t-comm", type=float, metavar="MS", help="time of a message (0)")
    group.add_argument("--m-b", type=float, metavar="X", help="memory from F to B (1)")
    group.add_argument("--m-w", type=float, metavar="X", help="its part that stays to W (as M_B)")
    group.add_argument("--costs", metavar="FILE.json", help="profiled costs, instead of the above")


def _add_drawing(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="of the drawing")
    parser.add_argument("--colour", choices=("auto", "always", "never"), default="auto")


def _costs(arguments: argparse.Namespace, placement: Placement) -> Costs:
    flags = ("t_f", "t_b", "t_w", "t_comm", "m_b", "m_w")
    given = [name for name in flags if getattr(arguments, name) is not None]
    if arguments.costs is not None:
        if given:
            flag = "--" + given[0].replace("_", "-")
            raise _UsageError(f"{flag} and --costs exclude each other: give one of them")
        return load_costs(arguments.costs)

    def value(name: str, default: float) -> float:
        number = getattr(arguments, name)
        return default if number is None else float(number)

    t_f, m_b = value("t_f", 1.0), value("m_b", 1.0)
    t_b = value("t_b", t_f)
    chunks = placement.num_chunks(0)
    return Costs.uniform(
        placement,
        t_f / chunks,
        t_b / chunks,
        value("t_w", t_b) / chunks,
        value("t_comm", 0.0),
        m_b / chunks,
        value("m_w", m_b) / chunks,
    )


def _has_cost_flags(arguments: argparse.Namespace) -> bool:
    flags = ("t_f", "t_b", "t_w", "t_comm", "m_b", "m_w", "costs")
    return any(getattr(arguments, name) is not None for name in flags)


def _schedule(arguments: argparse.Namespace) -> int:
    schedule = build(arguments.name, arguments.stages, arguments.microbatches)
    costs = _costs(arguments, schedule.placement)
    timeline = simulate(schedule, costs)
    if arguments.output is not None:
        save_schedule(schedule, arguments.output, costs)
    print(text.order(schedule))
    print()
    _print_drawing(timeline, arguments)
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    timelines = []
    for name in BUILDERS:
        schedule = build(name, arguments.stages, arguments.microbatches)
        timelines.append(simulate(schedule, _costs(arguments, schedule.placement)))
    print(comparison(timelines))
    return 0


def _check(arguments: argparse.Namespace) -> int:
    schedule, costs = load_schedule_and_costs(arguments.file)
    found = check(schedule, costs=costs, memory_limit=arguments.memory_limit)
    if not found:
        found = check_program(lower(schedule)) + check_program(lower(schedule, forward_only=True))
    for one in found:
        print(f"{arguments.file}: {one}")
    if found:
        print(f"{arguments.file}: illegal, {len(found)} violations")
        return 1
    print(f"{arguments.file}: legal")
    notes = bit_identical_order(schedule)
    for one in notes:
        print(f"{arguments.file}: note: {one}")
    if not notes:
        print(f"{arguments.file}: bit-identical to 1F1B")
    return 0


def _draw(arguments: argparse.Namespace) -> int:
    timelines = [_timeline(what, arguments) for what in arguments.what]
    if arguments.svg is not None:
        Path(arguments.svg).write_text(svg.draw_all(timelines), encoding="utf-8")
        return 0
    for index, timeline in enumerate(timelines):
        if index:
            print()
        _print_drawing(timeline, arguments)
    return 0


def _timeline(what: str, arguments: argparse.Namespace) -> Timeline:
    """A drawing's argument is the name of a schedule, or else a file."""
    if what in BUILDERS:
        if arguments.stages is None or arguments.microbatches is None:
            raise _UsageError(f"{what} needs --stages and --microbatches")
        schedule = build(what, arguments.stages, arguments.microbatches)
        return simulate(schedule, _costs(arguments, schedule.placement))
    if not Path(what).exists():
        raise _UsageError(f"{what!r} is neither a file nor one of {', '.join(BUILDERS)}")
    schedule, costs = load_schedule_and_costs(what)
    if costs is None or _has_cost_flags(arguments):
        costs = _costs(arguments, schedule.placement)
    return simulate(_named(schedule, what), costs)


def _named(schedule: Schedule, file: str) -> Schedule:
    if schedule.name:
        return schedule
    return Schedule(schedule.placement, schedule.num_microbatches, schedule.passes, Path(file).stem)


def _print_drawing(timeline: Timeline, arguments: argparse.Namespace) -> None:
    colour = arguments.colour == "always" or (arguments.colour == "auto" and sys.stdout.isatty())
    memory = ", ".join(f"{one:.4g}" for one in timeline.peak_memory)
    print(
        f"{timeline.schedule.name}: cost {timeline.cost:.6g} ms, bubble rate "
        f"{timeline.bubble_rate:.2%}, peak memory {memory}"
    )
    print(text.draw(timeline, width=arguments.width, colour=colour))
