"""Improving a template: small changes of its lags and knobs, kept when the squeeze gets shorter."""

from __future__ import annotations

import numpy as np

from zero_bubble.search.compiled import compiled
from zero_bubble.search.problem import Arrays, Floats, Ints
from zero_bubble.search.squeeze import Knobs, fill_template, run_squeeze

__all__ = ["assess", "descend", "lag_keys", "sweep"]

FAILED = 1e300
"""Cost of a template that does not fit its limits, or deadlocks."""

_NAN = np.nan
# Rows: patience, gap, lead, spare, hold, late_patience, late_gap, late_lead, late_order, ahead.
_GRID = np.array(
    [
        [0.0, 0.25, 0.5, 0.75, 1.0, _NAN],
        [0.01, 0.3, 0.6, 0.8, 1.0, _NAN],
        [1e9, 0.0, 1.0, 2.0, 4.0, _NAN],
        [0.0, 0.5, 0.8, 1.0, 1.2, 99.0],
        [1e9, 0.0, 2.0, 5.0, _NAN, _NAN],
        [0.0, 0.25, 0.5, 0.75, 1.0, _NAN],
        [0.01, 0.3, 0.6, 0.8, 1.0, _NAN],
        [1e9, 0.0, 1.0, 2.0, 4.0, _NAN],
        [0.0, 1.0, 2.0, 3.0, 4.0, _NAN],
        [1e9, 0.0, 1.0, 2.0, 3.0, _NAN],
    ]
)
# Knobs changed together: the early ones with their late twins, then each alone. The last is R's.
_TOGETHER = np.array(
    [
        *([0, 5], [1, 6], [2, 7], [4, 4], [3, 3], [5, 5], [8, 8], [7, 7], [6, 6]),
        *([0, 0], [1, 1], [2, 2], [9, 9]),
    ]
)


@compiled
def lag_keys(base: Floats, lags: Floats) -> Floats:
    """``keys[stage, type, microbatch] = base[type, microbatch] + lags[stage, type]``."""
    stages, types = lags.shape
    microbatches = base.shape[1]
    keys = np.empty((stages, types, microbatches))
    for stage in range(stages):
        for which in range(types):
            for one in range(microbatches):
                keys[stage, which, one] = base[which, one] + lags[stage, which]
    return keys


@compiled
def assess(arrays: Arrays, base: Floats, lags: Floats, knobs: Floats, rows: Ints) -> float:
    """What the template of these lags costs when squeezed with these knobs; fills ``rows``."""
    stages, types = lags.shape
    microbatches = base.shape[1]
    place = np.empty((stages, types, microbatches), np.int64)
    flushed = np.empty((stages, types * microbatches))
    if not fill_template(arrays, lag_keys(base, lags), place, flushed):
        return FAILED
    settings = Knobs(
        knobs[0],
        knobs[1],
        knobs[2],
        knobs[3],
        knobs[4],
        knobs[5],
        knobs[6],
        knobs[7],
        knobs[8],
        knobs[9],
    )
    cost = run_squeeze(arrays, microbatches, place, flushed, settings, rows)
    return cost if cost >= 0 else FAILED


@compiled
def sweep(
    arrays: Arrays, base: Floats, lags: Floats, settings: Floats, costs: Floats, rows: Ints
) -> None:
    """Fill ``costs[k]`` with the cost under each of the ``settings[k]`` of knobs."""
    for index in range(len(settings)):
        costs[index] = assess(arrays, base, lags, settings[index], rows)


@compiled
def descend(
    arrays: Arrays,
    base: Floats,
    lags: Floats,
    knobs: Floats,
    row_sets: Floats,
    step: float,
    falling: bool,
    target: float,
    budget: int,
    rows: Ints,
) -> float:
    """Change lags and knobs in place as long as the squeeze gets shorter; the cost.

    A move adds one or two steps to the lags of a block of stages, for a set of types
    (``row_sets[k, type]`` is 1 for those of set k), or changes a knob or two. ``falling`` keeps
    lags from rising along the pipeline, as a linear placement needs. Ends after
    ``budget`` squeezes, at ``target`` or when no move helps. ``rows`` is scratch.
    """
    stages, types = lags.shape
    cost = assess(arrays, base, lags, knobs, rows)
    used = 1
    trial = lags.copy()
    other = knobs.copy()
    enough = target * (1 + 1e-9)
    widths = np.array([stages, max(1, stages // 2), max(1, stages // 4), 2, 1])
    while used < budget and cost > enough:
        before = cost
        for pair in range(len(_TOGETHER) - (arrays.kinds == 3)):
            first, second = _TOGETHER[pair]
            for value in range(_GRID.shape[1]):
                wanted = _GRID[first, value]
                if np.isnan(wanted) or used >= budget or cost <= enough:
                    break
                if knobs[first] == wanted and knobs[second] == wanted:
                    continue
                other[:] = knobs
                other[first] = wanted
                other[second] = wanted
                found = assess(arrays, base, lags, other, rows)
                used += 1
                if found < cost * (1 - 1e-12):
                    cost = found
                    knobs[:] = other
        for which in range(len(row_sets)):
            for width in widths:
                for begin in range(0, stages, max(1, width // 2 if falling else width)):
                    for move in range(4):
                        if used >= budget or cost <= enough:
                            break
                        trial[:] = lags
                        change = step * (1 + move // 2) * (1 - 2 * (move % 2))
                        for row in range(types):
                            if row_sets[which, row] > 0:
                                trial[begin : begin + width, row] += change
                                if falling:
                                    for stage in range(stages - 2, -1, -1):
                                        later = trial[stage + 1, row]
                                        trial[stage, row] = max(trial[stage, row], later)
                        found = assess(arrays, base, trial, knobs, rows)
                        used += 1
                        if found < cost * (1 - 1e-12):
                            cost = found
                            lags[:] = trial
        if cost >= before:
            break
    return cost
