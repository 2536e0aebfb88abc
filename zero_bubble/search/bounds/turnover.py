"""Bounds from the way of single microbatches: how fast they can follow one another."""

from __future__ import annotations

import math

import numpy as np

from zero_bubble.search.bounds.paths import Paths, StageCosts
from zero_bubble.search.compiled import compiled
from zero_bubble.search.problem import Ints

__all__ = ["path_bound", "turnover_bound"]


def path_bound(paths: Paths, first: int, slowest: list[float], microbatches: int) -> float:
    """Least time of the stage with first chunk ``first``: one way, and the slowest pass m times.

    Its last B ends no earlier than the whole way after its first F. At any pass of the way all m
    microbatches follow one another, so that this way is longer by (m - 1) times that pass. W of
    the last microbatch comes on top. ``slowest[k]`` is the longest T_F or T_B of a position from k
    on.
    """
    return paths.end_w[first] - paths.start_f[first] + (microbatches - 1) * slowest[first]


def turnover_bound(paths: Paths, stage: StageCosts, microbatches: int, after: float) -> float:
    """Least time if memory lets only few microbatches be between F and B at a time, in ms.

    Take one chunk, its F's sorted by start. When the k-th starts, say n of the first k are not done
    with B, itself among them, and w wait for W only. Each of the n holds M_B (what F takes of it,
    M_R, with recomputation) of this chunk and of the stage's earlier ones, since their B's come
    later, so that n (sum of M_B) + w M_W <= limit. Of the k, k - n are done with B, so at least one
    of them is the (k-n)-th or a later one, and the k-th F starts no earlier than the way from F to
    the end of B after the (k-n)-th. Likewise k - n - w are done with W, which gives way + T_W after
    the (k-n-w)-th. The smallest over all n that fit bounds each start from those before it. One
    more way follows the last start, and around it the ways to and from the stage's first chunk; for
    ``after`` see `beyond`.
    """
    first = stage.positions[0]
    whole = paths.end_b[first] - paths.start_f[first]
    best = 0.0
    for one, at in enumerate(stage.positions):
        waiting = _waiting_for_w(stage, one, microbatches)
        if len(waiting) >= microbatches:
            continue
        way = paths.end_b[at] - paths.start_f[at]
        last = _last_start(microbatches, waiting, stage.t_f[one], way, stage.t_w[one])
        best = max(best, last + whole + after)
    return best


def _waiting_for_w(stage: StageCosts, one: int, microbatches: int) -> Ints:
    """Entry n - 1: how many of a chunk can wait for W while n others wait for B."""
    size, m_w = sum(stage.m_r[: one + 1]), stage.m_w[one]
    if size <= 0 or stage.room / size >= microbatches:
        return np.full(microbatches, microbatches, dtype=np.int64)
    most = max(1, math.floor(stage.room / size + 1e-9))
    rest = np.maximum(stage.room - size * np.arange(1, most + 1), 0.0)
    if m_w <= 0:
        return np.full(most, microbatches, dtype=np.int64)
    fitting = np.minimum(np.floor(rest / m_w + 1e-9), microbatches)
    return np.asarray(fitting, dtype=np.int64)


@compiled
def _last_start(microbatches: int, waiting: Ints, t_f: float, way: float, t_w: float) -> float:
    """Least time from the first to the last F of a chunk."""
    start = np.zeros(microbatches)
    for k in range(1, microbatches):
        least = np.inf
        for n in range(1, len(waiting) + 1):
            earliest = 0.0
            if k >= n:
                earliest = start[k - n] + way
            if k >= n + waiting[n - 1]:
                earliest = max(earliest, start[k - n - waiting[n - 1]] + way + t_w)
            least = min(least, earliest)
        start[k] = max(start[k - 1] + t_f, least)
    return float(start[microbatches - 1])
