"""Forwards only: what an evaluation runs, for any placement."""

from __future__ import annotations

from heapq import heappop, heappush

from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["forwards"]


def forwards(placement: Placement, microbatches: int) -> Schedule:
    """A schedule of F's only, for evaluation, on any placement.

    A stage runs, of what has arrived, the F that is deepest in the model, as if all F's took the
    same time and messages none; it never waits while it could run one. Each chunk takes the
    microbatches in ascending order.

    In units of that time, V's take 2m + 2p-2 for p >= 2 and interleaved placements with v chunks a
    stage take mv + p-1 if p divides m: both are the least possible. For other m the latter take at
    most mv + pv-1. ValueError for less than one microbatch.
    """
    if microbatches < 1:
        raise ValueError(f"at least 1 microbatch is needed, not {microbatches}")
    last = placement.num_positions - 1
    owners = [placement.owner(position) for position in range(last + 1)]
    rows: list[list[Pass]] = [[] for _ in range(placement.num_stages)]
    # By stage: (positions behind it, microbatch) of what has arrived, a heap.
    ready: list[list[tuple[int, int]]] = [[] for _ in rows]
    active = set[int]()  # Stages with something to run.
    arrived = [(0, 0)]  # (position, microbatch)
    while arrived or active:  # A step is the time of an F.
        for position, microbatch in arrived:
            stage = owners[position][0]
            heappush(ready[stage], (last - position, microbatch))
            active.add(stage)
        arrived = []
        for stage in tuple(active):
            behind, microbatch = heappop(ready[stage])
            if not ready[stage]:
                active.remove(stage)
            position = last - behind
            rows[stage].append(Pass(Kind.F, microbatch, owners[position][1]))
            if position < last:
                arrived.append((position + 1, microbatch))
            if position == 0 and microbatch + 1 < microbatches:
                arrived.append((0, microbatch + 1))
    return Schedule(placement, microbatches, tuple(map(tuple, rows)), name="forwards")
