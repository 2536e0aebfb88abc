"""``zero-bubble bound``: what no schedule can cost less than, and where that comes from."""

from __future__ import annotations

import argparse

from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import Commands, add_command
from zero_bubble.cli.memory_limit import limit_line
from zero_bubble.cli.searching import add_problem, limit_text, problem_of
from zero_bubble.cli.summary import advice_lines, bound_line
from zero_bubble.cli.table import table

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "bound",
        run,
        summary="what no schedule can cost less than",
        description="A lower bound on the cost of every schedule within the memory limits\n"
        "(--memory-limit, by default 1p, what 1F1B needs): what it comes from, its parts on\n"
        "each stage, and where a little more memory would lower it much.",
        examples="""
            zero-bubble bound --stages 8 --microbatches 24
            zero-bubble bound --stages 8 --microbatches 24 --placement v --memory-limit 0.75p
            zero-bubble bound --stages 4 --microbatches 12 --memory-limit 6,6,4,4 --t-comm 0.1
        """,
    )
    add_problem(parser)


def run(arguments: argparse.Namespace) -> int:
    problem = problem_of(arguments)
    from zero_bubble.search.bounds import lower_bound, stage_bounds

    bound = lower_bound(problem)
    print(bound_line(problem, bound))
    print(limit_line(limit_text(arguments), problem.memory_limit, problem.costs))
    print("\nwhat warm-up and cool-down make each stage wait at least, in ms:\n")
    rows = [
        (
            f"stage {stage}",
            amount(limit),
            f"{one.work:.6g}",
            f"{one.warm_up:.6g}",
            f"{one.cool_down:.6g}",
            f"{one.cost:.6g}",
        )
        for stage, (limit, one) in enumerate(
            zip(problem.memory_limit, stage_bounds(problem), strict=True)
        )
    ]
    print(table(("", "memory limit", "work", "warm-up", "cool-down", "bound"), rows))
    for number, line in enumerate(advice_lines(problem, bound)):
        print(line if number else f"\n{line}")
    return 0
