"""How many layers each chunk gets, and the schedule, chosen together.

An even partition leaves the stage with the LM head or the embedding as the busiest one, and every
other stage waits for it in every microbatch. What counts in the end is the time of an iteration,
not the bubble rate: that one is measured against the busiest stage of the partition itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zero_bubble.placement import Placement
from zero_bubble.search.auto import auto
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.partition_balance import (
    Loads,
    all_partitions,
    balance,
    bottleneck,
    count_partitions,
    neighbours,
    require_layers,
    spread,
)
from zero_bubble.search.partition_model import Layer, LayerKind, Model
from zero_bubble.search.partition_result import (
    NoPartitionFits,
    Partition,
    PartitionProgress,
    idle_share,
)
from zero_bubble.search.problem import Ints, Problem
from zero_bubble.search.solution import Solution

__all__ = [
    "EFFORTS",
    "Layer",
    "LayerKind",
    "Model",
    "NoPartitionFits",
    "Partition",
    "PartitionProgress",
    "idle_share",
    "partition",
]

type _Sizes = tuple[int, ...]
type _Waiting = tuple[float, float, tuple[int, ...]]
"""Bound in ms, `Loads.unevenness`, cuts: what is tried first is smaller."""

_MOST_ENUMERATED = 3000
_BOUNDS_A_SCHEDULE = 25
_ROUNDING = 1e-9
_LEAST_GAIN = 1e-4


@dataclass(frozen=True, slots=True)
class _Effort:
    """How much is tried. Counted in work, not in seconds, so that results repeat."""

    schedules: int
    """Partitions that get a schedule."""
    bounds: int
    """Partitions that get a lower bound."""
    patience: int
    """Partitions tried in a row without a gain after which no more are, unless all can be."""
    finalists: int
    """Partitions that get a schedule with the effort asked for."""


EFFORTS = {
    "quick": _Effort(schedules=10, bounds=300, patience=4, finalists=0),
    "normal": _Effort(schedules=40, bounds=1000, patience=12, finalists=2),
    "thorough": _Effort(schedules=200, bounds=5000, patience=60, finalists=4),
}


def partition(
    model: Model,
    placement: Placement,
    num_microbatches: int,
    memory_limit_per_stage: float | Sequence[float] = math.inf,
    *,
    effort: str = "normal",
    progress: Callable[[PartitionProgress], None] | None = None,
) -> Partition:
    """The partition and schedule of least cost that the search finds.

    Chunks hold layers that follow one another, at least one each; embedding and loss are layers.
    A limit covers the layers' weight memory and what microbatches hold, in the unit of the model's
    memory. Partitions are tried in the order of their `lower_bound`, those next to a tried one
    (up to 3000 in all: all of them) among the rest, until no bound is below the least cost, or the
    effort is used up. Deterministic, and never worse than the even partition.

    ValueError if there are fewer layers than chunks; `NoPartitionFits`, which is one, if no
    partition was found that fits.
    """
    if effort not in EFFORTS:
        raise ValueError(f"effort must be one of {', '.join(EFFORTS)}, not {effort!r}")
    if num_microbatches < 1:
        raise ValueError(f"at least 1 microbatch is needed, not {num_microbatches}")
    require_layers(model, placement)
    limits = _limits(memory_limit_per_stage, placement.num_stages)
    return _Search(model, placement, num_microbatches, limits, effort, progress).run()


class _Search:
    def __init__(
        self,
        model: Model,
        placement: Placement,
        microbatches: int,
        limits: tuple[float, ...],
        effort: str,
        progress: Callable[[PartitionProgress], None] | None,
    ) -> None:
        self.model, self.placement, self.microbatches = model, placement, microbatches
        self.limits = limits
        self.effort = effort
        self.progress = progress
        self.loads = Loads.of(model, placement, limits)
        # Heaps: by the work of the busiest stage, and by `lower_bound`, which takes longer.
        self.rough: list[_Waiting] = []
        self.bounded: list[_Waiting] = []
        self.seen: set[tuple[int, ...]] = set()
        self.tried: dict[_Sizes, Solution] = {}
        self.all_seen = False
        self.bound = 0.0

    def run(self) -> Partition:
        busiest, starts = self._starts()
        self.bound = max(self.microbatches * busiest, self._bound_of_any())
        self._push(starts)
        if not self.rough:
            raise self._none_fits()
        self._try_best_first()
        even = self.model.even_sizes(self.placement.num_positions)
        if even is not None and self.loads.excess(_cuts(even)[None, :])[0] > 0:
            even = None
        return self._finish(even)

    def _starts(self) -> tuple[float, Ints]:
        """The least work of the busiest position, and partitions to begin with."""
        layers, positions = self.loads.num_layers, self.loads.num_positions
        busiest, best = bottleneck(self.loads)
        if count_partitions(layers, positions) <= _MOST_ENUMERATED:
            self.all_seen = True
            return busiest if best is not None else 0.0, all_partitions(layers, positions)
        starts = [np.linspace(0, layers, positions + 1).astype(np.int64)]
        if best is not None:
            starts.append(best)
        even = self.model.even_sizes(positions)
        if even is not None:
            starts.append(_cuts(even))
        starts += [balance(self.loads, cuts) for cuts in starts]
        return busiest if best is not None else 0.0, np.array(starts)

    def _bound_of_any(self) -> float:
        """What no partition costs less than, in ms.

        The busiest stage computes at least what `spread` says. And the stage with the first layer
        waits for the whole way there and back of its last microbatch, on which any layer's F or B
        runs once for each of the others, and for W of that layer (see `path_bound`): none of that
        depends on where the model is cut.
        """
        layers = self.model.layers
        owners = [self.placement.owner(at)[0] for at in range(self.placement.num_positions)]
        hops = sum(one != other for one, other in pairwise(owners))
        way = math.fsum(layer.t_f + layer.t_b for layer in layers) + 2 * hops * self.model.t_comm
        slowest = max(max(layer.t_f, layer.t_b) for layer in layers)
        return max(
            self.microbatches * spread(self.model, self.placement),
            way + (self.microbatches - 1) * slowest + layers[0].t_w,
        )

    def _none_fits(self) -> NoPartitionFits:
        needed = math.fsum(layer.m_b + layer.weight_memory for layer in self.model.layers)
        proven = self.all_seen or self.placement.num_positions == self.placement.num_stages
        return NoPartitionFits(self.limits, needed, proven=proven)

    def _push(self, cuts: Ints) -> None:
        """Put new partitions that fit on the heap, by the work of their busiest stage."""
        if not len(cuts):
            return
        cuts = cuts[self.loads.excess(cuts) <= 0]
        work = self.loads.stage_work(cuts).max(axis=1)
        bounds = np.maximum(self.microbatches * work, self.bound).tolist()
        uneven = self.loads.unevenness(cuts).tolist()
        for waiting in zip(bounds, uneven, map(tuple, cuts.tolist()), strict=True):
            if waiting[2] not in self.seen:
                self.seen.add(waiting[2])
                heapq.heappush(self.rough, waiting)

    def _try_best_first(self) -> None:
        left, enough = EFFORTS[self.effort], math.inf
        schedules, bounds, least = left.schedules, left.bounds, math.inf
        without_gain = 0
        while schedules and (self.all_seen or without_gain < left.patience):
            for _ in range(min(bounds, _BOUNDS_A_SCHEDULE)):
                if _first(self.rough) >= min(enough, _first(self.bounded)):
                    break
                bounds -= 1
                key, uneven, cuts = heapq.heappop(self.rough)
                key = max(key, lower_bound(self._problem(_sizes(cuts))).cost)
                heapq.heappush(self.bounded, (key, uneven, cuts))
            if _first(self.bounded) >= enough:
                if bounds and _first(self.rough) < enough:
                    continue
                break
            schedules -= 1
            key, _, cuts = heapq.heappop(self.bounded)
            sizes = _sizes(cuts)
            found = self.tried[sizes] = auto(self._problem(sizes), effort="quick")
            least = min(least, max(key, found.bound))
            without_gain = 0 if found.cost < enough * (1 - _LEAST_GAIN) else without_gain + 1
            enough = min(enough, found.cost * (1 - _ROUNDING))
            if not self.all_seen:
                self._push(neighbours(np.array(cuts)))
            self._tell()
        if self.all_seen:
            # Each partition is tried, or waits with its bound.
            rest = min(least, _first(self.rough), _first(self.bounded))
            self.bound = max(self.bound, rest)

    def _finish(self, even: _Sizes | None) -> Partition:
        """The best few with all the effort, and the even one with as much if that can help it."""
        ranked = sorted(self.tried, key=lambda one: self.tried[one].cost)
        finalists = ranked[: EFFORTS[self.effort].finalists]
        if even is not None and even not in finalists:
            finalists.append(even)
        for sizes in finalists:
            if sizes not in self.tried:
                self.tried[sizes] = auto(self._problem(sizes), effort="quick")
            best = min(one.cost for one in self.tried.values())
            # What its bound keeps above the best stays there with any effort.
            if self.effort == "quick" or self.tried[sizes].bound >= best * (1 - _ROUNDING):
                continue
            found = auto(self._problem(sizes), effort=self.effort)
            if found.cost < self.tried[sizes].cost:
                self.tried[sizes] = found
            self._tell()
        sizes = min(self.tried, key=lambda one: self.tried[one].cost)
        if even is not None and self.tried[even].cost <= self.tried[sizes].cost * (1 + _ROUNDING):
            sizes = even
        return Partition(
            model=self.model,
            sizes=sizes,
            problem=self._problem(sizes),
            memory_limit=self.limits,
            solution=self.tried[sizes],
            even=None if even is None else self.tried[even],
            bound=min(self.bound, self.tried[sizes].cost),
        )

    def _problem(self, sizes: _Sizes) -> Problem:
        weights = self.model.weight_memory(self.placement, sizes)
        return Problem(
            self.placement,
            self.model.costs(self.placement, sizes),
            self.microbatches,
            # Partitions that do not fit are not asked for: less than 0 would be rounding.
            tuple(max(0.0, most - held) for most, held in zip(self.limits, weights, strict=True)),
        )

    def _tell(self) -> None:
        if self.progress is None:
            return
        sizes = min(self.tried, key=lambda one: self.tried[one].cost)
        cost = self.tried[sizes].cost
        self.progress(PartitionProgress(len(self.tried), cost, min(self.bound, cost)))


def _limits(given: float | Sequence[float], stages: int) -> tuple[float, ...]:
    limits = [given] * stages if isinstance(given, int | float) else [*given]
    if len(limits) != stages:
        raise ValueError(f"{len(limits)} memory limits for {stages} stages: give one, or one each")
    for limit in limits:
        if math.isnan(limit) or limit < 0:
            raise ValueError(f"memory limit {limit}: expected a number, at least 0")
    return tuple(map(float, limits))


def _first(waiting: list[_Waiting]) -> float:
    return waiting[0][0] if waiting else math.inf


def _sizes(cuts: Sequence[int]) -> _Sizes:
    return tuple(end - begin for begin, end in pairwise(cuts))


def _cuts(sizes: _Sizes) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
