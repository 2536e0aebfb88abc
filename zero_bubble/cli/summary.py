"""How the result of a search reads: its bound, its distance from it, what more memory would do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from zero_bubble.cli.amount import amount

if TYPE_CHECKING:
    from zero_bubble.cli.searching import Found
    from zero_bubble.schedule import Schedule
    from zero_bubble.search.advice import Advice
    from zero_bubble.search.bounds import Bound
    from zero_bubble.search.problem import Problem
    from zero_bubble.search.solution import Solution

# `zero_bubble.search` is imported where it is used: see `zero_bubble.cli.searching`.

__all__ = ["advice_lines", "advice_text", "bound_line", "gap_text", "robust_line", "verdict"]

_SAME = 1e-6
"""Costs and bounds that differ by less, relative to each other, are the same to a solver."""


def bound_line(problem: Problem, bound: Bound, found: Found | None = None) -> str:
    """``bound: 99 ms, bubble rate 3.03% (cool-down of stage 0)``.

    The best that is proven: a solver's, if what it ``found`` is tighter.
    """
    if found is not None and found.solver_proves:
        # A solver keeps a chunk's microbatches in order; the other bounds hold for any order.
        cost, origin = found.solution.bound, f"proven by {found.method}, microbatches in order"
    else:
        cost, origin = bound.cost, f"{bound.reason} of stage {bound.stage}"
    return f"bound: {cost:.6g} ms, bubble rate {problem.bubble_rate(cost):.2%} ({origin})"


def verdict(found: Found) -> str:
    """Whether a schedule is optimal, or how far from it at most, and what found it."""
    cost, bound = found.solution.cost, found.best_bound
    if cost > bound * (1 + _SAME):
        return f"within {gap_text((cost - bound) / cost)} of the bound ({_finder(found, False)})"
    which = "no schedule with microbatches in order" if found.solver_proves else "no schedule"
    return f"optimal: {which} within these limits costs less ({_finder(found, True)})"


def _finder(found: Found, optimal: bool) -> str:
    method, start = found.method, found.start
    if start is None:
        return f"found by {found.solution.how}"
    proved = optimal and found.solver_proves
    if found.solution.cost < start.cost * (1 - 1e-9):
        by = f"found and proved optimal by {method}" if proved else f"found by {method}"
        return f"{by}, starting from {start.how}"
    if proved:
        return f"found by {start.how}, proved optimal by {method}"
    if optimal:
        return f"found by {start.how}; nothing was left for {method}"
    return f"found by {start.how}; {method} found nothing better"


def gap_text(gap: float) -> str:
    """A gap as a percentage of two digits, however small: ``0.034%``; 0.01 is 1 %."""
    return f"{100 * gap:.2g}%"


def robust_line(found: Found, plain: Solution, sigma: float) -> str:
    """The mean cost when times vary, beside that of ``plain``, the best without noise."""
    from zero_bubble.jitter import jittered

    def mean(schedule: Schedule) -> str:
        return f"{jittered(schedule, found.problem.costs, sigma=sigma).mean:.6g} ms"

    line = (
        f"robust: mean cost {mean(found.solution.schedule)} when times vary by {100 * sigma:.3g}%; "
    )
    if found.solution.schedule.passes == plain.schedule.passes:
        return f"{line}this schedule is the cheapest without noise too"
    return (
        f"{line}the schedule that costs least without noise, {plain.cost:.6g} ms, then has a mean "
        f"of {mean(plain.schedule)}"
    )


def advice_lines(problem: Problem, bound: Bound) -> list[str]:
    """Where a little more memory would remove many bubbles, a line each, least memory first."""
    from zero_bubble.search.advice import advise

    return [f"more memory: {advice_text(one)}" for one in advise(problem, bound)]


def advice_text(advice: Advice) -> str:
    """``0.5 more on stages 5 to 7 (+2.3% in total): the bound on the bubble falls from ...``."""
    more = [stage for stage, extra in enumerate(advice.extra) if extra > 0]
    if len(more) == len(advice.extra):
        where = "every stage"
    elif len(more) == 1:
        where = f"stage {more[0]}"
    elif more == list(range(more[0], more[-1] + 1)):
        where = f"stages {more[0]} to {more[-1]}"
    else:
        where = f"{len(more)} stages"
    most = max(advice.extra)
    even = all(math.isclose(advice.extra[stage], most) for stage in more)
    before = math.fsum(advice.limits) - advice.extra_memory
    # Stages without a limit have no total.
    share = f" ({advice.extra_memory / before:+.1%} in total)" if math.isfinite(before) else ""
    return (
        f"{'' if even else 'up to '}{amount(most)} more on {where}{share}: the bound on the bubble "
        f"falls from {advice.rate_before:.2%} to {advice.rate_after:.2%}"
    )
