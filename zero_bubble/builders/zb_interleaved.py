"""Interleaved 1F1B with the backward split: W's fill what its forwards and backwards leave idle."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from zero_bubble.builders.interleaved import interleaved_1f1b
from zero_bubble.builders.zb_h1 import zb_h1
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["zb_interleaved"]


def zb_interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """What ZB-H1 is to 1F1B, for interleaved 1F1B: no more memory, and most of the bubble gone.

    F's and B's in the order of `interleaved_1f1b`. Stage s starts with 2s forwards less than stage
    0, so it may hold 2s W's back; with M_W <= M_B that is at most the peak memory of interleaved
    1F1B, (p + (p-1)/v) M_B if p divides m. A W runs when more than 2s wait, and otherwise where the
    stage would be idle if all passes took the same time and messages none. One chunk is ZB-H1.

    With T_F = T_B = T_W = T, free messages, v >= 2 chunks and p dividing m, the bubble is
    (p-4)T/v for m >= 2p (0 for p <= 4) and (p-1)T/v for m = p, against 3(p-1)T/v of interleaved
    1F1B and (p-1)T of ZB-H1. From the first start to the last end of all stages, there are
    (p-1)T/v beside the work for every m >= p. ValueError for less than one stage, microbatch or
    chunk.
    """
    if chunks == 1:
        return replace(zb_h1(stages, microbatches), name="zb-interleaved")
    fused = interleaved_1f1b(stages, microbatches, chunks)
    placement = fused.placement
    here = [
        _Stage(held, deque(map(_without_w, row)), lag=2 * number)
        for number, (held, row) in enumerate(zip(placement.positions, fused.passes, strict=True))
    ]
    last = placement.num_positions - 1
    # By position: the microbatches whose input or gradient is there. They come in order.
    arrived = {Kind.F: [0] * (last + 1), Kind.B: [0] * (last + 1)}
    arrived[Kind.F][0] = microbatches
    while any(stage.queue or stage.waiting for stage in here):
        # What a step makes arrives after it, so all stages choose first.
        for kind, position in [ran for stage in here if (ran := stage.step(arrived))]:
            if kind is Kind.F and position < last:
                arrived[Kind.F][position + 1] += 1
            elif kind is Kind.F:
                arrived[Kind.B][last] += 1
            elif position > 0:
                arrived[Kind.B][position - 1] += 1
    rows = tuple(tuple(stage.row) for stage in here)
    return Schedule(placement, microbatches, rows, name="zb-interleaved")


@dataclass(slots=True)
class _Stage:
    """One stage, step by step; a step is the time of any pass."""

    positions: tuple[int, ...]
    """By chunk."""
    queue: deque[Pass]
    """F's and B's to come, in order."""
    lag: int
    """How many W's may wait when an F or B starts."""
    waiting: deque[Pass] = field(default_factory=deque)
    """W's whose B has run."""
    row: list[Pass] = field(default_factory=list)
    """What has run."""

    def step(self, arrived: dict[Kind, list[int]]) -> tuple[Kind, int] | None:
        """Run one pass, if there is one to run; the kind and position of an F or B."""
        if self.queue and len(self.waiting) <= self.lag:
            one = self.queue[0]
            position = self.positions[one.chunk]
            if one.microbatch < arrived[one.kind][position]:
                self.row.append(self.queue.popleft())
                if one.kind is Kind.B:
                    self.waiting.append(Pass(Kind.W, one.microbatch, one.chunk))
                return one.kind, position
        if self.waiting:
            self.row.append(self.waiting.popleft())
        return None


def _without_w(one: Pass) -> Pass:
    return Pass(Kind.B, one.microbatch, one.chunk) if one.kind is Kind.BW else one
