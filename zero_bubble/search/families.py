"""Families of templates: where the search starts.

A template gives every pass a key, ``base[type, microbatch] + lags[stage, type]``, and each stage
runs its F's and B's by ascending key. Lags are how long after the F of a microbatch's first chunk
the stage means to run the other passes of the microbatch: they set how much is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from zero_bubble.search.problem import Floats, Problem

__all__ = ["Family", "Start", "microbatches_in_flight", "starts"]


@dataclass(frozen=True, slots=True)
class Family:
    """Templates that differ in their lags alone."""

    name: str
    row_sets: Floats
    """``row_sets[k, type]`` is 1 for the types whose lags the descent changes together."""
    step: float
    """The least change of a lag that matters."""
    falling: bool
    """Whether lags never rise along the pipeline."""
    group: int
    """Microbatches that pass through a chunk before the next chunk's turn (interleaved); else 1."""
    period: float
    """Distance of neighbouring microbatches' keys."""

    def base(self, chunks: int, microbatches: int) -> Floats:
        """``base[type, microbatch]`` for so many microbatches; R's like B's."""
        one = np.arange(microbatches)
        types = self.row_sets.shape[1]
        if self.group == 1:
            return np.tile(one * self.period, (types, 1))
        begun = one // self.group * self.group
        size = np.minimum(self.group, microbatches - begun)
        base = np.empty((types, microbatches))
        for chunk in range(chunks):
            base[chunk] = begun * chunks + chunk * size + one % self.group
            base[chunks + chunk] = begun * chunks + (chunks - 1 - chunk) * size + one % self.group
        base[2 * chunks :] = base[chunks : types - chunks]
        return base


@dataclass(frozen=True, slots=True)
class Start:
    """A template to start from."""

    family: Family
    lags: Floats
    """``lags[stage, type]``."""


def starts(problem: Problem) -> list[Start]:
    """Templates to start from, whether or not they fit the memory limits."""
    found: Iterator[Start]
    match problem.placement.name:
        case "linear":
            found = _linear(problem)
        case "v":
            found = _v_shaped(problem)
        case "interleaved":
            found = _interleaved(problem)
        case _:
            found = iter(())
    plain = [*found, *_waves(problem)]
    return [_with_r(one) for one in plain] if problem.has_recomputation else plain


def microbatches_in_flight(problem: Problem) -> Floats:
    """Most microbatches that each stage can hold between F and B (all chunks together).

    With recomputation they hold what is kept of them, and one chunk at a time the rest. One
    always fits, however its chunks differ.
    """
    costs, most = problem.costs, problem.num_microbatches
    kept = costs.m_b if costs.m_r is None else costs.m_r
    found = []
    for whole, part, limit in zip(costs.m_b, kept, problem.memory_limit, strict=True):
        room = limit - max(all_of - some for all_of, some in zip(whole, part, strict=True))
        found.append(
            min(float(most), room / sum(part) * (1 + 1e-9)) if sum(part) > 0 else float(most)
        )
    return np.array(found) if costs.m_r is None else np.maximum(found, 1.0)


def _with_r(start: Start) -> Start:
    """The template with an R right before each B, which moves with it and alone."""
    family, lags = start.family, start.lags
    chunks = lags.shape[1] // 2
    sets = np.hstack([family.row_sets, family.row_sets[:, chunks:]])
    alone = np.zeros((1, 3 * chunks))
    alone[0, 2 * chunks :] = 1
    family = replace(family, row_sets=np.vstack([sets, alone]))
    return Start(family, np.hstack([lags, lags[:, chunks:] - 0.25]))


def _linear(problem: Problem) -> Iterator[Start]:
    """F of microbatch j at j, B at j + h + 1/2, with lags h that fall along the pipeline."""
    stages = problem.num_stages
    most = np.floor(microbatches_in_flight(problem)) - 1
    stage = np.arange(stages)
    back = stages - 1 - stage
    family = Family("lag", np.array([[0.0, 1.0]]), 1.0, True, 1, 1.0)
    seen = set[tuple[float, ...]]()

    def start(lags: Floats) -> Iterator[Start]:
        lags = np.minimum.accumulate(np.clip(np.round(lags), 0, most))
        if tuple(lags) not in seen:
            seen.add(tuple(lags))
            yield Start(family, np.stack([np.zeros(stages), lags + 0.5], axis=1))

    for slope in (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.4, 1.5, 1.6, 1.75, 2.0, 2.25, 2.5, 3.0):
        yield from start(slope * back.astype(np.float64))
    for slope in (0.75, 0.85, 1.0, 1.15, 1.25):
        for fall in (1.25, 1.5, 2.0, 2.5, 3.0):
            yield from start(np.maximum(slope * back, most - fall * stage))
    for fall in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0):
        for spare in (0, 1):
            yield from start(most - spare - fall * stage)


def _v_shaped(problem: Problem) -> Iterator[Start]:
    """F of the first chunk at qj, of the second h1 later, its B h2 later, the first's B h2 + h1.

    Hops between neighbouring stages lag by whole numbers whose sums over the later hops are h1,
    and h2 = (sum of all) + 1. Where F and B take equal time both halves of the V tile the period
    then, and there is a steady state without bubbles. Lags of 2 hold p microbatches in flight, all
    1 hold p/2, and q = 3 with all 1 about p/3.
    """
    stages = problem.num_stages
    hops = stages - 1
    room = 2 * float(microbatches_in_flight(problem).min())
    row_sets = np.array(
        [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 1, 1]], dtype=np.float64
    )
    for period in (2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64, 128):
        # Twice (sum of lags + 1) / period chunks are in flight: more than fits is no use.
        most = max(hops, min((2 if period == 2 else 4) * hops, int(room * period / 2)))
        if 2 * (hops + 1) / period > room + 2:
            continue
        family = Family(f"v{period}", row_sets, 1.0, False, 1, float(period))
        totals = {round(x) for x in np.linspace(hops, most, 7)}
        totals |= {max(hops, most - 1), max(hops, most - 2)}
        for total in sorted(totals):
            for spread in ("even", "early", "late") if hops and total % hops else ("even",):
                ahead = _hop_sums(hops, total, spread)
                turn = ahead[0] + 1
                turn += turn % period == 0
                zero = np.zeros(stages)
                lags = [zero, ahead + 0.5, turn + ahead + 0.5, zero + turn]
                yield Start(family, np.stack(lags, axis=1))
        if 2 * (hops + 1) / period < 0.5 * room:
            return


def _hop_sums(hops: int, total: int, spread: str) -> Floats:
    """For each stage the sum of the lags of the hops after it; ``total`` is that of all."""
    lags = np.full(hops, total // hops if hops else 0)
    extra = total - int(lags.sum())
    where = np.arange(hops)
    match spread:
        case "even":
            lags += np.diff(where * extra // max(1, hops), append=extra)
        case "early":
            lags += where < extra
        case _:
            lags += where >= hops - extra
    return np.append(np.cumsum(lags[::-1])[::-1], 0).astype(np.float64)


def _interleaved(problem: Problem) -> Iterator[Start]:
    """Groups of microbatches take turns on the chunks; B number n is h + 1/2 after F number n."""
    stages = problem.num_stages
    chunks = problem.placement.num_chunks(0)
    most = np.floor(chunks * microbatches_in_flight(problem)) - 1
    back = stages - 1 - np.arange(stages)
    row_sets = np.zeros((2, 2 * chunks))
    row_sets[0, chunks:] = 1
    row_sets[1, chunks : chunks + 1] = 1
    for group in sorted({stages, max(2, stages // 2), max(2, stages // 4), stages + 1}):
        family = Family(f"group{group}", row_sets, 1.0, True, group, 1.0)
        seen = set[tuple[float, ...]]()
        for slope in (0, 0.5, 1, 1.25, 1.5, 2, 2.5, 3, 4):
            for offset in (0.0, 0.5, 1.0, 2.0):
                lags = slope * back + (chunks - 1) * group + offset * stages
                lags = np.minimum.accumulate(np.clip(np.round(lags), 0, most))
                if tuple(lags) in seen:
                    continue
                seen.add(tuple(lags))
                rows = np.zeros((stages, 2 * chunks))
                rows[:, chunks:] = (lags + 0.5)[:, None]
                yield Start(family, rows)


def _waves(problem: Problem) -> Iterator[Start]:
    """One microbatch after the other down the model and up again: for any placement and limit.

    F of position k at qj + k, B at qj + 2n - 1 - k: the larger q, the less is in flight; from 2n on
    it is one microbatch. Keys ascend along every dependency, so that nothing can deadlock.
    """
    placement = problem.placement
    stages, positions = placement.num_stages, placement.num_positions
    chunks = max(map(len, placement.positions))
    row_sets = np.ones((1, 2 * chunks))
    row_sets[0, 0] = 0
    lags = np.zeros((stages, 2 * chunks))
    for stage, held in enumerate(placement.positions):
        for chunk, position in enumerate(held):
            lags[stage, chunk] = position
            lags[stage, chunks + chunk] = 2 * positions - 1 - position
    flight = float(microbatches_in_flight(problem).min())
    # About 2n / q microbatches are in flight on the first stage, fewer on the later ones.
    for share in (0.7, 1.0, 1.2, 1.5, 2.0, 3.0, math.inf):
        period = max(1.0, min(2.0 * positions, 2 * positions / flight * share))
        yield Start(Family("wave", row_sets, 1.0, False, 1, period), lags)
