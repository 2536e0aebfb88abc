"""The best schedule that the effort allows, for any placement, times and memory limits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from zero_bubble.costs import Costs, Table
from zero_bubble.jitter import mean_cost
from zero_bubble.noise import Noise
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.orders import decode, evaluate
from zero_bubble.search.portfolio import EFFORTS, Effort, Order, Search, sorted_orders
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

__all__ = ["EFFORTS", "Effort", "Progress", "auto"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is."""

    step: str
    cost: float
    """Best so far, in ms; infinite before the first."""
    bound: float
    """No schedule costs less, in ms."""


def auto(
    problem: Problem,
    *,
    effort: str = "normal",
    jitter: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The schedule of least cost that the search finds, with its distance from the best bound.

    Works on few microbatches first: templates (`zero_bubble.search.families`) are squeezed, the
    best improved by descent, and the best orders polished pass by pass. The steady state is then
    repeated for all microbatches. The paper's own heuristic (section 3.1) and the handcrafted
    schedules are candidates where they fit.

    With ``jitter``, a relative standard deviation of the passes' times, the best few are compared
    by their mean cost under seeded noise of that size. Deterministic: the same problem and effort
    give the same schedule on any machine. F's, B's and W's of a chunk ascend by microbatch, so that
    it is bit-identical to 1F1B. With recomputation its passes are part of templates and orders;
    chunks that have nothing to compute again get no R's. ValueError for an unknown effort or a
    negative jitter.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, not {effort!r}")
    if jitter is not None and not 0 <= jitter < math.inf:
        raise ValueError(f"jitter must be a relative standard deviation such as 0.05, not {jitter}")
    if problem.costs.t_r is not None and all(
        len(chunks) == len(row)
        for chunks, row in zip(_nothing_again(problem.costs), problem.costs.m_b, strict=True)
    ):
        problem = replace(problem, costs=problem.costs.without_recomputation())
    bound = lower_bound(problem).cost
    if all(map(math.isinf, problem.memory_limit)):
        # Without a limit too, memory that buys nothing should not be held.
        for factor in (1.0, 1.5, 2.0, 2.5, 3.0):
            limited = _limited(problem, factor)
            if lower_bound(limited).cost <= bound * (1 + 1e-9):
                lean = auto(limited, effort=effort, jitter=jitter)
                if lean.cost <= bound * (1 + 1e-9):
                    return replace(lean, bound=min(bound, lean.cost))
    whole, scale = _in_ticks(problem)

    def tell(step: str, cost: float) -> None:
        if progress is not None:
            # Ticks are rounded: the cost may be a trifle below what it really is.
            progress(Progress(step, max(cost / scale, bound), bound))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = Search(whole, EFFORTS[effort], pool, tell).run()
    arrays, many = problem.arrays(), problem.num_microbatches
    orders = sorted_orders(
        Order(one.rows, evaluate(arrays, many, one.rows).cost, one.how) for one in found
    )
    best = _leanest(problem, orders) if jitter is None else _steadiest(problem, orders, jitter)
    schedule = _without_empty(problem, decode(problem, best.rows, "auto"))
    return Solution(schedule, best.cost, min(bound, best.cost), best.how)


def _without_empty(problem: Problem, schedule: Schedule) -> Schedule:
    """The schedule without the R's of chunks that have nothing to compute again."""
    empty = _nothing_again(problem.costs)
    rows = zip(schedule.passes, empty, strict=True)
    passes = tuple(
        tuple(one for one in row if one.kind is not Kind.R or one.chunk not in chunks)
        for row, chunks in rows
    )
    return replace(schedule, passes=passes)


def _nothing_again(costs: Costs) -> list[set[int]]:
    """Of each stage the chunks that keep all they need."""
    return [
        {
            chunk
            for chunk, whole in enumerate(row)
            if costs.recomputation(stage, chunk) == 0 and costs.kept(stage, chunk) == whole
        }
        for stage, row in enumerate(costs.m_b)
    ]


def _limited(problem: Problem, factor: float) -> Problem:
    """The problem with limits of so many times p M_B."""
    microbatches = max(1.0, factor * problem.num_stages)
    limits = (microbatches * sum(row) for row in problem.costs.m_b)
    return replace(problem, memory_limit=tuple(limits))


def _in_ticks(problem: Problem) -> tuple[Problem, float]:
    """The problem with times rounded to whole ticks, and how many ticks a ms has.

    Sums of whole numbers are exact: whether a gap is as long as a W does not depend on rounding.
    Ticks are a power of ten of a ms, at most 10^-8 of the longest pass or message.
    """
    costs = problem.costs
    tables = (costs.t_f, costs.t_b, costs.t_w, costs.t_r or costs.t_f)
    passes = (max(map(max, table)) for table in tables)
    longest = max(*passes, costs.t_comm, *(time for _, _, time in costs.t_edges))
    scale = 10.0 ** (9 - math.ceil(math.log10(longest))) if longest > 0 else 1.0

    def rounded(table: Table) -> Table:
        return tuple(tuple(float(round(time * scale)) for time in row) for row in table)

    ticks = replace(
        costs,
        t_f=rounded(costs.t_f),
        t_b=rounded(costs.t_b),
        t_w=rounded(costs.t_w),
        t_r=None if costs.t_r is None else rounded(costs.t_r),
        t_bw=None,
        t_comm=float(round(costs.t_comm * scale)),
        t_edges=tuple((one, other, float(round(t * scale))) for one, other, t in costs.t_edges),
    )
    return replace(problem, costs=ticks), scale


def _leanest(problem: Problem, orders: Sequence[Order]) -> Order:
    """Of the orders that cost least, the one whose stages hold least memory in all."""
    arrays, many = problem.arrays(), problem.num_microbatches
    equal = [one for one in orders if one.cost <= orders[0].cost * (1 + 1e-12)]
    return min(equal, key=lambda one: float(evaluate(arrays, many, one.rows).peak.sum()))


def _steadiest(problem: Problem, orders: Sequence[Order], jitter: float) -> Order:
    """The order of least mean cost when times vary, among those about as good as the best."""
    near = [one for one in orders if one.cost <= orders[0].cost * (1 + jitter)]
    noise = Noise(problem.placement, problem.num_microbatches, sigma=jitter, seed=0)
    factors = noise.table(20)
    arrays, many = problem.arrays(), problem.num_microbatches
    return min(near, key=lambda one: mean_cost(arrays, many, one.rows, factors))
