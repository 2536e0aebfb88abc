"""The search behind `auto`: templates squeezed, improved, polished, and made longer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from zero_bubble.builders import v_half, v_min, zb_h1, zb_h2, zb_interleaved, zb_v
from zero_bubble.builders.recomputing import with_recomputation, within_backward
from zero_bubble.schedule import Schedule
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.descent import FAILED, assess, descend, sweep
from zero_bubble.search.families import Start, microbatches_in_flight, starts
from zero_bubble.search.orders import decode, encode, evaluate, run_rows
from zero_bubble.search.paper import paper_method
from zero_bubble.search.polish import polish
from zero_bubble.search.problem import Floats, Ints, Problem
from zero_bubble.search.squeeze import Knobs
from zero_bubble.search.stretch import stretch

__all__ = ["EFFORTS", "Effort", "Order", "Search", "sorted_orders"]


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
class _Candidate:
    """A template with knobs, and what it costs on few microbatches."""

    start: Start
    knobs: Floats
    cost: float


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A complete order, timed."""

    rows: Ints
    cost: float
    how: str
    origin: int = 0
    """Number of the order that polishing began with."""


_SEEDS = tuple(
    Knobs(patience, gap, lead, spare, hold, patience, gap, lead)
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


class Search:
    """One search: the problem, its little brother with few microbatches, and the best orders."""

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        pool: Executor,
        tell: Callable[[str, float], None],
    ) -> None:
        self.problem = problem
        self.effort = effort
        self.pool = pool
        self.tell = tell
        self.bound = lower_bound(problem).cost
        # Enough for warm-up, cool-down, and a steady state between them.
        stages = problem.num_stages
        in_flight = float(np.max(microbatches_in_flight(problem)))
        few = math.ceil(stages + 2 * min(max(stages, in_flight), 3 * stages))
        many = problem.num_microbatches
        if 3 * many <= 4 * few:
            few = many
        self.small = replace(problem, num_microbatches=few)
        self.small_bound = lower_bound(self.small).cost
        self.arrays = problem.arrays()
        self.chunks = self.arrays.held.shape[1]
        self.best = math.inf

    def run(self) -> list[Order]:
        """Orders of all microbatches, best first."""
        few = self.small.num_microbatches
        given = self._given(self.small)
        candidates: list[_Candidate] = []
        if not self._met(given, self.small_bound):
            candidates = self._descend(self._sweep())
        orders = sorted_orders([*given, *self._squeezed(candidates[:_MOST_POLISHED], few)])
        orders = self._polish(self.small, orders, self.small_bound)
        if few < self.problem.num_microbatches:
            orders = self._lengthened(orders, candidates)
        if self.problem.has_recomputation and not self._met(orders, self.bound):
            orders = self._polish(self.problem, [*orders[:1], *self._split()], self.bound)
        return orders

    def _split(self) -> list[Order]:
        """Orders that were found for B's that recompute, each with the R split from it."""
        problem = replace(self.problem, recompute_in_backward=True)
        found = Search(problem, EFFORTS["quick"], self.pool, lambda *_: None).run()
        orders = []
        for one in found[: self.effort.finalists]:
            rows = encode(with_recomputation(decode(problem, one.rows, one.how)))
            cost = evaluate(self.arrays, problem.num_microbatches, rows).cost
            orders.append(Order(rows, cost, f"{one.how}, split"))
        return orders

    def _lengthened(self, orders: Sequence[Order], candidates: Sequence[_Candidate]) -> list[Order]:
        """From few microbatches to all of them."""
        self.tell("all microbatches", self.best)
        few, many = self.small.num_microbatches, self.problem.num_microbatches

        def longer(order: Order) -> Order | None:
            found = stretch(self.arrays, few, order.rows, many)
            return None if found is None else Order(found[1], found[0], order.how)

        found = [one for one in self.pool.map(longer, orders[:3]) if one is not None]
        found = sorted_orders([*found, *self._squeezed(candidates[: self.effort.finalists], many)])
        # A steady state repeated without a bubble: what is left is polished already.
        bubble = orders[0].cost - self.small.ideal
        if found and found[0].cost <= self.problem.ideal + bubble * (1 + 1e-9):
            return found
        found = sorted_orders([*found, *self._given(self.problem)])
        if self._met(found, self.bound):
            return found
        if not candidates:  # Few microbatches needed no search, but all of them do.
            candidates = self._descend(self._sweep())
            squeezed = self._squeezed(candidates[: self.effort.finalists], many)
            found = sorted_orders([*found, *squeezed])
        if not found:
            found = sorted_orders(self._squeezed(candidates, many))
        return self._polish(self.problem, found, self.bound)

    def _met(self, orders: Sequence[Order], bound: float) -> bool:
        return bool(orders) and orders[0].cost <= bound * (1 + 1e-9)

    def _passes(self, microbatches: int) -> int:
        return self.arrays.kinds * self.problem.placement.num_positions * microbatches

    def _rows(self, microbatches: int) -> Ints:
        return np.empty(
            (self.problem.num_stages, self.arrays.kinds * self.chunks * microbatches), np.int64
        )

    def _given(self, problem: Problem) -> list[Order]:
        """What is known without a search, where it fits the limits; best first."""
        stages, microbatches = problem.num_stages, problem.num_microbatches
        schedules = list[Schedule]()
        match problem.placement.name:
            case "linear":
                schedules += [zb_h1(stages, microbatches), zb_h2(stages, microbatches)]
                # Limits can be below what it can work with, and it knows no recomputation.
                with suppress(ValueError):
                    folded = replace(problem, costs=within_backward(problem.costs))
                    schedules.append(paper_method(folded).schedule)
            case "interleaved":
                chunks = problem.placement.num_chunks(0)
                schedules.append(zb_interleaved(stages, microbatches, chunks))
            case "v":
                costs = within_backward(problem.costs)
                schedules += [one(stages, microbatches, costs) for one in (zb_v, v_half, v_min)]
        found = []
        for known in schedules:
            schedule = with_recomputation(known) if problem.has_recomputation else known
            rows = encode(schedule)
            result = evaluate(self.arrays, microbatches, rows)
            if np.all(result.peak <= self.arrays.limit * (1 + 1e-9)):
                found.append(Order(rows, result.cost, schedule.name))
        return sorted_orders(found)

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

    def _squeezed(self, candidates: Sequence[_Candidate], microbatches: int) -> list[Order]:
        """The orders of candidates, with every pass as early as its order allows."""

        def squeezed(candidate: _Candidate) -> Order | None:
            rows = self._rows(microbatches)
            family = candidate.start.family
            base = family.base(self.chunks, microbatches)
            if assess(self.arrays, base, candidate.start.lags, candidate.knobs, rows) >= FAILED:
                return None
            codes = self._passes(microbatches)
            cost = run_rows(self.arrays, microbatches, rows, np.empty(codes), np.empty(codes))
            return Order(rows, cost, family.name)

        return [one for one in self.pool.map(squeezed, candidates) if one is not None]

    def _polish(self, problem: Problem, orders: Sequence[Order], bound: float) -> list[Order]:
        """Rounds of polishing: the best descendants of fewer and fewer orders, in two ways each."""
        microbatches = problem.num_microbatches
        work = self.effort.polish * 1e6 / self._passes(microbatches) / _ROUNDS
        most = min(_MOST_POLISHED, max(self.effort.finalists, int(work / (2 * _LEAST_MOVES))))
        found = [
            replace(one, origin=number) for number, one in enumerate(sorted_orders(orders)[:most])
        ]
        for number in range(_ROUNDS):
            self._note(problem, found)
            self.tell("polish", self.best)
            if self._met(found, bound):
                break
            best_of = {one.origin: one for one in reversed(found)}
            going = sorted_orders(best_of.values())[: max(2, most >> number)]
            tasks = [
                (order, *_WAYS[(number + way) % len(_WAYS)], 1 + number * 1000 + index * 2 + way)
                for index, order in enumerate(going)
                for way in range(2)
            ]
            iterations = int(work / len(tasks))

            def polished(task: tuple[Order, int, int, int], iterations: int = iterations) -> Order:
                order, history, step, seed = task
                rows = order.rows.copy()
                cost = polish(
                    self.arrays, microbatches, rows, iterations, history, step, seed, bound
                )
                return replace(order, rows=rows, cost=cost)

            found = sorted_orders([*found, *self.pool.map(polished, tasks)])
        self._note(problem, found)
        return found

    def _note(self, problem: Problem, orders: Sequence[Order]) -> None:
        if problem.num_microbatches == self.problem.num_microbatches:
            self.best = min(self.best, orders[0].cost)


def sorted_orders(orders: Iterable[Order]) -> list[Order]:
    """Best first, each order once."""
    found = dict[bytes, Order]()
    for one in orders:
        found.setdefault(one.rows.tobytes(), one)
    return sorted(found.values(), key=lambda one: one.cost)
