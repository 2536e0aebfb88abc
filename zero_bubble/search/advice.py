"""Where a little more memory would remove many bubbles.

What limits a V placement is often the cool-down of its last stages alone: the bound on the cost
falls by two messages and two F's a stage away from them, so that the early stages need no more.
Limits are per stage, and late stages may have the room: under V the first stage holds both
the embedding and the head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from zero_bubble.search.bounds import Bound, lower_bound, stage_bounds
from zero_bubble.search.problem import Problem

__all__ = ["Advice", "advise", "late_stage_limits"]

_LEAST_GAIN = 0.005
_EXTRA_CHUNKS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class Advice:
    """Other limits, and the bubble rate that they make possible at most."""

    limits: tuple[float, ...]
    """Memory limit of each stage, in the unit of the costs' memory."""
    extra: tuple[float, ...]
    """How much each limit is above that of the problem."""
    rate_before: float
    """Bound on the bubble rate under the problem's limits; 0.05 is 5 %."""
    rate_after: float
    """Bound on the bubble rate under these limits."""

    @property
    def extra_memory(self) -> float:
        """Sum over all stages."""
        return math.fsum(self.extra)

    @property
    def gain(self) -> float:
        """Fall of the bound on the bubble rate; 0.01 is a point."""
        return self.rate_before - self.rate_after


def advise(problem: Problem, bound: Bound | None = None) -> list[Advice]:
    """Limits with a bound at least half a point of bubble rate lower, least extra memory first.

    Each lowers the bound further than all before it: none needs more memory for the same or less.
    Tried are 1, 2 and 4 chunks more on late stages, and a quarter of p M_B more on every stage.
    The rates are those of `lower_bound` (``bound``, if it is known already): they say what is
    possible at most, not that a search finds it. Empty if no limit is finite.
    """
    if not any(map(math.isfinite, problem.memory_limit)):
        return []
    before = problem.bubble_rate((bound or lower_bound(problem)).cost)
    stages = problem.num_stages
    tried = {late_stage_limits(problem, chunks) for chunks in _EXTRA_CHUNKS}
    tried.add(
        tuple(
            limit + stages * problem.least_memory(stage) / 4
            for stage, limit in enumerate(problem.memory_limit)
        )
    )
    found = []
    for limits in sorted(tried - {problem.memory_limit}):
        after = problem.bubble_rate(lower_bound(replace(problem, memory_limit=limits)).cost)
        extra = tuple(
            more - limit if math.isfinite(limit) else 0.0
            for more, limit in zip(limits, problem.memory_limit, strict=True)
        )
        if before - after >= _LEAST_GAIN:
            found.append(Advice(limits, extra, before, after))
    found.sort(key=lambda one: (one.extra_memory, one.rate_after, one.limits))
    kept: list[Advice] = []
    for one in found:
        # Below a billionth it is rounding.
        if not kept or one.rate_after < kept[-1].rate_after - 1e-9:
            kept.append(one)
    return kept


def late_stage_limits(problem: Problem, extra_chunks: int) -> tuple[float, ...]:
    """The problem's limits with up to ``extra_chunks`` more chunks where the cool-down needs them.

    A stage gets the fewest chunks of its largest M_B that leave its cool-down without idle time
    (`StageBound.cool_down`), or all of them if even those are too few. ValueError for a negative
    number.
    """
    if extra_chunks < 0:
        raise ValueError(f"extra_chunks must be at least 0, not {extra_chunks}")
    chunk = [max(row) for row in problem.costs.m_b]
    given = [0] * problem.num_stages
    for extra in range(extra_chunks):
        if extra not in given:
            break
        limits = _limits(problem, chunk, given)
        idle = [one.cool_down for one in stage_bounds(replace(problem, memory_limit=limits))]
        for stage, time in enumerate(idle):
            # Below a millionth of the work it is rounding.
            if given[stage] == extra and time > 1e-6 * problem.ideal:
                given[stage] += 1
    return _limits(problem, chunk, given)


def _limits(problem: Problem, chunk: list[float], given: list[int]) -> tuple[float, ...]:
    return tuple(
        limit + count * size
        for limit, size, count in zip(problem.memory_limit, chunk, given, strict=True)
    )
