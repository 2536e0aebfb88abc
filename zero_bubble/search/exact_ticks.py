"""Times and memory as whole numbers, so that what a solver proves holds for the real ones."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from zero_bubble.search.problem import Arrays, Floats, Ints, Problem

__all__ = ["Ticks", "floating_stages", "memory_units", "to_ticks"]

_COST_TICKS = 10**9
"""Ticks in the incumbent's cost, where the times have no larger unit in common."""
_MEMORY_UNITS = 2**40
"""Units in a memory limit, where the amounts have no larger unit in common."""


class Ticks(NamedTuple):
    """A problem's times as whole numbers of ticks."""

    arrays: Arrays
    """All times are whole, those of passes at least 1."""
    unit: float
    """Milliseconds a tick."""
    error: int
    """By so many ticks a schedule may cost more in ticks than in milliseconds."""


def to_ticks(problem: Problem, cost: float) -> Ticks:
    """The problem in ticks, for schedules that cost about so much (ms).

    Times with few decimals have a unit in common, and nothing is rounded. Others are rounded down
    to a billionth of the cost. An order then takes no longer in ticks; but a stage may start
    earlier, and its cost counts from there: `Ticks.error` is what that can come to.
    """
    arrays = problem.arrays()
    passes = (arrays.t_f, arrays.t_b, arrays.t_w)
    messages = (arrays.delay_f, arrays.delay_b)
    least = cost / _COST_TICKS
    unit = _common_unit(np.concatenate(passes + messages).tolist(), least)
    exact = unit > least
    if exact and any((one == 0).any() for one in passes):
        unit /= math.ceil(unit / least)

    def rounded(times: Floats) -> Floats:
        return np.rint(times / unit) if exact else np.floor(times / unit)

    # A pass without time would leave open which of two comes first: it gets a tick.
    error = problem.num_microbatches * sum(int((rounded(one) < 1).sum()) for one in passes)
    if not exact:
        entries = problem.num_microbatches if floating_stages(problem) else 1
        error += 2 * len(arrays.stage) * entries
    t_f, t_b, t_w = (np.maximum(1.0, rounded(one)) for one in passes)
    delay_f, delay_b = (rounded(one) for one in messages)
    whole = arrays._replace(t_f=t_f, t_b=t_b, t_w=t_w, delay_f=delay_f, delay_b=delay_b)
    return Ticks(whole, unit, error)


def floating_stages(problem: Problem) -> frozenset[int]:
    """Stages whose first pass has no fixed time, but waits for work that can be ordered in ways.

    None if the stages' first chunks come first in the model, as in linear, interleaved and V
    placements: microbatch 0 then reaches each stage before anything else is there to do.
    """
    placement = problem.placement
    lowest = {min(held): stage for stage, held in enumerate(placement.positions)}
    fixed = 0
    while fixed in lowest:
        fixed += 1
    return frozenset(stage for position, stage in lowest.items() if position > fixed)


def memory_units(problem: Problem, stage: int) -> tuple[Ints, Ints, int] | None:
    """M_B and M_W of a stage's chunks and its limit as whole numbers; None if there is no limit.

    Rounding and limit leave as much room as `zero_bubble.check` does, so that no order is lost.
    """
    limit = problem.memory_limit[stage]
    costs = problem.costs
    m_b, m_w = np.array(costs.m_b[stage]), np.array(costs.m_w[stage])
    if limit >= problem.num_microbatches * m_b.sum():
        return None
    least = limit / _MEMORY_UNITS
    unit = _common_unit([*m_b.tolist(), *m_w.tolist()], least)
    whole_b, whole_w = (np.rint(one / unit).astype(np.int64) for one in (m_b, m_w))
    slack = 1e-9 if unit > least else 5e-10
    return whole_b, whole_w, math.floor(limit / unit * (1 + slack))


def _common_unit(values: Iterable[float], least: float) -> float:
    """The largest number that divides all values as they are written in decimals, or ``least``."""
    parts = [Fraction(repr(value)) for value in values if value > 0]
    if not parts:
        return 1.0
    common = math.lcm(*(one.denominator for one in parts))
    unit = Fraction(math.gcd(*(int(one * common) for one in parts)), common)
    return max(float(unit), least)
