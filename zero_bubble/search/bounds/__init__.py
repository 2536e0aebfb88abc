"""Lower bounds: what no schedule of a problem can cost less than.

All bounds hold for any order of F's, B's and W's and any start times, also later than necessary:
chunks may take turns in any way, and microbatches need not ascend. With recomputation they hold
wherever R's run, and for a B that recomputes itself, which is an R right before it. The fused
backward is not covered where it takes less than B and W.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from zero_bubble.search.bounds.occupancy import occupancy_bound
from zero_bubble.search.bounds.paths import Paths, StageCosts
from zero_bubble.search.bounds.stage import StageBound, beyond, stage_bound
from zero_bubble.search.bounds.turnover import path_bound, turnover_bound
from zero_bubble.search.problem import Problem

__all__ = ["Bound", "Reason", "StageBound", "lower_bound", "stage_bounds"]


class Reason(StrEnum):
    """What a bound comes from, the last thing that adds to it."""

    WORK = "work"
    """The busiest stage never waits."""
    WARM_UP = "warm-up"
    """A stage's memory is full of F's before its first B can run."""
    COOL_DOWN = "cool-down"
    """A stage's memory holds too little work to bridge the way of its last microbatch."""
    COUPLING = "coupling"
    """A stage's last B comes so late that a stage before it has to wait for it."""
    OCCUPANCY = "memory x time"
    """The microbatches need their memory for so long that more would not fit."""
    TURNOVER = "turnover"
    """Memory holds few microbatches, and the next has to wait until one has come back."""
    PATH = "path"
    """Few microbatches: the way through the pipeline and back is most of the cost."""


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule costs less than ``cost`` ms."""

    cost: float
    stage: int
    """Stage that the bound comes from."""
    reason: Reason
    warm_up: float = 0.0
    """Idle time in the warm-up that ``cost`` contains, in ms."""
    cool_down: float = 0.0
    """Idle time in the cool-down that ``cost`` contains, in ms."""


def lower_bound(problem: Problem) -> Bound:
    """The largest of all bounds of all stages."""
    return max(_bounds(problem), key=lambda bound: bound.cost)


def stage_bounds(problem: Problem) -> list[StageBound]:
    """Work, warm-up and cool-down of every stage."""
    paths, stages = Paths.of(problem), _stages(problem)
    return [
        stage_bound(paths, one, problem.num_microbatches, beyond(paths, one, stages))
        for one in stages
    ]


def _bounds(problem: Problem) -> Iterator[Bound]:
    paths, stages = Paths.of(problem), _stages(problem)
    microbatches, slowest = problem.num_microbatches, _slowest(problem)
    for index, stage in enumerate(stages):
        after = beyond(paths, stage, stages)
        found = stage_bound(paths, stage, microbatches, after)
        yield Bound(found.cost, index, _reason(found), found.warm_up, found.cool_down)
        yield Bound(occupancy_bound(paths, stage, microbatches, after), index, Reason.OCCUPANCY)
        yield Bound(turnover_bound(paths, stage, microbatches, after), index, Reason.TURNOVER)
        whole = path_bound(paths, stage.positions[0], slowest, microbatches)
        yield Bound(whole, index, Reason.PATH)


def _stages(problem: Problem) -> list[StageCosts]:
    return [StageCosts.of(problem, stage) for stage in range(problem.num_stages)]


def _slowest(problem: Problem) -> list[float]:
    """The longest F or B on each position or a later one, in ms."""
    arrays = problem.arrays()
    longest = np.maximum(arrays.t_f, arrays.t_b)
    return [float(time) for time in np.maximum.accumulate(longest[::-1])[::-1]]


def _reason(found: StageBound) -> Reason:
    if found.cool_down > 0:
        return Reason.COUPLING if found.coupled else Reason.COOL_DOWN
    return Reason.WARM_UP if found.warm_up > 0 else Reason.WORK
