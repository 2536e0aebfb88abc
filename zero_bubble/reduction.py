"""Reduction of gradients over the data-parallel group: how much of it computation does not hide.

A chunk's gradients lie in buckets, the layers in the order of the backward pass. A bucket is
reduced once its last gradient is there; the reductions of a stage follow one another on one
network. So most of the reduction comes after the last W, unless W's are ordered by parameter
(`zero_bubble.tail`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zero_bubble.costs import Table
from zero_bubble.lower import lower
from zero_bubble.period import period_behind_barrier, period_with_run_ahead
from zero_bubble.program_times import RunSpan, time_program
from zero_bubble.schedule import Kind
from zero_bubble.simulate import Timeline
from zero_bubble.tail import reorder_tail

__all__ = ["Reduced", "exposed_reduction", "reduction_times"]


@dataclass(frozen=True, slots=True)
class Reduced:
    """When stages have computed all passes of an iteration, and when their gradients are reduced.

    Times in ms since the iteration's first pass.
    """

    timeline: Timeline
    """The schedule as it is, without reductions."""
    ends: tuple[float, ...]
    """When each stage's last bucket is reduced, or its last pass ends, whichever is later."""

    @property
    def exposed(self) -> tuple[float, ...]:
        """How much later each stage is ready to step than its last pass ends in the schedule as it
        is, in ms."""
        computed = (row[-1].end if row else 0.0 for row in self.timeline.spans)
        return tuple(max(0.0, end - own) for end, own in zip(self.ends, computed, strict=True))

    @property
    def behind_barrier(self) -> float:
        """How much longer an iteration takes whose step waits for all stages, in ms."""
        schedule, costs = self.timeline.schedule, self.timeline.costs
        return max(self.ends) - period_behind_barrier(schedule, costs)

    @property
    def with_run_ahead(self) -> float:
        """How much longer an iteration takes with post-validation, in ms: there a stage steps when
        its own gradients are reduced (`zero_bubble.period`)."""
        schedule, costs = self.timeline.schedule, self.timeline.costs
        longer = period_with_run_ahead(schedule, costs, reduction=self.exposed)
        return longer - period_with_run_ahead(schedule, costs)


def exposed_reduction(timeline: Timeline, buckets: int, *, reordered: bool) -> Reduced:
    """When the reductions of a schedule's iteration end.

    Args:
        timeline: whose costs say how long reductions take (``t_reduce``).
        buckets: into how many equal ones the gradients of each chunk are cut.
        reordered: W's at the tail run in as many shares, ordered by parameter; else each runs
            whole, and the last one completes one bucket after the other.

    Raises:
        ValueError: costs without ``t_reduce``, or fewer than one bucket.
    """
    times = timeline.costs.t_reduce
    if times is None:
        raise ValueError("the costs do not say how long the reduction of gradients takes: t_reduce")
    if buckets < 1:
        raise ValueError(f"buckets must be at least 1, not {buckets}")
    program = lower(timeline.schedule)
    if reordered:
        program = reorder_tail(program, buckets)
    rows = time_program(program, timeline.costs)
    ends = (_end(row, times[stage], buckets) for stage, row in enumerate(rows))
    return Reduced(timeline, tuple(ends))


def reduction_times(
    gradient_bytes: Table, *, ranks: int, bandwidth: float, scatter: bool = False
) -> Table:
    """How long reductions take on a ring, in ms: the ``t_reduce`` of costs.

    Each rank sends 2 (n - 1) / n of the bytes in an all-reduce, and half of it in the
    reduce-scatter of the distributed optimizer.

    Args:
        gradient_bytes: of each chunk.
        ranks: n, the size of the data-parallel group.
        bandwidth: bytes a second that a rank sends.

    Raises:
        ValueError: less than one rank, or no bandwidth.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    if not bandwidth > 0:
        raise ValueError(f"bandwidth must be above 0 bytes a second, not {bandwidth}")
    rounds = 1 if scatter else 2
    share = rounds * (ranks - 1) / ranks * 1e3 / bandwidth
    return tuple(tuple(size * share for size in row) for row in gradient_bytes)


def _end(row: Sequence[RunSpan], times: Sequence[float], buckets: int) -> float:
    """When a stage's last bucket is reduced, or its last pass ends."""
    now = 0.0
    for ready, chunk in sorted(_ready(row, buckets)):
        now = max(now, ready) + times[chunk] / buckets
    return max(now, row[-1].end if row else 0.0)


def _ready(row: Sequence[RunSpan], buckets: int) -> Iterator[tuple[float, int]]:
    """When each bucket has its last gradient, and its chunk."""
    ready: dict[tuple[int, int], float] = defaultdict(float)
    for one in row:
        chunk, parts = one.run.what.chunk, one.run.parts
        if one.run.what.kind not in (Kind.W, Kind.BW):
            continue
        for bucket in range(buckets) if parts == 1 else (one.run.part,):
            share = (bucket + 1) / buckets if parts == 1 else 1.0
            end = one.start + share * (one.end - one.start)
            ready[chunk, bucket] = max(ready[chunk, bucket], end)
    return ((end, chunk) for (chunk, _), end in ready.items())
