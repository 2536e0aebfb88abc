"""What the commands that search share: the problem, and the search."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_bubble.cli.common import (
    ProgressBar,
    UsageError,
    add_costs,
    add_memory_limit,
    add_placement,
    add_recompute,
    add_size,
    costs_of,
    memory_limits,
    placement_of,
    recomputes_in_a_pass,
)
from zero_bubble.cli.compiling import announce_compiling

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
    "Found",
    "add_effort",
    "add_problem",
    "limit_text",
    "name_of",
    "problem_of",
    "search",
]

EFFORTS = ("quick", "normal", "thorough")
METHODS = ("auto", "paper", "cp-sat", "highs", "windows")
_TIMED = ("cp-sat", "highs", "windows")
_LIMIT = "1p"
_LONGEST_LIMIT = 16
"""Longer ones do not go into a name."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found, and how."""

    problem: Problem
    solution: Solution
    bound: Bound
    """What is proven without a search."""
    method: str
    start: Solution | None = None
    """What a solver started from."""
    plain: Solution | None = None
    """The cheapest schedule without noise, if the mean cost under noise was what counted."""

    @property
    def best_bound(self) -> float:
        """The best that is proven, in ms."""
        return max(self.solution.bound, self.bound.cost)

    @property
    def solver_proves(self) -> bool:
        """Whether a solver's bound is the best."""
        return self.start is not None and self.solution.bound > self.bound.cost * (1 + 1e-6)


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Size, ``--placement``, ``--memory-limit``, costs and ``--recompute``."""
    add_size(parser)
    add_placement(parser)
    add_memory_limit(parser)
    add_costs(parser)
    add_recompute(parser)


def add_effort(parser: argparse._ActionsContainer, default: str) -> None:
    """``--effort``; None stands for the default."""
    parser.add_argument(
        "--effort",
        choices=EFFORTS,
        help="how long the search tries: with 32 stages quick takes a second or two, normal up to "
        f"about ten, thorough up to a minute or so ({default})",
    )


def problem_of(arguments: argparse.Namespace) -> Problem:
    """The problem that `add_problem`'s flags name; a limit left out is 1p, the memory of 1F1B.

    ValueError names the flag that is wrong.
    """
    from zero_bubble.search.problem import Problem

    placement = placement_of(arguments)
    costs = costs_of(arguments, placement)
    text = limit_text(arguments)
    limits = memory_limits(text, placement, costs)
    if arguments.microbatches < 1:
        raise UsageError(f"--microbatches {arguments.microbatches}: at least 1 is needed")
    within = not recomputes_in_a_pass(arguments, costs)
    try:
        return Problem(placement, costs, arguments.microbatches, limits, within)
    except ValueError as error:
        raise ValueError(f"--memory-limit {text}: {error}") from error


def limit_text(arguments: argparse.Namespace) -> str:
    """The memory limit as it was given, or the default."""
    text: str | None = arguments.memory_limit
    return _LIMIT if text is None else text


def name_of(arguments: argparse.Namespace) -> str:
    """What a schedule that was found is called, so that tables can tell it from others.

    ``auto-v-1p``: placement and limit, then what else was asked for.
    """
    chunks = arguments.chunks or ""
    limit = limit_text(arguments).replace(" ", "")
    parts = ["auto", f"{arguments.placement}{chunks}"]
    parts.append(limit if len(limit) <= _LONGEST_LIMIT else "own-limits")
    if arguments.recompute is not None:
        parts.append(f"recompute-{arguments.recompute}")
    if arguments.method not in (None, "auto"):
        parts.append(arguments.method)
    if arguments.robust is not None:
        parts.append("robust")
    return "-".join(parts)


def search(
    problem: Problem,
    bound: Bound,
    *,
    effort: str | None = None,
    method: str = "auto",
    time_limit: float | None = None,
    jitter: float | None = None,
) -> Found:
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
    if jitter is not None and not 0 <= jitter < 1:
        raise UsageError(
            f"--robust {jitter:g}: expected a relative standard deviation from 0 to below 1: 0.05 "
            "is 5 %"
        )
    if method != "auto" and problem.costs.t_r is not None:
        raise UsageError(f"--method {method} knows no recomputation (--m-r): use --method auto")
    if method == "paper":
        from zero_bubble.search.paper import paper_method

        if effort is not None:
            raise UsageError(f"--effort {effort} is not for --method paper: it has no choice")
        return Found(problem, paper_method(problem), bound, method)
    announce_compiling()
    with ProgressBar() as bar:
        found = _auto(problem, bound, bar, effort or "normal", jitter)
        plain = None
        if jitter is not None:
            plain = _auto(problem, bound, bar, effort or "normal", None)
    if method == "auto":
        return Found(problem, found, bound, method, plain=plain)
    with ProgressBar(method) as bar:
        better = _improve(problem, found, bound, bar, method, time_limit or 60.0)
    return Found(problem, better, bound, method, start=found)


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
