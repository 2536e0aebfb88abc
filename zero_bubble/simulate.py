"""When every pass of a schedule runs, and what that costs in time and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from zero_bubble.costs import Costs
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["Span", "Timeline", "simulate"]


@dataclass(frozen=True, slots=True)
class Span:
    """A pass with its times in ms."""

    what: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule with times: ``spans[stage]`` in the order they run."""

    schedule: Schedule
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]

    @property
    def cost(self) -> float:
        """Longest time from a stage's first start to its last end, in ms (paper, section 5.3).

        Stages need not start together: without a barrier at the end of an iteration, a stage that
        starts late also ends late, and goes on into the next.
        """
        return max((row[-1].end - row[0].start for row in self.spans if row), default=0.0)

    @property
    def work(self) -> tuple[float, ...]:
        """Time each stage computes, in ms."""
        return tuple(
            sum(self.duration(one.what, stage) for one in row)
            for stage, row in enumerate(self.spans)
        )

    def duration(self, what: Pass, stage: int) -> float:
        """Time of a pass, in ms: that of B and BW contains recomputation if no R does it."""
        time = self.costs.duration(what.kind, stage, what.chunk)
        if what.kind in (Kind.B, Kind.BW) and what.chunk not in self._recomputed[stage]:
            time += self.costs.recomputation(stage, what.chunk)
        return time

    @property
    def bubble_rate(self) -> float:
        """(cost - ideal) / cost; 0.1 is 10 %.

        The paper's ideal is m(T_F+T_B+T_W). Where stages differ it is the largest stage's work,
        the least that any order could cost.
        """
        return (self.cost - max(self.work)) / self.cost if self.cost else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Time each stage does not compute in an iteration of length ``cost``, in ms."""
        return tuple(self.cost - work for work in self.work)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Most memory each stage holds, in the unit of the costs (paper, section 3.1).

        F takes M_B at its start; B frees M_B - M_W and W frees M_W at their ends, BW frees M_B.
        With recomputation F takes M_R, and R, or B and BW without it, the rest of M_B.
        """
        return tuple(map(self._peak_memory, range(self.schedule.num_stages)))

    def _peak_memory(self, stage: int) -> float:
        m_b, m_w = self.costs.m_b[stage], self.costs.m_w[stage]
        m_r = [self.costs.kept(stage, chunk) for chunk in range(len(m_b))]
        recomputed = self._recomputed[stage]
        # Whole counts, not a running sum: a sum of fractions would drift with m.
        kept, whole, waiting = [0] * len(m_b), [0] * len(m_b), [0] * len(m_b)
        peak = 0.0
        for one in self.schedule.passes[stage]:
            chunk = one.chunk
            if one.kind is Kind.F:
                kept[chunk] += 1
            elif one.kind is Kind.R or (one.kind is not Kind.W and chunk not in recomputed):
                kept[chunk] -= 1
                whole[chunk] += 1
            table = zip(kept, m_r, whole, m_b, waiting, m_w, strict=True)
            peak = max(peak, sum(a * r + n * b + k * w for a, r, n, b, k, w in table))
            if one.kind in (Kind.B, Kind.BW):
                whole[chunk] -= 1
            if one.kind in (Kind.B, Kind.W):
                waiting[chunk] += 1 if one.kind is Kind.B else -1
        return peak

    @cached_property
    def _recomputed(self) -> tuple[frozenset[int], ...]:
        return self.schedule.chunks_with(Kind.R)

    @property
    def peak_weight_store(self) -> tuple[int, ...]:
        """Most (chunk, microbatch) entries that wait on a stage for W, counted after each B."""
        return tuple(map(self._peak_weight_store, range(self.schedule.num_stages)))

    def _peak_weight_store(self, stage: int) -> int:
        waiting = peak = 0
        for one in self.schedule.order(stage, (Kind.B, Kind.W)):
            waiting += 1 if one.kind is Kind.B else -1
            peak = max(peak, waiting)
        return peak


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run every stage's passes in order, each as soon as its input is there.

    A message takes `Costs.comm` after the pass that produced it ends, and does not hold up either
    stage's computation. Linear in the number of passes. ValueError if the costs do not fit the
    placement or add up to infinity, a pass is not of this schedule's chunks and microbatches, or
    the stages wait for each other (the error says on which pass, and for what).
    """
    costs.require(schedule.placement)
    timeline = Timeline(schedule, costs, _Simulation(schedule, costs).run())
    if not math.isfinite(timeline.cost):
        raise ValueError("the times of the passes add up to more than a number can hold")
    return timeline


@dataclass(frozen=True, slots=True)
class _Lane:
    """The passes of one kind of one chunk: what they take, and what they read and make.

    The lists hold when each microbatch's result was ready, None as long as it is not.
    """

    duration: float
    reads: list[float | None] | None
    delay: float
    """How long after the end of the pass that it reads from its input is there."""
    makes: list[float | None]
    source: tuple[Kind, int, int]
    """(kind, stage, chunk) that it reads from; its own for the model's first F, which does not."""


class _Simulation:
    """The state of one run: how far each stage has come, and when what it made was ready."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.costs = costs
        self.spans: list[list[Span]] = [[] for _ in schedule.passes]
        self.ends: dict[tuple[Kind, int, int], list[float | None]] = {
            (kind, stage, chunk): [None] * schedule.num_microbatches
            for kind in (Kind.F, Kind.B, Kind.W, Kind.R)
            for stage, held in enumerate(schedule.placement.positions)
            for chunk in range(len(held))
        }
        self.readers: list[set[int]] = [set() for _ in schedule.passes]
        recomputed = schedule.chunks_with(Kind.R)
        self.lanes: list[dict[Kind, list[_Lane]]] = [
            {
                kind: [self._lane(kind, stage, one, one in recomputed[stage]) for one in chunks]
                for kind in Kind
                if kind is not Kind.R or recomputed[stage]
            }
            for stage, chunks in enumerate(map(range, map(len, schedule.placement.positions)))
        ]

    def _lane(self, kind: Kind, stage: int, chunk: int, has_r: bool) -> _Lane:
        placement = self.schedule.placement
        before, after = placement.before(stage, chunk), placement.after(stage, chunk)
        source = kind, stage, chunk
        if kind is Kind.W:
            source = Kind.B, stage, chunk
        elif kind is Kind.R:
            source = Kind.F, stage, chunk
        elif kind is not Kind.F:
            source = (Kind.B, *after) if after else (Kind.F, stage, chunk)
        elif before:
            source = (Kind.F, *before)
        other = source[1]
        if other != stage:
            self.readers[other].add(stage)
        made = Kind.B if kind is Kind.BW else kind
        within = 0.0
        if kind in (Kind.B, Kind.BW) and not has_r:
            within = self.costs.recomputation(stage, chunk)
        return _Lane(
            self.costs.duration(kind, stage, chunk) + within,
            self.ends[source] if kind is not Kind.F or before else None,
            self.costs.comm(other, stage),
            self.ends[made, stage, chunk],
            source,
        )

    def run(self) -> tuple[tuple[Span, ...], ...]:
        # A stage is looked at again only when one that it reads from has gone on.
        pending = list(range(self.schedule.num_stages))
        while pending:
            stage = pending.pop()
            if self._advance(stage):
                pending += self.readers[stage].difference(pending)
        for stage, row in enumerate(self.schedule.passes):
            if len(self.spans[stage]) < len(row):
                self._raise_deadlock()
        return tuple(map(tuple, self.spans))

    def _advance(self, stage: int) -> bool:
        """Run the stage until a pass has to wait; whether it went on at all."""
        spans, row, lanes = self.spans[stage], self.schedule.passes[stage], self.lanes[stage]
        chunks, microbatches = len(lanes[Kind.F]), self.schedule.num_microbatches
        begun = len(spans)
        now = spans[-1].end if spans else 0.0
        for index in range(begun, len(row)):
            what = row[index]
            if not (0 <= what.chunk < chunks and 0 <= what.microbatch < microbatches):
                raise ValueError(
                    f"stage {stage} has the pass {what}: expected microbatches 0.."
                    f"{microbatches - 1} and chunks 0..{chunks - 1}"
                )
            lane = lanes[what.kind][what.chunk]
            start = now
            if lane.reads is not None:
                end = lane.reads[what.microbatch]
                if end is None:
                    break
                start = max(now, end + lane.delay)
            now = start + lane.duration
            spans.append(Span(what, start, now))
            lane.makes[what.microbatch] = now
        return len(spans) > begun

    def _raise_deadlock(self) -> None:
        waits = []
        for stage, row in enumerate(self.schedule.passes):
            if len(self.spans[stage]) == len(row):
                continue
            what = row[len(self.spans[stage])]
            kind, other, chunk = self.lanes[stage][what.kind][what.chunk].source
            wanted = Pass(kind, what.microbatch, chunk)
            waits.append(f"stage {stage} waits at {what} for {wanted} of stage {other}")
        raise ValueError("the schedule deadlocks: " + "; ".join(waits))
