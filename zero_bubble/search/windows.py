"""Improve a schedule too large for an exact search, a window of it at a time.

A window is all passes that start within some time, on all stages. Their order is searched exactly
while all others keep theirs; then the window slides on (large neighbourhood search).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from zero_bubble.schedule import Schedule
from zero_bubble.search.exact_block import cut
from zero_bubble.search.exact_cpsat import search_cpsat
from zero_bubble.search.exact_order import KnownOrder
from zero_bubble.search.exact_run import Progress, Run, prepare
from zero_bubble.search.exact_ticks import to_ticks
from zero_bubble.search.orders import Evaluation, evaluate
from zero_bubble.search.problem import Ints, Problem
from zero_bubble.search.solution import Solution

__all__ = ["improve_by_windows"]


def improve_by_windows(
    problem: Problem,
    incumbent: Schedule,
    *,
    sweeps: int = 3,
    width: int = 12,
    effort: float = 1.0,
    time_limit: float = math.inf,
    bit_identical: bool = True,
    lower_bound: float = 0.0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """A schedule that is no worse than the incumbent, often better; it proves no bound of its own.

    A window is as long as ``width`` passes of mean time, and slides by half of that. A sweep goes
    from the start to the end; after ``sweeps`` of them, or one that changes nothing, it is done.
    ``effort`` is CP-SAT's deterministic time for a window, about seconds: the result does not
    depend on the machine unless ``time_limit`` (seconds, in all) cuts it off. The rest, and the
    errors, as in `zero_bubble.search.exact.solve`.
    """
    began = time.monotonic()
    if sweeps < 1 or width < 2:
        raise ValueError(
            f"at least 1 sweep and windows of 2 passes are needed, not {sweeps} and {width}"
        )
    rows, cost = prepare(problem, incumbent, bit_identical)
    best = Solution(incumbent, cost, min(cost, max(lower_bound, problem.ideal)), "windows")
    if best.is_optimal:
        return best
    run = Run(problem, to_ticks(problem, cost), best, progress, began)
    search = _Windows(run, rows, bit_identical, effort)
    for _ in range(sweeps):
        changed = False
        for window in search.windows(width):
            if run.best.is_optimal or time.monotonic() - began > time_limit:
                return run.best
            changed |= search.improve(window)
        if not changed:
            break
    return run.best


class _Windows:
    def __init__(self, run: Run, rows: Ints, bit_identical: bool, effort: float) -> None:
        self.run, self.rows = run, rows
        self.bit_identical, self.effort = bit_identical, effort

    def windows(self, width: int) -> Iterator[tuple[float, float]]:
        """(begin, end) in ticks, of the schedule as it is when a window's turn comes."""
        arrays = self.run.ticks.arrays
        length = width * float(np.concatenate((arrays.t_f, arrays.t_b, arrays.t_w)).mean())
        begin = 0.0
        while begin < self._evaluate(self.rows).end.max():
            yield begin, begin + length
            begin += length / 2

    def improve(self, window: tuple[float, float]) -> bool:
        """Search one window; whether the order changed."""
        problem, ticks = self.run.problem, self.run.ticks
        block = cut(problem, ticks, self.rows, bit_identical=self.bit_identical, window=window)
        if not len(block.code):
            return False
        known = KnownOrder(block)
        lower = min(block.target, max(known.bound, self.run.lower_ticks))
        if lower == block.target:
            return False
        found = [self.rows]

        def on_order(key: npt.NDArray[np.float64]) -> None:
            found.append(block.merge(key, self.rows.shape))

        limits = {"max_deterministic_time": self.effort, "num_workers": 1}
        search_cpsat(block, known, lower=lower, limits=limits, on_order=on_order)
        before = self.rows
        for rows in found:
            if 0 <= self._evaluate(rows).cost < self._evaluate(self.rows).cost:
                self.rows = rows
        self.run.offer(self.rows)
        return self.rows is not before

    def _evaluate(self, rows: Ints) -> Evaluation:
        return evaluate(self.run.ticks.arrays, self.run.problem.num_microbatches, rows)
