"""What the commands that search share: the problem, the search, and how its result reads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from zero_bubble.cli.common import (
    ProgressBar,
    UsageError,
    add_costs,
    add_memory_limit,
    add_placement,
    add_size,
    costs_of,
    memory_limits,
    placement_of,
)

if TYPE_CHECKING:
    from zero_bubble.search.bounds import Bound
    from zero_bubble.search.exact_run import Progress as Proof
    from zero_bubble.search.problem import Problem
    from zero_bubble.search.solution import Solution

# The modules of `zero_bubble.search` are imported where they are used: commands that do not search
# should not wait until a compiler is loaded.

__all__ = [
    "EFFORTS",
    "METHODS",
    "add_effort",
    "add_problem",
    "advice_lines",
    "bound_line",
    "problem_of",
    "search",
    "verdict",
]

EFFORTS = ("quick", "normal", "thorough")
METHODS = ("auto", "paper", "cp-sat", "highs", "windows")
_TIMED = ("cp-sat", "highs", "windows")
_LIMIT = "1p"


def add_problem(parser: argparse.ArgumentParser) -> None:
    """``--stages``, ``--microbatches``, ``--placement``, ``--memory-limit`` and costs."""
    add_size(parser)
    add_placement(parser)
    add_memory_limit(parser)
    add_costs(parser)


def add_effort(parser: argparse._ActionsContainer, default: str) -> None:
    """``--effort``; None stands for the default."""
    parser.add_argument("--effort", choices=EFFORTS, help=f"how long the search tries ({default})")


def problem_of(arguments: argparse.Namespace) -> Problem:
    """The problem that `add_problem`'s flags name; a limit left out is 1p, the memory of 1F1B.

    ValueError names the flag that is wrong.
    """
    from zero_bubble.search.problem import Problem

    placement = placement_of(arguments)
    costs = costs_of(arguments, placement)
    text: str = arguments.memory_limit or _LIMIT
    limits = memory_limits(text, placement, costs)
    if arguments.microbatches < 1:
        raise UsageError(f"--microbatches {arguments.microbatches}: at least 1 is needed")
    try:
        return Problem(placement, costs, arguments.microbatches, limits)
    except ValueError as error:
        raise ValueError(f"--memory-limit {text}: {error}") from error


def search(
    problem: Problem,
    bound: Bound,
    *,
    effort: str | None = None,
    method: str = "auto",
    time_limit: float | None = None,
    jitter: float | None = None,
) -> Solution:
    """The best schedule that a method finds, with a progress bar.

    ``effort`` None is normal. The solvers start from what ``auto`` finds, and have
    ``time_limit`` seconds for themselves (60). ValueError for flags that do not go together.
    """
    if time_limit is not None and method not in _TIMED:
        raise UsageError(
            f"--time-limit is for --method {', '.join(_TIMED)}; {method} does a fixed amount of "
            "work: see --effort"
        )
    if time_limit is not None and not time_limit > 0:
        raise UsageError(f"--time-limit {time_limit:g}: more than 0 seconds are needed")
    if jitter is not None and method != "auto":
        raise UsageError(f"--robust is for --method auto: {method} knows no noise")
    if method == "paper":
        from zero_bubble.search.paper import paper_method

        if effort is not None:
            raise UsageError(f"--effort {effort} is not for --method paper: it has no choice")
        return paper_method(problem)
    with ProgressBar() as bar:
        found = _auto(problem, bound, bar, effort or "normal", jitter)
    if method == "auto":
        return found
    with ProgressBar(method) as bar:
        return _improve(problem, found, bound, bar, method, time_limit or 60.0)


def _auto(
    problem: Problem, bound: Bound, bar: ProgressBar, effort: str, jitter: float | None
) -> Solution:
    from zero_bubble.search.auto import Progress, auto

    def show(now: Progress) -> None:
        if now.cost < float("inf"):
            gap = max(0.0, (now.cost - bound.cost) / now.cost) if now.cost else 0.0
            bar.update(problem.bubble_rate(now.cost), problem.bubble_rate(bound.cost), gap)

    return auto(problem, effort=effort, jitter=jitter, progress=show)


def _improve(
    problem: Problem, found: Solution, bound: Bound, bar: ProgressBar, method: str, seconds: float
) -> Solution:
    from zero_bubble.search.exact import solve
    from zero_bubble.search.windows import improve_by_windows

    def show(now: Proof) -> None:
        bar.update(problem.bubble_rate(now.cost), problem.bubble_rate(now.bound), now.gap)

    # Rounding may lift the bound above what it bounds.
    least = min(bound.cost, found.cost)
    # A solver says nothing until it has found more.
    bar.update(problem.bubble_rate(found.cost), problem.bubble_rate(least), found.gap)
    if method == "windows":
        return improve_by_windows(
            problem, found.schedule, time_limit=seconds, lower_bound=least, progress=show
        )
    return solve(
        problem,
        found.schedule,
        solver=method,
        time_limit=seconds,
        lower_bound=least,
        progress=show,
    )


def bound_line(problem: Problem, bound: Bound) -> str:
    """``bound: 99 ms, bubble rate 3.03% (cool-down of stage 0)``."""
    rate = problem.bubble_rate(bound.cost)
    return f"bound: {bound.cost:.6g} ms, bubble rate {rate:.2%} ({_origin(bound)})"


def verdict(problem: Problem, solution: Solution, bound: Bound) -> str:
    """Whether a schedule is optimal, or how far from it at most."""
    proven = solution.bound > bound.cost * (1 + 1e-9)
    best = max(solution.bound, bound.cost)
    if solution.cost <= best * (1 + 1e-6):
        return f"optimal: no schedule within these limits costs less (found by {solution.how})"
    origin = f"proven by {solution.how}" if proven else _origin(bound)
    gap = (solution.cost - best) / solution.cost
    return f"within {gap:.1%} of the best known bound ({origin}; found by {solution.how})"


def advice_lines(problem: Problem, bound: Bound) -> list[str]:
    """Where a little more memory would remove many bubbles, a line each."""
    from zero_bubble.search.advice import advise

    found = advise(problem, bound)
    # Not those that another one beats with less memory.
    return [
        f"more memory: {one}"
        for one in found
        if not any(
            other.extra_memory < one.extra_memory and other.rate_after <= one.rate_after + 1e-9
            for other in found
        )
    ]


def _origin(bound: Bound) -> str:
    return f"{bound.reason} of stage {bound.stage}"
