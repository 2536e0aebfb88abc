"""What one stage's warm-up and cool-down cost, and what they do to the stages before it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from zero_bubble.search.bounds.holding import backlogs, most_forward_time, most_weight_time
from zero_bubble.search.bounds.paths import Paths, StageCosts

__all__ = ["StageBound", "beyond", "stage_bound"]


@dataclass(frozen=True, slots=True)
class StageBound:
    """A bound that comes from one stage, in ms: cost >= work + warm_up + cool_down."""

    work: float
    warm_up: float
    """Idle time before the first B."""
    cool_down: float
    """Idle time after the start of the last F, or what the stages before need beyond it."""
    coupled: bool
    """Whether the cool-down is that of another stage, which waits for this one's last B."""

    @property
    def cost(self) -> float:
        return self.work + self.warm_up + self.cool_down


def stage_bound(paths: Paths, stage: StageCosts, microbatches: int, after: float) -> StageBound:
    """Bound from the stage's warm-up and cool-down; ``after`` is what `beyond` says of it.

    Say t is the start of the stage's first pass, s the start of its last F, and u the end of its
    last B. An R counts as part of its B, but that it may run before the first B.

    *Warm-up.* The first B comes `start_b[last] - start_f[first]` after t or later, and only F's and
    R's run before it, no more than memory holds. What remains is idle.

    *Cool-down.* s is the last F of the last chunk, so that u - s is at least the way from there to
    the end of B on the first chunk. Let X be the B's and V the W's left at s, as times, U <= V the
    W's that run before u. Then s - t >= work + warm_up - T_F - X - V if the first B runs before s,
    and u - s >= max(way, T_F + X + U). Two things end after u: the V - U of this stage, and, on any
    stage k whose first chunk is earlier in the model, B and W of the last microbatch. Stage k also
    starts before t, by the way of F from k to here. With R the sum of both ways,
    cost >= (u - t) + max(R, V - U); its minimum over U gives
    idle time >= warm_up + max(way - T_F - X, 0) + R - V. The smallest over all X and V that memory
    holds is what counts. If all W's take the same time, U is a multiple of it, which gives more.

    *All F's first.* If memory holds all microbatches, the first B may also run after s. Then
    nothing but F's and R's runs before it: u - t >= (all F's) - T_F + way, and all B's come after
    max(all F's, way to the first B).

    *Last B.* It holds M_B, and what remains of memory M_W for each of the W's held back until then:
    say that is H ms. All else has run by u, so that idle time >= warm_up + R - T_W - H. Where all
    is kept until B, the cool-down says at least as much; where M_W is more than M_R, it may not.
    """
    found = _f_before_b(paths, stage, microbatches, after)
    if stage.m_r == stage.m_b:
        return found
    held_back = most_weight_time(stage, microbatches, besides=stage.m_b[0]) + stage.t_w[0]
    idle = _idle(after - held_back, after)
    last_b = replace(found, warm_up=_warm_up(paths, stage, microbatches), cool_down=idle)
    return max(found, replace(last_b, coupled=idle > 0), key=lambda one: one.cost)


def _f_before_b(paths: Paths, stage: StageCosts, microbatches: int, after: float) -> StageBound:
    """From warm-up and cool-down, with the first B before the last F or after it."""
    first, last = stage.positions[0], stage.positions[-1]
    forwards = microbatches * sum(stage.t_f)
    backwards, weights = microbatches * sum(stage.t_b), microbatches * sum(stage.t_w)
    again = microbatches * sum(stage.t_r)
    work = microbatches * (sum(stage.t_f) + sum(stage.t_b) + sum(stage.t_w)) + again
    warm_up = _warm_up(paths, stage, microbatches)
    way = paths.end_b[first] - paths.start_f[last]
    own = stage.t_w[0]
    cool_down = _cool_down(stage, microbatches, way, after)
    coupled = after > own and cool_down > _cool_down(stage, microbatches, way, own)
    found = StageBound(work, warm_up, cool_down, coupled)
    if microbatches * sum(stage.m_r) > stage.room:
        return found
    ready = max(forwards, paths.start_b[last] - paths.start_f[first])
    first_all = max(
        forwards - stage.t_f[-1] + way + after,
        ready + backwards + after,
        forwards + again + backwards + after,
        ready + backwards + weights,
        work,
    )
    if first_all >= found.cost:
        return found
    idle = max(0.0, ready - forwards - again)
    return StageBound(work, idle, first_all - work - idle, after > own)


def beyond(paths: Paths, stage: StageCosts, stages: list[StageCosts]) -> float:
    """Least by which some stage's cost exceeds the time from this one's first F to its last B.

    Any of the ``stages`` whose first chunk is not after this stage's first chunk starts as much
    earlier as F takes from there to here, and ends as much later as B takes back, and then a W.
    In ms.
    """
    here = stage.positions[0]
    return max(
        paths.start_f[here] - paths.start_f[first] + paths.end_w[first] - paths.end_b[here]
        for first in (one.positions[0] for one in stages)
        if first <= here
    )


def _warm_up(paths: Paths, stage: StageCosts, microbatches: int) -> float:
    """Idle time before the stage's first B, in ms.

    Until a microbatch's F can reach a later chunk of the stage, only F's of the earlier chunks run,
    and their R's.
    """
    start = paths.start_f[stage.positions[0]]
    reached = [paths.start_f[at] for at in stage.positions[1:]] + [
        paths.start_b[stage.positions[-1]]
    ]
    idle = max(
        time - start - most_forward_time(stage, chunks, microbatches)
        for chunks, time in enumerate(reached, 1)
    )
    return _idle(idle, reached[-1])


def _cool_down(stage: StageCosts, microbatches: int, way: float, after: float) -> float:
    """Least idle time from the last F's start on, in ms, over all that memory can hold then."""
    left = backlogs(stage, microbatches)
    missing = np.maximum(way - stage.t_f[-1] - left.t_b, 0.0)
    unit = stage.t_w[0]
    if unit <= 0 or any(time != unit for time in stage.t_w):
        return _idle(float((missing + after - left.t_w).min()), after)
    # Whole W's before the last B: as many as fit into the wait, or one more.
    least = np.inf
    whole = np.floor(missing / unit + 1e-9)
    for count in (whole, whole + 1):
        early = np.minimum(count * unit, left.t_w)
        span = np.maximum(missing, early)
        idle = np.maximum(span + after - left.t_w, span - early)
        least = min(least, float(idle.min()))
    return _idle(least, after)


def _idle(time: float, scale: float) -> float:
    """No idle time where there is only rounding."""
    return time if time > 1e-9 * scale else 0.0
