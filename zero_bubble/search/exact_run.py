"""One run of an exact solver: what it starts from, the best so far, and what is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from zero_bubble.check import bit_identical_order, check
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.exact_block import Block, cut
from zero_bubble.search.exact_order import KnownOrder
from zero_bubble.search.exact_ticks import Ticks, to_ticks
from zero_bubble.search.orders import decode, encode, evaluate
from zero_bubble.search.problem import Ints, Problem
from zero_bubble.search.solution import Solution

__all__ = ["TOLERANCE", "Progress", "Run", "Search", "prepare", "run_search"]

TOLERANCE = 1e-6
"""Costs that differ by less, relative to each other, are the same to a solver."""
_TOLD = 1e-4
"""A bound that rises by less, relative to the cost, is not reported."""
_MOST_PASSES = 10_000
"""Pairs of passes are kept in a table: more would not fit an ordinary memory, nor be solved."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a solver has come."""

    seconds: float
    """Since it was called."""
    cost: float
    """Of the best schedule so far, in ms."""
    bound: float
    """No schedule costs less, in ms, as far as is proven."""

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: at most so much better is possible; 0.01 is 1 %."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0


class Run:
    """Takes orders and bounds from a solver, and keeps the best."""

    def __init__(
        self,
        problem: Problem,
        ticks: Ticks,
        best: Solution,
        progress: Callable[[Progress], None] | None = None,
        began: float | None = None,
    ) -> None:
        self.problem, self.ticks, self.best, self.progress = problem, ticks, best, progress
        self.began = time.monotonic() if began is None else began
        self.arrays = problem.arrays()
        self.most = np.array(problem.memory_limit)
        self.most += 1e-9 * np.maximum(1.0, self.most)
        self.told = best.bound

    @property
    def lower_ticks(self) -> int:
        """The proven bound in ticks."""
        return math.floor(self.best.bound / self.ticks.unit)

    def offer(self, rows: Ints) -> None:
        """A schedule that the solver found; kept if it is legal and better."""
        found = evaluate(self.arrays, self.problem.num_microbatches, rows)
        legal = found.cost >= 0 and bool((found.peak <= self.most).all())
        if legal and found.cost < self.best.cost:
            schedule = decode(self.problem, rows, self.best.how)
            self.best = replace(self.best, schedule=schedule, cost=found.cost)
            self._tell()

    def raise_bound(self, ticks: float) -> None:
        """No schedule costs less than this in ticks."""
        bound = min((ticks - self.ticks.error) * self.ticks.unit, self.best.cost)
        if bound > self.best.bound:
            self.best = replace(self.best, bound=bound)
            # CP-SAT can raise it thousands of times a second.
            if bound - self.told > _TOLD * self.best.cost:
                self._tell()

    def close(self) -> None:
        """The search is complete: what is left between cost and bound is rounding, if no more."""
        if self.best.bound < self.best.cost <= self.best.bound * (1 + TOLERANCE):
            self.best = replace(self.best, bound=self.best.cost)
            self._tell()

    def _tell(self) -> None:
        self.told = self.best.bound
        if self.progress is not None:
            seconds = time.monotonic() - self.began
            self.progress(Progress(seconds, self.best.cost, self.best.bound))


class Search(Protocol):
    """A solver's search of a block for something cheaper than the incumbent."""

    def __call__(
        self,
        block: Block,
        known: KnownOrder,
        *,
        lower: int,
        seconds: float,
        on_order: Callable[[npt.NDArray[np.float64]], None],
        on_bound: Callable[[float], None],
    ) -> bool:
        """Whether it was completed.

        ``lower`` is a proven bound in ticks. ``on_order`` gets a number for each pass of the
        block, by which they are to be sorted, ``on_bound`` a bound in ticks.
        """


def run_search(
    search: Search,
    problem: Problem,
    incumbent: Schedule,
    *,
    how: str,
    time_limit: float,
    bit_identical: bool,
    lower_bound: float,
    progress: Callable[[Progress], None] | None,
) -> Solution:
    """Prepare, search, and return the best: the incumbent, if nothing is better."""
    began = time.monotonic()
    if not time_limit >= 0:
        raise ValueError(f"time_limit must be a number of seconds from 0, not {time_limit}")
    rows, cost = prepare(problem, incumbent, bit_identical)
    if math.isnan(lower_bound) or lower_bound > cost * (1 + 1e-9):
        raise ValueError(
            f"lower_bound {lower_bound:.6g} ms is above the incumbent's cost {cost:.6g} ms: "
            "a bound that holds for every schedule is needed"
        )
    bound = min(cost, max(lower_bound, problem.ideal))
    best = Solution(incumbent, cost, bound, how)
    if best.is_optimal:
        return best
    ticks = to_ticks(problem, cost)
    run = Run(problem, ticks, best, progress, began)
    block = cut(problem, ticks, rows, bit_identical=bit_identical)
    if len(block.code) > _MOST_PASSES:
        raise ValueError(
            f"{len(block.code)} passes are too many to search at once, the most is {_MOST_PASSES}: "
            "improve_by_windows takes any number"
        )
    known = KnownOrder(block, began + time_limit)
    run.raise_bound(known.bound)
    if known.bound == block.target:
        run.close()
    seconds = time_limit - (time.monotonic() - began)
    if run.best.is_optimal or seconds <= 0:
        return run.best
    complete = search(
        block,
        known,
        lower=min(block.target, max(known.bound, run.lower_ticks)),
        seconds=seconds,
        on_order=lambda key: run.offer(block.merge(key, rows.shape)),
        on_bound=run.raise_bound,
    )
    if complete:
        run.close()
    return run.best


def prepare(problem: Problem, incumbent: Schedule, bit_identical: bool) -> tuple[Ints, float]:
    """The incumbent's rows and cost (ms); ValueError if a search cannot start from it.

    Without ``bit_identical`` its microbatches are named in the order in which they enter the model.
    """
    if problem.costs.t_r is not None:
        raise ValueError("the solvers know no recomputation: use the method auto")
    if (incumbent.placement, incumbent.num_microbatches) != (
        problem.placement,
        problem.num_microbatches,
    ):
        raise ValueError(
            f"the incumbent has {incumbent.num_microbatches} microbatches on a "
            f"{incumbent.placement.name} placement of {incumbent.num_stages} stages, the problem "
            f"{problem.num_microbatches} on {problem.placement.name} of {problem.num_stages}: "
            "both must be the same"
        )
    broken = check(incumbent, costs=problem.costs, memory_limit=problem.memory_limit)
    if broken:
        raise ValueError(f"the incumbent is not legal: {broken[0]}")
    if bit_identical and (out_of_order := bit_identical_order(incumbent)):
        raise ValueError(f"the incumbent is out of order: {out_of_order[0]}; bit_identical=False")
    renamed = incumbent if bit_identical else _renamed(incumbent)
    for stage, row in enumerate(renamed.passes):
        held = problem.placement.positions[stage]
        if row[0] != Pass(Kind.F, 0, held.index(min(held))):
            raise ValueError(
                f"stage {stage} of the incumbent begins with {row[0]}: every stage should begin "
                "with the microbatch that enters the model first"
            )
    rows = encode(renamed)
    return rows, evaluate(problem.arrays(), problem.num_microbatches, rows).cost


def _renamed(schedule: Schedule) -> Schedule:
    stage, chunk = schedule.placement.owner(0)
    entering = [one.microbatch for one in schedule.order(stage, (Kind.F,)) if one.chunk == chunk]
    name = {microbatch: index for index, microbatch in enumerate(entering)}
    passes = tuple(
        tuple(replace(one, microbatch=name[one.microbatch]) for one in row)
        for row in schedule.passes
    )
    return replace(schedule, passes=passes)
