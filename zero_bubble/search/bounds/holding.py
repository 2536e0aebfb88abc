"""How much work a stage's memory can hold back: small knapsack problems.

A stage has one to a few chunks, mostly alike. Chunks alike are one class; up to two classes are
enumerated, which is exact, and more are merged into two by what is best of each for the schedule,
which can only lower a bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zero_bubble.search.bounds.paths import StageCosts
from zero_bubble.search.problem import Floats, Ints

__all__ = ["Backlogs", "backlogs", "fullest", "most_forward_time", "most_weight_time"]

_MOST_ALTERNATIVES = 40_000


@dataclass(frozen=True, slots=True)
class Backlogs:
    """What can be left to do after the start of a stage's last F: one entry an alternative.

    Whatever a schedule leaves, some entry has at least as much B time and at least as much W time.
    """

    t_b: Floats
    """Time of the B's left, and of their R's, in ms."""
    t_w: Floats
    """Time of the W's left, in ms: of the same microbatches, and of those that wait for W only."""


@dataclass(frozen=True, slots=True)
class _Class:
    """Chunks that are alike."""

    count: int
    values: tuple[float, ...]
    """Times, larger is better for a schedule."""
    sizes: tuple[float, ...]
    """Memory, smaller is better for a schedule."""


def most_forward_time(stage: StageCosts, chunks: int, microbatches: int) -> float:
    """Most time that F's of the stage's first ``chunks`` chunks take while no B has run, in ms.

    Each keeps its M_B until then, so it is a knapsack of F's. Where R's can run as well it is one
    of F's that keep M_R and of F's with their R's, which keep M_B.
    """
    if any(stage.t_r[:chunks]):
        return _most_forward_and_r_time(stage, chunks, microbatches)
    classes = _classes([((stage.t_f[one],), (stage.m_r[one],)) for one in range(chunks)])
    sizes = [one.sizes[0] for one in classes]
    counts = [np.arange(_most(stage.room, sizes[0], classes[0].count * microbatches) + 1)]
    if len(classes) > 1:
        rest = stage.room - _total(counts, sizes[:1])
        counts.append(_fit(rest, sizes[1], classes[1].count * microbatches))
    time = _total(counts, [one.values[0] for one in classes])
    return float(time.max())


def _most_forward_and_r_time(stage: StageCosts, chunks: int, microbatches: int) -> float:
    """At least that time, with one class for all chunks."""
    kept, whole = min(stage.m_r[:chunks]), min(stage.m_b[:chunks])
    most = chunks * microbatches
    with_r = np.arange(_most(stage.room, whole, most) + 1)
    rest = np.asarray(stage.room - with_r * whole, dtype=np.float64)
    alone = np.minimum(_fit(rest, kept, most), most - with_r)
    both = max(map(float.__add__, stage.t_f[:chunks], stage.t_r[:chunks]))
    return float((with_r * both + alone * max(stage.t_f[:chunks])).max())


def backlogs(stage: StageCosts, microbatches: int) -> Backlogs:
    """Every way to fill the memory at the start of the stage's last F that is not dominated.

    x microbatches of a chunk wait for B, each with M_B, and y for W only, each with M_W. With
    recomputation it is best if none of the x has run its R: more is left, and each holds M_R. The
    microbatch of the last F is among the x of every chunk, since all its F's have begun and none
    of its B's. For given x, the most W's that fit is best.
    """
    classes = _b_and_w_classes(stage)
    counts = _counts(classes, stage.room, microbatches)
    if math.prod(map(len, counts)) > _MOST_ALTERNATIVES:
        classes = [_merged(classes)]
        counts = _counts(classes, stage.room, microbatches)
    waiting = [axis.ravel() for axis in np.meshgrid(*counts, indexing="ij")]
    rest = stage.room - _total(waiting, [one.sizes[0] for one in classes])
    # The least that any order holds always fits: drop what does not, but never the first entry.
    fits = rest >= 0
    fits[0] = True
    waiting = [x[fits] for x in waiting]
    rest = np.maximum(rest[fits], 0.0)
    t_b = _total(waiting, [one.values[0] for one in classes])
    t_w = _total(waiting, [one.values[1] for one in classes])
    left = [one.count * microbatches - x for x, one in zip(waiting, classes, strict=True)]
    return Backlogs(t_b, t_w + _most_w(classes, left, rest))


def most_weight_time(stage: StageCosts, microbatches: int, besides: float = 0.0) -> float:
    """At least the most time of W's that a stage can hold back at any time, in ms.

    ``besides`` is memory that holds something else.
    """
    classes = _b_and_w_classes(stage)
    left = [np.array([one.count * microbatches]) for one in classes]
    return float(_most_w(classes, left, np.array([max(0.0, stage.room - besides)]))[0])


def fullest(stage: StageCosts, microbatches: int) -> float:
    """Most memory that a stage can hold at any time, which is often a little below its limit.

    If all chunks are alike and keep all, x times M_B and y times M_W; otherwise the limit.
    """
    total = microbatches * sum(stage.m_b)
    room = min(stage.room, total)
    m_b, m_w = stage.m_b[0], stage.m_w[0]
    alike = len(set(zip(stage.m_b, stage.m_w, strict=True))) == 1
    if not alike or m_b <= 0 or stage.m_r != stage.m_b:
        return room
    waiting = np.arange(_most(room, m_b, len(stage.m_b) * microbatches) + 1) * m_b
    if m_w > 0:
        waiting = waiting + np.floor((room - waiting) / m_w + 1e-9) * m_w
    return min(total, float(waiting.max()))


def _most_w(classes: list[_Class], left: list[Ints], rest: Floats) -> Floats:
    """At least the most time of W's whose M_W fit into ``rest``, ``left`` of each class."""
    most = _total(left, [one.values[1] for one in classes])
    smallest = min(one.sizes[1] for one in classes)
    longest = max(one.values[1] for one in classes)
    if smallest > 0 and longest > 0:
        most = np.minimum(most, np.floor(rest / smallest + 1e-9) * longest)
        most = np.minimum(most, rest * max(one.values[1] / one.sizes[1] for one in classes))
    return most


def _b_and_w_classes(stage: StageCosts) -> list[_Class]:
    return _classes(
        [
            ((b + r, w), (m_r, m_w))
            for b, r, w, m_r, m_w in zip(
                stage.t_b, stage.t_r, stage.t_w, stage.m_r, stage.m_w, strict=True
            )
        ]
    )


def _counts(classes: list[_Class], room: float, microbatches: int) -> list[Ints]:
    """How many microbatches of each class can wait for B: at least one a chunk."""
    counts = []
    for one in classes:
        most = _most(room, one.sizes[0], one.count * microbatches)
        counts.append(np.arange(one.count, max(one.count, most) + 1))
    return counts


def _total(counts: list[Ints], each: list[float]) -> Floats:
    """Sum of count x each over the classes, for every alternative."""
    total = np.zeros(len(counts[0]))
    for count, one in zip(counts, each, strict=True):
        total += count * one
    return total


def _classes(chunks: list[tuple[tuple[float, ...], tuple[float, ...]]]) -> list[_Class]:
    """One class for all chunks alike; all but the most common class merged into one."""
    kinds = sorted(set(chunks), key=lambda kind: (-chunks.count(kind), kind))
    common, others = kinds[0], kinds[1:]
    classes = [_Class(chunks.count(common), *common)]
    if others:
        classes.append(_merged([_Class(chunks.count(kind), *kind) for kind in others]))
    return classes


def _merged(classes: list[_Class]) -> _Class:
    """One class that is at least as good for a schedule as each of these."""
    return _Class(
        sum(one.count for one in classes),
        tuple(map(max, zip(*(one.values for one in classes), strict=True))),
        tuple(map(min, zip(*(one.sizes for one in classes), strict=True))),
    )


def _most(room: float, size: float, cap: int) -> int:
    """How many things of a size fit, at most ``cap``."""
    if size <= 0 or room / size >= cap:
        return cap
    return math.floor(room / size + 1e-9)


def _fit(room: Floats, size: float, cap: int) -> Ints:
    if size <= 0:
        return np.full(len(room), cap, dtype=np.int64)
    fitting = np.minimum(np.floor(room / size + 1e-9), cap)
    return np.maximum(fitting, 0).astype(np.int64)
