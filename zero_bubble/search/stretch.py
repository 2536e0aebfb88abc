"""From a schedule for few microbatches to one for many: its steady state, repeated."""

from __future__ import annotations

import numpy as np

from zero_bubble.search.orders import peak_memory, run_rows
from zero_bubble.search.problem import Arrays, Ints

__all__ = ["stretch"]

_LONGEST_BLOCK = 8
_TRIED = 30
_FINISHED = 3


def stretch(arrays: Arrays, few: int, rows: Ints, many: int) -> tuple[float, Ints] | None:
    """The cheapest way to repeat part of the order for ``few`` microbatches until it has ``many``.

    A block is what every stage runs between the first chunk's F's of two microbatches. If it holds
    as many passes of each kind and chunk as microbatches, what is in flight at its end is what was
    at its beginning, shifted, and it can be repeated; where it does not quite, passes are dropped
    or added. Warm-up and cool-down stay as they are, so that the bubble, in ms, is that of the few
    if the block has none. ``rows`` must run microbatches in order. None if no block can be repeated
    within the memory limits; else the cost in ms and the rows.
    """
    work = max(
        (arrays.t_f + arrays.t_b + arrays.t_w + arrays.t_r)[arrays.stage == stage].sum()
        for stage in range(len(rows))
    )
    # What is above the work does not grow with a block that has no bubble.
    bubble = _cost(arrays, few, rows) - few * work
    tried = []
    for first, length in _blocks(arrays, few, rows, many):
        # Two repetitions show what a block costs.
        longer = few + min(2 * length, many - few)
        cost = _cost(arrays, longer, _repeat(arrays, few, rows, longer, first, length))
        if cost >= 0:
            tried.append((cost - longer * work, first, length))
            if tried[-1][0] <= bubble + 1e-9 * cost:
                break
    best: tuple[float, Ints] | None = None
    for _, first, length in sorted(tried)[:_FINISHED]:
        stretched = _repeat(arrays, few, rows, many, first, length)
        cost = _cost(arrays, many, stretched)
        if cost >= 0 and (best is None or cost < best[0]):
            best = cost, stretched
            if cost - many * work <= bubble + 1e-9 * cost:
                break
    return best


def _cost(arrays: Arrays, microbatches: int, rows: Ints) -> float:
    """In ms; -1 if stages deadlock or do not keep their memory limits."""
    peak = np.empty(len(rows))
    peak_memory(arrays, microbatches, rows, peak)
    if np.any(peak > arrays.limit * (1 + 1e-9)):
        return -1.0
    codes = arrays.kinds * len(arrays.stage) * microbatches
    return run_rows(arrays, microbatches, rows, np.empty(codes), np.empty(codes))


def _blocks(arrays: Arrays, few: int, rows: Ints, many: int) -> list[tuple[int, int]]:
    """(first microbatch, length) of blocks that need few changes, best first."""
    positions = len(arrays.stage)
    counts = []
    for stage, row in enumerate(rows):
        of_type = row[row >= 0] // few
        held = arrays.held[stage][arrays.held[stage] >= 0]
        types = [kind * positions + position for kind in range(arrays.kinds) for position in held]
        before = np.stack([np.concatenate([[0], np.cumsum(of_type == one)]) for one in types])
        counts.append(before[:, _cuts(arrays, few, row, stage)])
    # before[type, k]: passes of a stage's type before the first chunk's F of microbatch k.
    before = np.concatenate(counts)
    found = []
    for length in range(1, min(_LONGEST_BLOCK, few - 1) + 1):
        if (many - few) % length == 0:
            within = before[:, length:] - before[:, :-length]
            changes = np.abs(within - length).sum(axis=0)
            for first in range(within.shape[1]):
                off_centre = abs(2 * first + length - few)
                found.append((int(changes[first]) / length, length, off_centre, first))
    return [(first, length) for _, length, _, first in sorted(found)[:_TRIED]]


def _cuts(arrays: Arrays, few: int, row: Ints, stage: int) -> Ints:
    """Where in the row the first chunk's F of each microbatch stands."""
    first = arrays.held[stage, 0] * few
    where = np.flatnonzero((row >= first) & (row < first + few))
    return where[np.argsort(row[where])]


def _repeat(arrays: Arrays, few: int, rows: Ints, many: int, first: int, length: int) -> Ints:
    times = (many - few) // length
    more = arrays.kinds * arrays.held.shape[1] * (many - few)
    longer = np.full((len(rows), rows.shape[1] + more), -1)
    for stage, row in enumerate(rows):
        codes = row[row >= 0]
        cuts = _cuts(arrays, few, row, stage)
        end = cuts[first + length]
        block = _complete(codes[cuts[first] : end] // few, np.unique(codes // few), length)
        types = np.concatenate([codes[:end] // few, np.tile(block, times), codes[end:] // few])
        # Microbatches of each type ascend.
        stretched = np.empty_like(types)
        for one in np.unique(types):
            stretched[types == one] = one * many + np.arange(many)
        longer[stage, : len(stretched)] = stretched
    return longer


def _complete(block: Ints, types: Ints, length: int) -> Ints:
    """The block with each type exactly ``length`` times: surplus dropped, missing ones last."""
    kept = np.ones(len(block), np.bool_)
    missing = []
    for one in types:
        where = np.flatnonzero(block == one)
        kept[where[length:]] = False
        missing += [one] * (length - len(where))
    return np.concatenate([block[kept], np.array(missing, dtype=block.dtype)])
