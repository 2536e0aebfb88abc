"""Partitions as rows of cuts: all of them, those next to one, and the well balanced ones.

A partition of n layers into k positions is ``cuts`` of length k + 1: position i holds the layers
``cuts[i]`` to ``cuts[i + 1] - 1``, at least one. Arrays of shape (number of partitions, k + 1) hold
many, so that thousands are compared in one step.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import combinations
from typing import Self

import numpy as np

from zero_bubble.placement import Placement
from zero_bubble.search.partition_model import Model
from zero_bubble.search.problem import Floats, Ints

__all__ = [
    "Loads",
    "all_partitions",
    "balance",
    "bottleneck",
    "count_partitions",
    "neighbours",
    "reference_sizes",
    "require_layers",
    "spread",
]


@dataclass(frozen=True, slots=True)
class Loads:
    """What stages compute and hold under a partition."""

    work: Floats
    """F, B and W of one microbatch on all layers before this one, in ms; length n + 1."""
    m_b: Floats
    """The same for the memory of one microbatch."""
    weight_memory: Floats
    """The same for what layers hold all the time."""
    owner: Floats
    """``owner[position, stage]`` is 1 where the stage holds the position, else 0."""
    limit: Floats
    """Most memory of each stage."""

    @classmethod
    def of(cls, model: Model, placement: Placement, limit: tuple[float, ...]) -> Self:
        owner = np.zeros((placement.num_positions, placement.num_stages))
        for stage, held in enumerate(placement.positions):
            owner[list(held), stage] = 1.0

        def running(values: list[float]) -> Floats:
            return np.concatenate([[0.0], np.cumsum(values)])

        return cls(
            work=running([layer.work for layer in model.layers]),
            m_b=running([layer.m_b for layer in model.layers]),
            weight_memory=running([layer.weight_memory for layer in model.layers]),
            owner=owner,
            limit=np.array(limit),
        )

    @property
    def num_layers(self) -> int:
        return len(self.work) - 1

    @property
    def num_positions(self) -> int:
        return len(self.owner)

    def stage_work(self, cuts: Ints) -> Floats:
        """Work of each stage for one microbatch, in ms; shape (partitions, stages)."""
        return self._by_stage(self.work, cuts)

    def unevenness(self, cuts: Ints) -> Floats:
        """Sum of squares of the work of stages and of positions, for each partition.

        Of two partitions with equal stages, the one with more equal chunks is easier to schedule.
        """
        stages, positions = self.stage_work(cuts), np.diff(self.work[cuts], axis=1)
        total: Floats = (stages**2).sum(axis=1) + (positions**2).sum(axis=1)
        return total

    def excess(self, cuts: Ints) -> Floats:
        """By how much the stages miss their limits if one microbatch runs at a time, in total.

        0 is what `Problem` accepts.
        """
        m_b = self._by_stage(self.m_b, cuts)
        missing = m_b + self._by_stage(self.weight_memory, cuts) - self.limit
        # Half of what `Problem` grants to rounding: sums are taken in another order there.
        missing[missing <= 5e-10 * m_b] = 0.0
        total: Floats = missing.sum(axis=1)
        return total

    def _by_stage(self, running: Floats, cuts: Ints) -> Floats:
        total: Floats = np.diff(running[cuts], axis=1) @ self.owner
        return total


def count_partitions(layers: int, positions: int) -> int:
    """How many partitions there are."""
    return math.comb(layers - 1, positions - 1)


def all_partitions(layers: int, positions: int) -> Ints:
    """Every partition, in lexical order."""
    inner = list(combinations(range(1, layers), positions - 1))
    cuts = np.zeros((len(inner), positions + 1), dtype=np.int64)
    cuts[:, 1:-1] = inner
    cuts[:, -1] = layers
    return cuts


def neighbours(cuts: Ints) -> Ints:
    """Every partition where one position gives a layer and another one gets one.

    Positions between the two keep their number of layers.
    """
    positions = len(cuts) - 1
    found = []
    for source in range(positions):
        if cuts[source + 1] - cuts[source] < 2:
            continue
        for target in range(positions):
            moved = cuts.copy()
            if source < target:
                moved[source + 1 : target + 1] -= 1
            elif target < source:
                moved[target + 1 : source + 1] += 1
            else:
                continue
            found.append(moved)
    return np.array(found, dtype=np.int64).reshape(len(found), positions + 1)


def bottleneck(loads: Loads) -> tuple[float, Ints | None]:
    """The least work that the busiest *position* can have, for one microbatch; a partition with it.

    Dynamic programming over (positions, layers), exact. Where each stage has one position, only
    partitions that fit the memory count, and (infinity, None) says that none does. Otherwise memory
    is left aside. A stage computes no less than its busiest position, so that no partition has a
    busiest stage with less.
    """
    layers, positions = loads.num_layers, loads.num_positions
    size = loads.work[None, :] - loads.work[:, None]  # [begin, end]
    begin, end = np.indices(size.shape)
    least = np.full(layers + 1, np.inf)
    least[0] = 0.0
    choices = []
    for position in range(positions):
        allowed = begin < end
        if positions == len(loads.limit):
            m_b = loads.m_b[None, :] - loads.m_b[:, None]
            weights = loads.weight_memory[None, :] - loads.weight_memory[:, None]
            limit = loads.limit[loads.owner[position].argmax()]
            allowed &= m_b * (1 - 5e-10) + weights <= limit
        worst = np.where(allowed, np.maximum(least[:, None], size), np.inf)
        choices.append(worst.argmin(axis=0))
        least = worst.min(axis=0)
    if not math.isfinite(least[layers]):
        return math.inf, None
    cuts = [layers]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    return float(least[layers]), np.array(cuts[::-1], dtype=np.int64)


def spread(model: Model, placement: Placement) -> float:
    """At least this much does the busiest stage compute for one microbatch, in ms.

    The embedding and the loss have their stages. Say each transformer layer had the work of the
    smallest one, and could be on any stage: then giving one after the other to the stage with the
    least work makes the busiest one as small as it can be. The average of all stages is as little
    as that one can have, too.
    """
    embedding, *middle, loss = (layer.work for layer in model.layers)
    stages = [0.0] * placement.num_stages
    stages[placement.owner(0)[0]] += embedding
    stages[placement.owner(placement.num_positions - 1)[0]] += loss
    heapq.heapify(stages)
    smallest = min(middle)
    for _ in middle:
        heapq.heapreplace(stages, stages[0] + smallest)
    return max(max(stages), math.fsum([embedding, *middle, loss]) / len(stages))


def require_layers(model: Model, placement: Placement) -> None:
    """ValueError unless each chunk can get a layer."""
    if len(model.layers) < placement.num_positions:
        raise ValueError(
            f"{len(model.layers)} layers (embedding and loss included) for "
            f"{placement.num_positions} chunks: each needs at least one; use fewer stages or chunks"
        )


def reference_sizes(model: Model, placement: Placement) -> tuple[int, ...]:
    """What a partition is measured by: Megatron's even one, or else one of least bottleneck.

    Memory limits are left aside. ValueError if there are fewer layers than chunks.
    """
    require_layers(model, placement)
    even = model.even_sizes(placement.num_positions)
    if even is not None:
        return even
    loads = Loads.of(model, placement, (math.inf,) * placement.num_stages)
    _, cuts = bottleneck(loads)
    if cuts is None:
        raise ValueError("times of the layers add up to more than a number can hold")
    return tuple(np.diff(balance(loads, cuts)).tolist())


def balance(loads: Loads, cuts: Ints) -> Ints:
    """Move single layers for as long as that improves the balance of the stages.

    Better is, in this order: less memory above the limits, less work on the busiest stage, less
    `unevenness`.
    """
    best = _badness(loads, cuts[None, :])[0]
    while True:
        around = neighbours(cuts)
        if not len(around):
            return cuts
        badness = _badness(loads, around)
        index = min(range(len(around)), key=lambda one: tuple(badness[one]))
        if tuple(badness[index]) >= tuple(best):
            return cuts
        best, cuts = badness[index], around[index]


def _badness(loads: Loads, cuts: Ints) -> Floats:
    work = loads.stage_work(cuts)
    columns = [loads.excess(cuts), work.max(axis=1), loads.unevenness(cuts)]
    # Rounded, so that two partitions that differ by rounding alone do not take turns for ever.
    scale = [1.0, loads.work[-1] or 1.0, (loads.work[-1] or 1.0) ** 2]
    return np.stack(
        [np.round(one / by, 12) for one, by in zip(columns, scale, strict=True)], axis=1
    )
