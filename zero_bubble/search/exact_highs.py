"""The paper's integer linear program (appendix G) on HiGHS, for any placement.

Columns are the ending times E of all passes, the cost, and a binary O for each pair of a stage's
passes whose order is not known before the search: one column stands for O of the pair both ways,
since exactly one comes first. The infinity of eq. 6 is, for each pair, the least number that rules
out nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from zero_bubble.schedule import Schedule
from zero_bubble.search.exact_block import Block
from zero_bubble.search.exact_order import KnownOrder
from zero_bubble.search.exact_run import TOLERANCE, Progress, run_search
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

__all__ = ["solve_highs"]

type Key = npt.NDArray[np.float64]
Terms = dict[int, float]
"""Column -> factor."""

_OPTIONS = {
    "threads": 1,
    "random_seed": 0,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-7,
    # A binary that is off by so much takes that part of a horizon off a pass's end.
    "mip_feasibility_tolerance": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
}


def solve_highs(
    problem: Problem,
    incumbent: Schedule,
    *,
    time_limit: float = 60.0,
    bit_identical: bool = True,
    lower_bound: float = 0.0,
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The best schedule that HiGHS finds, starting from the incumbent, and what it proves.

    See `zero_bubble.search.exact.solve`. HiGHS computes in floating point; its bounds are lowered
    by what that can come to.
    """
    return run_search(
        _search,
        problem,
        incumbent,
        how="highs",
        time_limit=time_limit,
        bit_identical=bit_identical,
        lower_bound=lower_bound,
        progress=progress,
    )


def _search(
    block: Block,
    known: KnownOrder,
    *,
    lower: int,
    seconds: float,
    on_order: Callable[[Key], None],
    on_bound: Callable[[float], None],
) -> bool:
    highspy = _highspy()
    model = _Model(block, known, lower)

    class Quiet(highspy.Highs):  # type: ignore[misc, name-defined]
        def enableCallbacks(self) -> None:
            # Called by the constructor, and prints a banner unless told not to.
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver = Quiet()
    for name, value in _OPTIONS.items():
        solver.setOptionValue(name, value)
    solver.setOptionValue("time_limit", seconds)
    model.load(highspy, solver)

    def on_solution(event: Any) -> None:
        on_order(model.ranks(np.asarray(event.data_out.mip_solution)))

    def on_log(event: Any) -> None:
        on_bound(model.ticks(event.data_out.mip_dual_bound))

    solver.cbMipImprovingSolution.subscribe(on_solution)
    solver.cbMipLogging.subscribe(on_log)
    # It runs in a thread of its own then: Ctrl-C would otherwise wait for the time limit.
    solver.HandleKeyboardInterrupt = True
    solver.solve()
    optimal = solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    info = solver.getInfo()
    if info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
        on_order(model.ranks(np.asarray(solver.getSolution().col_value)))
        on_bound(model.ticks(info.mip_dual_bound))
    return bool(optimal)


def _highspy() -> Any:
    try:
        import highspy
    except ImportError as missing:
        raise ValueError(
            "solver highs needs highspy, which is not installed: pip install highspy"
        ) from missing
    return highspy


class _Model:
    """The program in units of a mean pass, since HiGHS' tolerances are absolute."""

    def __init__(self, block: Block, known: KnownOrder, lower: int) -> None:
        self.block, self.known = block, known
        self.unit = float(block.duration.mean())
        self.duration = block.duration / self.unit
        self.first = known.earliest / self.unit + self.duration
        self.last = known.latest / self.unit + self.duration
        self.pairs = known.undecided()
        passes = len(self.duration)
        self.cost = passes
        self.binary = {pair: passes + 1 + index for index, pair in enumerate(self.pairs)}
        self.lower = [*self.first, lower / self.unit, *(0.0 for _ in self.pairs)]
        self.upper = [*self.last, block.target / self.unit, *(1.0 for _ in self.pairs)]
        self.rows: list[tuple[float, Terms]] = []
        self._add_cost()
        self._add_dependences()
        self._add_order()
        self._add_sequences()
        self._add_memory()

    def load(self, highspy: Any, solver: Any) -> None:
        """Hand the program and the incumbent over."""
        count = len(self.lower)
        solver.addVars(count, np.array(self.lower), np.array(self.upper))
        solver.changeColCost(self.cost, 1.0)
        for column in self.binary.values():
            solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
        for least, terms in self.rows:
            columns, factors = np.array([*terms], dtype=np.int32), np.array([*terms.values()])
            solver.addRow(least, highspy.kHighsInf, len(columns), columns, factors)
        start = self.block.start
        values = [
            *(start / self.unit + self.duration),
            self.block.target / self.unit,
            *(float(start[one] < start[other]) for one, other in self.pairs),
        ]
        solver.setSolution(count, np.arange(count, dtype=np.int32), np.array(values))

    def ranks(self, values: Key) -> Key:
        """How many passes of its stage come before each pass."""
        ranks = np.zeros(len(self.duration))
        for row in self.block.rows:
            ranks[list(row)] = self.known.before[np.ix_(row, row)].sum(axis=0)
        for (one, other), column in self.binary.items():
            ranks[other if values[column] > 0.5 else one] += 1
        return ranks

    def ticks(self, bound: float) -> float:
        return bound * (1 - TOLERANCE / 2) * self.unit

    def _at_least(self, least: float, terms: Terms) -> None:
        self.rows.append((least, terms))

    def _add_cost(self) -> None:
        """Eq. 3: no stage takes longer than the cost."""
        for one, tail in enumerate((self.block.tail / self.unit).tolist()):
            terms = {self.cost: 1.0, one: -1.0}
            least = tail
            entry = self.block.entry.get(int(self.block.stage[one]))
            if entry is not None:
                # Columns are ends, and the stage's cost counts from a start.
                terms[entry[0]] = terms.get(entry[0], 0.0) + 1.0
                least += float(self.duration[entry[0]])
            self._at_least(least, terms)

    def _add_dependences(self) -> None:
        """Eq. 4 and 5, and all pairs of known order."""
        edges = [*self.block.edges, *((*pair, 0) for pair in self.known.direct())]
        for one, other, lag in edges:
            self._at_least(float(self.duration[other]) + lag / self.unit, {other: 1.0, one: -1.0})
        for first, source, lag in self.block.entry.values():
            self._at_least(-float(self.duration[first]) - lag / self.unit, {source: 1, first: -1})

    def _add_order(self) -> None:
        """Eq. 6."""
        for (one, other), column in self.binary.items():
            forth = self._gap(one, other)
            self._at_least(self.duration[other] - forth, {other: 1, one: -1, column: -forth})
            back = self._gap(other, one)
            self._at_least(self.duration[one], {one: 1, other: -1, column: back})

    def _gap(self, one: int, other: int) -> float:
        """By so much ``other`` would have to be later, at most, to come after ``one``."""
        return float(self.last[one] + self.duration[other] - self.first[other])

    def _order(self, one: int, other: int) -> tuple[float, Terms]:
        """O of the pair, 1 if ``one`` comes before ``other``, as a constant and terms."""
        if (one, other) in self.binary:
            return 0.0, {self.binary[one, other]: 1.0}
        if (other, one) in self.binary:
            return 1.0, {self.binary[other, one]: -1.0}
        return float(self.known.before[one, other]), {}

    def _add_sequences(self) -> None:
        """All that runs before a pass fits between the stage's first start and it, and so on.

        Follows from eq. 6 where O is 0 or 1, and bounds E far better where it is in between.
        """
        for row in self.block.rows:
            begin = min((float(self.first[one] - self.duration[one]) for one in row), default=0.0)
            left = min((int(self.block.tail[one]) for one in row), default=0) / self.unit
            for one in row:
                others = [other for other in row if other != one]
                work, terms = self._work([(other, one) for other in others], others)
                terms[one] = 1.0
                self._at_least(begin + float(self.duration[one]) + work, terms)
                if int(self.block.stage[one]) not in self.block.entry:
                    work, terms = self._work([(one, other) for other in others], others)
                    self._at_least(left + work, {**terms, self.cost: 1.0, one: -1.0})

    def _work(self, pairs: list[tuple[int, int]], others: list[int]) -> tuple[float, Terms]:
        """Time of the passes for whose pair O is 1: what of it is known, and less the rest."""
        work, terms = 0.0, Terms()
        for pair, other in zip(pairs, others, strict=True):
            constant, order = self._order(*pair)
            work += float(self.duration[other]) * constant
            for column, factor in order.items():
                terms[column] = -float(self.duration[other]) * factor
        return work, terms

    def _add_memory(self) -> None:
        """Eq. 7 at each F; only F's take memory."""
        for stage, memory in self.block.memory.items():
            row = self.block.rows[stage]
            unit = max(map(abs, memory.delta.values()), default=1)
            for one in row:
                if memory.delta[one] <= 0:
                    continue
                held, terms = memory.delta[one] / unit, Terms()
                for other in row:
                    if other == one:
                        continue
                    change = memory.delta[other] / unit
                    constant, order = self._order(other, one)
                    held += change * constant
                    terms.update({column: -change * factor for column, factor in order.items()})
                self._at_least(held - memory.room / unit, terms)
