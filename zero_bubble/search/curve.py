"""The best schedules over a range of memory limits: what more memory buys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from zero_bubble.costs import Costs
from zero_bubble.placement import Placement
from zero_bubble.search.auto import auto
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

__all__ = ["memory_curve"]


def memory_curve(
    placement: Placement,
    costs: Costs,
    microbatches: int,
    limits: Sequence[float | Sequence[float]],
    *,
    effort: str = "normal",
    progress: Callable[[Problem, Solution], None] | None = None,
) -> list[Solution]:
    """The best schedule found for each limit, which must not fall from one to the next.

    A limit is one for all stages, or one each, in the unit of the costs' memory. A schedule that
    keeps to a smaller limit keeps to a larger one, so the best is carried forward: costs never rise
    along the curve. Where it meets the bound of a larger limit too, no search is needed.

    ``progress`` is called with each problem and its result. ValueError if limits fall, one cannot
    be met, or `auto` and `Problem` refuse what they are given.
    """
    problems = [Problem.of(placement, costs, microbatches, limit) for limit in limits]
    for one, other in pairwise(problems):
        for stage, (lower, upper) in enumerate(
            zip(one.memory_limit, other.memory_limit, strict=True)
        ):
            if upper < lower:
                raise ValueError(
                    f"limits must not fall, but that of stage {stage} goes from {lower:.6g} to "
                    f"{upper:.6g}: sort them"
                )
    curve: list[Solution] = []
    for problem in problems:
        found = _better(problem, curve[-1] if curve else None, effort)
        curve.append(found)
        if progress is not None:
            progress(problem, found)
    return curve


def _better(problem: Problem, known: Solution | None, effort: str) -> Solution:
    """The schedule already known, under the bound of this problem, or a cheaper one."""
    if known is None:
        return auto(problem, effort=effort)
    bound = min(lower_bound(problem).cost, known.cost)
    carried = Solution(known.schedule, known.cost, bound, known.how)
    if carried.is_optimal:
        return carried
    found = auto(problem, effort=effort)
    if found.cost < known.cost:
        return found
    return Solution(known.schedule, known.cost, min(found.bound, known.cost), known.how)
