"""The exact scheduler on OR-Tools' CP-SAT: passes as intervals, their order as literals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_bubble.schedule import Schedule
from zero_bubble.search.exact_block import Block
from zero_bubble.search.exact_order import KnownOrder
from zero_bubble.search.exact_run import Progress, run_search
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

__all__ = ["search_cpsat", "solve_cpsat"]

type Key = npt.NDArray[np.float64]


def solve_cpsat(
    problem: Problem,
    incumbent: Schedule,
    *,
    time_limit: float = 60.0,
    bit_identical: bool = True,
    lower_bound: float = 0.0,
    progress: Callable[[Progress], None] | None = None,
    workers: int = 1,
) -> Solution:
    """The best schedule that CP-SAT finds, starting from the incumbent, and what it proves.

    See `zero_bubble.search.exact.solve`. A run that completes is deterministic with one worker;
    one that is cut off by the time limit stops where the machine's speed lets it. With several
    workers the schedule can differ from run to run, but no bound is ever wrong.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, not {workers}")

    def search(
        block: Block,
        known: KnownOrder,
        *,
        lower: int,
        seconds: float,
        on_order: Callable[[Key], None],
        on_bound: Callable[[float], None],
    ) -> bool:
        limits = {"max_time_in_seconds": seconds, "num_workers": workers}
        return search_cpsat(
            block, known, lower=lower, limits=limits, on_order=on_order, on_bound=on_bound
        )

    return run_search(
        search,
        problem,
        incumbent,
        how="cp-sat",
        time_limit=time_limit,
        bit_identical=bit_identical,
        lower_bound=lower_bound,
        progress=progress,
    )


def search_cpsat(
    block: Block,
    known: KnownOrder,
    *,
    lower: int,
    limits: dict[str, float],
    on_order: Callable[[Key], None],
    on_bound: Callable[[float], None] | None = None,
) -> bool:
    """Search a block for orders cheaper than the incumbent's; whether the search was completed.

    ``limits`` are CP-SAT's parameters of these names.
    """
    cp_model = _cp_model()
    model = _Model(cp_model, block, known, lower)
    solver = cp_model.CpSolver()
    solver.parameters.random_seed = 0
    for name, value in limits.items():
        setattr(solver.parameters, name, value)

    class Found(cp_model.CpSolverSolutionCallback):  # type: ignore[misc, name-defined]
        def on_solution_callback(self) -> None:
            on_order(np.array([self.Value(one) for one in model.start], dtype=np.float64))

    if on_bound is not None:
        solver.best_bound_callback = on_bound
    status = solver.Solve(model.model, Found())
    if status in (cp_model.INFEASIBLE, cp_model.MODEL_INVALID):
        raise RuntimeError(f"CP-SAT finds a model {solver.StatusName(status)} that has a solution")
    if on_bound is not None and status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        on_bound(solver.BestObjectiveBound())
    return bool(status == cp_model.OPTIMAL)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as missing:
        raise ValueError(
            "solver cp-sat needs OR-Tools, which is not installed: pip install ortools"
        ) from missing
    return cp_model


class _Model:
    """Start of each pass, order of each open pair, and the cost."""

    def __init__(self, cp_model: Any, block: Block, known: KnownOrder, lower: int) -> None:
        self.block, self.known = block, known
        self.model = model = cp_model.CpModel()
        bounds = zip(known.earliest.tolist(), known.latest.tolist(), strict=True)
        self.start = [model.NewIntVar(low, high, "") for low, high in bounds]
        self.duration = block.duration.tolist()
        self.before: dict[tuple[int, int], Any] = {}
        for one, start in enumerate(self.start):
            model.AddHint(start, int(block.start[one]))
        self._add_order()
        self._add_memory()
        self._add_cost(lower)

    def _end(self, one: int) -> Any:
        return self.start[one] + self.duration[one]

    def _add_order(self) -> None:
        model, start = self.model, self.start
        for one, other, lag in self.block.edges:
            model.Add(start[other] >= self._end(one) + lag)
        for one, other in self.known.direct():
            model.Add(start[other] >= self._end(one))
        for first, source, lag in self.block.entry.values():
            model.Add(start[first] == self._end(source) + lag)
        for row in self.block.rows:
            if len(row) > 1:
                intervals = [
                    model.NewFixedSizeIntervalVar(start[one], self.duration[one], "") for one in row
                ]
                model.AddNoOverlap(intervals)
        for one, other in self.known.undecided():
            literal = model.NewBoolVar("")
            model.Add(start[other] >= self._end(one)).OnlyEnforceIf(literal)
            model.Add(start[one] >= self._end(other)).OnlyEnforceIf(literal.Not())
            model.AddHint(literal, bool(self.block.start[one] < self.block.start[other]))
            self.before[one, other], self.before[other, one] = literal, literal.Not()

    def _add_memory(self) -> None:
        """At each F, what runs before it leaves room for it (eq. 7); only F's take memory."""
        for stage, memory in self.block.memory.items():
            row = self.block.rows[stage]
            for one in row:
                taken = memory.delta[one]
                if taken <= 0:
                    continue
                taken += sum(memory.delta[other] for other in row if self.known.before[other, one])
                terms = [
                    (memory.delta[other], self.before[other, one])
                    for other in row
                    if memory.delta[other] and (other, one) in self.before
                ]
                if taken + sum(delta for delta, _ in terms if delta > 0) > memory.room:
                    held = sum(delta * literal for delta, literal in terms)
                    self.model.Add(held <= memory.room - taken)

    def _add_cost(self, lower: int) -> None:
        cost = self.model.NewIntVar(lower, self.block.target, "")
        self.model.AddHint(cost, self.block.target)
        for one in range(len(self.start)):
            entry = self.block.entry.get(int(self.block.stage[one]))
            origin = self.start[entry[0]] if entry else 0
            self.model.Add(cost >= self._end(one) + int(self.block.tail[one]) - origin)
        self.model.Minimize(cost)
