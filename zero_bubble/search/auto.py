"""The best schedule that the effort allows, for any placement, times and memory limits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from zero_bubble.builders import v_half, v_min, zb_h1, zb_h2, zb_v
from zero_bubble.costs import Table
from zero_bubble.jitter import mean_cost
from zero_bubble.noise import Noise
from zero_bubble.schedule import Schedule
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.descent import FAILED, assess, descend, sweep
from zero_bubble.search.families import Start, microbatches_in_flight, starts
from zero_bubble.search.orders import decode, encode, evaluate, run_rows
from zero_bubble.search.paper import paper_method
from zero_bubble.search.polish import polish
from zero_bubble.search.problem import Floats, Ints, Problem
from zero_bubble.search.solution import Solution
from zero_bubble.search.squeeze import Knobs
from zero_bubble.search.stretch import stretch

__all__ = ["EFFORTS", "Effort", "Progress", "auto"]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much a search tries. Counted in work, not in seconds, so that results repeat."""

    sweep: float
    """Passes squeezed while templates are compared, in millions."""
    descent: float
    """Passes squeezed while lags and knobs are improved, in millions."""
    descents: int
    """Templates that are improved."""
    finalists: int
    """Orders that are polished."""
    polish: float
    """Passes timed again while single passes are moved, in millions."""


EFFORTS = {
    "quick": Effort(sweep=1.5, descent=1.5, descents=4, finalists=4, polish=6.0),
    "normal": Effort(sweep=5.0, descent=20.0, descents=12, finalists=8, polish=300.0),
    "thorough": Effort(sweep=20.0, descent=120.0, descents=24, finalists=16, polish=2000.0),
}


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
    it is bit-identical to 1F1B. ValueError for an unknown effort or a negative jitter.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, not {effort!r}")
    if jitter is not None and not 0 <= jitter < math.inf:
        raise ValueError(f"jitter must be a relative standard deviation such as 0.05, not {jitter}")
    bound = lower_bound(problem).cost
    whole, scale = _in_ticks(problem)

    def tell(step: str, cost: float) -> None:
        if progress is not None:
            progress(Progress(step, cost / scale, bound))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = _Search(whole, EFFORTS[effort], pool, tell).run()
    arrays, many = problem.arrays(), problem.num_microbatches
    orders = _sorted(
        _Order(one.rows, evaluate(arrays, many, one.rows).cost, one.how) for one in found
    )
    best = orders[0] if jitter is None else _steadiest(problem, orders, jitter)
    schedule = decode(problem, best.rows, "auto")
    return Solution(schedule, best.cost, min(bound, best.cost), best.how)


def _in_ticks(problem: Problem) -> tuple[Problem, float]:
    """The problem with times rounded to whole ticks, and how many ticks a ms has.

    Sums of whole numbers are exact: whether a gap is as long as a W does not depend on rounding.
    Ticks are a power of ten of a ms, at most a 100,000th of the longest pass.
    """
    costs = problem.costs
    longest = max(max(map(max, table)) for table in (costs.t_f, costs.t_b, costs.t_w))
    scale = 10.0 ** (6 - math.ceil(math.log10(longest))) if longest > 0 else 1.0

    def rounded(table: Table) -> Table:
        return tuple(tuple(float(round(time * scale)) for time in row) for row in table)

    ticks = replace(
        costs,
        t_f=rounded(costs.t_f),
        t_b=rounded(costs.t_b),
        t_w=rounded(costs.t_w),
        t_bw=None,
        t_comm=float(round(costs.t_comm * scale)),
        t_edges=tuple((one, other, float(round(t * scale))) for one, other, t in costs.t_edges),
    )
    return replace(problem, costs=ticks), scale


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A template with knobs, and what it costs on few microbatches."""

    start: Start
    knobs: Floats
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """A complete order, timed."""

    rows: Ints
    cost: float
    how: str
    origin: int = 0
    """Number of the order that polishing began with."""


_SEEDS = tuple(
    Knobs(patience, gap, lead, spare, hold, patience, gap, lead, 0.0)
    for patience, gap, lead, spare, hold in (
        (0.5, 0.6, 1e9, 0.0, 1e9),
        (0.0, 0.3, 1e9, 99.0, 1e9),
        (1.0, 1.0, 0.0, 0.0, 1e9),
        (0.5, 0.01, 0.0, 1.0, 1e9),
        (0.0, 0.01, 1e9, 0.8, 1e9),
        (0.5, 0.6, 1.0, 0.0, 1e9),
        (0.75, 0.6, 1e9, 0.0, 1e9),
        (0.25, 0.01, 1e9, 0.0, 1e9),
        (0.5, 0.6, 4.0, 0.0, 1e9),
        (0.5, 0.6, 0.0, 0.0, 0.0),
        (0.0, 0.01, 1e9, 1.0, 0.0),
        (0.0, 0.3, 1e9, 99.0, 0.0),
        (0.0, 1.0, 1e9, 99.0, 0.0),
        (0.0, 0.6, 0.0, 0.0, 0.0),
        (0.5, 1.0, 0.0, 0.0, 1.0),
    )
)
_ROUNDS = 8
_MOST_POLISHED = 256
_LEAST_MOVES = 1000
"""Moves that are worth starting with another order for."""
_WAYS = ((1, 6), (50, 12), (300, 6), (1000, 20), (5000, 8))
"""Late acceptance's history and longest move of the rounds of polishing, in turn."""


class _Search:
    """One search: the problem, its little brother with few microbatches, and the best orders."""

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        pool: ThreadPoolExecutor,
        tell: Callable[[str, float], None],
    ) -> None:
        self.problem = problem
        self.effort = effort
        self.pool = pool
        self.tell = tell
        self.bound = lower_bound(problem).cost
        # Enough for warm-up, cool-down, and a steady state between them.
        in_flight = float(np.max(microbatches_in_flight(problem)))
        few = math.ceil(problem.num_stages + 2 * max(problem.num_stages, in_flight))
        many = problem.num_microbatches
        if 3 * many <= 4 * few:
            few = many
        self.small = replace(problem, num_microbatches=few)
        self.small_bound = lower_bound(self.small).cost
        self.arrays = problem.arrays()
        self.chunks = self.arrays.held.shape[1]
        self.best = math.inf

    def run(self) -> list[_Order]:
        """Orders of all microbatches, best first."""
        few = self.small.num_microbatches
        given = self._given(self.small)
        candidates: list[_Candidate] = []
        if not self._met(given, self.small_bound):
            candidates = self._descend(self._sweep())
        orders = _sorted([*given, *self._squeezed(candidates[:_MOST_POLISHED], few)])
        orders = self._polish(self.small, orders, self.small_bound)
        if few < self.problem.num_microbatches:
            orders = self._lengthened(orders, candidates)
        return orders

    def _lengthened(
        self, orders: Sequence[_Order], candidates: Sequence[_Candidate]
    ) -> list[_Order]:
        """From few microbatches to all of them."""
        self.tell("all microbatches", self.best)
        few, many = self.small.num_microbatches, self.problem.num_microbatches

        def longer(order: _Order) -> _Order | None:
            found = stretch(self.arrays, few, order.rows, many)
            return None if found is None else _Order(found[1], found[0], order.how)

        found = [one for one in self.pool.map(longer, orders[:3]) if one is not None]
        found = _sorted([*found, *self._squeezed(candidates[: self.effort.finalists], many)])
        # A steady state repeated without a bubble: what is left is polished already.
        bubble = orders[0].cost - self.small.ideal
        if found and found[0].cost <= self.problem.ideal + bubble * (1 + 1e-9):
            return found
        found = _sorted([*found, *self._given(self.problem)])
        return self._polish(self.problem, found, self.bound)

    def _met(self, orders: Sequence[_Order], bound: float) -> bool:
        return bool(orders) and orders[0].cost <= bound * (1 + 1e-9)

    def _passes(self, microbatches: int) -> int:
        return 3 * self.problem.placement.num_positions * microbatches

    def _rows(self, microbatches: int) -> Ints:
        return np.empty((self.problem.num_stages, 3 * self.chunks * microbatches), np.int64)

    def _given(self, problem: Problem) -> list[_Order]:
        """What is known without a search, where it fits the limits; best first."""
        stages, microbatches = problem.num_stages, problem.num_microbatches
        schedules = list[Schedule]()
        match problem.placement.name:
            case "linear":
                schedules += [zb_h1(stages, microbatches), zb_h2(stages, microbatches)]
                with suppress(ValueError):  # Limits can be below what it can work with.
                    schedules.append(paper_method(problem).schedule)
            case "v":
                costs = problem.costs
                schedules += [one(stages, microbatches, costs) for one in (zb_v, v_half, v_min)]
        found = []
        for schedule in schedules:
            rows = encode(schedule)
            result = evaluate(self.arrays, microbatches, rows)
            if np.all(result.peak <= self.arrays.limit * (1 + 1e-9)):
                found.append(_Order(rows, result.cost, schedule.name))
        return _sorted(found)

    def _sweep(self) -> list[_Candidate]:
        """All templates under a few settings of the knobs, best first."""
        self.tell("templates", self.best)
        few = self.small.num_microbatches
        found = starts(self.problem)
        allowed = int(self.effort.sweep * 1e6 / self._passes(few) / len(found))
        seeds = np.array(_SEEDS[: max(2, allowed)], dtype=np.float64)

        def tried(start: Start) -> list[_Candidate]:
            costs = np.empty(len(seeds))
            base = start.family.base(self.chunks, few)
            sweep(self.arrays, base, start.lags, seeds, costs, self._rows(few))
            return [
                _Candidate(start, knobs, float(cost))
                for knobs, cost in zip(seeds, costs, strict=True)
                if cost < FAILED
            ]

        candidates = [one for many in self.pool.map(tried, found) for one in many]
        return sorted(candidates, key=lambda one: one.cost)

    def _descend(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """The best of the best templates, improved, then all, best first."""
        self.tell("lags and knobs", self.best)
        few = self.small.num_microbatches
        best_of = {id(one.start): one for one in reversed(candidates)}
        distinct = sorted(best_of.values(), key=lambda one: one.cost)
        chosen = distinct[: self.effort.descents]
        squeezes = self.effort.descent * 1e6 / self._passes(few)
        budget = max(20, int(squeezes / max(1, len(chosen))))

        def improved(candidate: _Candidate) -> _Candidate:
            family = candidate.start.family
            lags, knobs = candidate.start.lags.copy(), candidate.knobs.copy()
            cost = descend(
                self.arrays,
                family.base(self.chunks, few),
                lags,
                knobs,
                family.row_sets,
                family.step,
                family.falling,
                self.small_bound,
                budget,
                self._rows(few),
            )
            return _Candidate(Start(family, lags), knobs, cost)

        better = list(self.pool.map(improved, chosen))
        return sorted([*better, *candidates], key=lambda one: one.cost)

    def _squeezed(self, candidates: Sequence[_Candidate], microbatches: int) -> list[_Order]:
        """The orders of candidates, with every pass as early as its order allows."""

        def squeezed(candidate: _Candidate) -> _Order | None:
            rows = self._rows(microbatches)
            family = candidate.start.family
            base = family.base(self.chunks, microbatches)
            if assess(self.arrays, base, candidate.start.lags, candidate.knobs, rows) >= FAILED:
                return None
            codes = self._passes(microbatches)
            cost = run_rows(self.arrays, microbatches, rows, np.empty(codes), np.empty(codes))
            return _Order(rows, cost, family.name)

        return [one for one in self.pool.map(squeezed, candidates) if one is not None]

    def _polish(self, problem: Problem, orders: Sequence[_Order], bound: float) -> list[_Order]:
        """Rounds of polishing: the best descendants of fewer and fewer orders, in two ways each."""
        microbatches = problem.num_microbatches
        work = self.effort.polish * 1e6 / self._passes(microbatches) / _ROUNDS
        most = min(_MOST_POLISHED, max(self.effort.finalists, int(work / (2 * _LEAST_MOVES))))
        found = [replace(one, origin=number) for number, one in enumerate(_sorted(orders)[:most])]
        for number in range(_ROUNDS):
            self._note(problem, found)
            self.tell("polish", self.best)
            if self._met(found, bound):
                break
            best_of = {one.origin: one for one in reversed(found)}
            going = _sorted(best_of.values())[: max(2, most >> number)]
            tasks = [
                (order, *_WAYS[(number + way) % len(_WAYS)], 1 + number * 1000 + index * 2 + way)
                for index, order in enumerate(going)
                for way in range(2)
            ]
            iterations = int(work / len(tasks))

            def polished(
                task: tuple[_Order, int, int, int], iterations: int = iterations
            ) -> _Order:
                order, history, step, seed = task
                rows = order.rows.copy()
                cost = polish(
                    self.arrays, microbatches, rows, iterations, history, step, seed, bound
                )
                return replace(order, rows=rows, cost=cost)

            found = _sorted([*found, *self.pool.map(polished, tasks)])
        self._note(problem, found)
        return found

    def _note(self, problem: Problem, orders: Sequence[_Order]) -> None:
        if problem is self.problem or problem.num_microbatches == self.problem.num_microbatches:
            self.best = min(self.best, orders[0].cost)


def _sorted(orders: Iterable[_Order]) -> list[_Order]:
    """Best first, each order once."""
    found = dict[bytes, _Order]()
    for one in orders:
        found.setdefault(one.rows.tobytes(), one)
    return sorted(found.values(), key=lambda one: one.cost)


def _steadiest(problem: Problem, orders: Sequence[_Order], jitter: float) -> _Order:
    """The order of least mean cost when times vary, among those about as good as the best."""
    near = [one for one in orders if one.cost <= orders[0].cost * (1 + jitter)]
    noise = Noise(problem.placement, problem.num_microbatches, sigma=jitter, seed=0)
    factors = noise.table(20)
    arrays, many = problem.arrays(), problem.num_microbatches
    return min(near, key=lambda one: mean_cost(arrays, many, one.rows, factors))
