"""One iteration of one pipeline as it was measured, and what the simulator predicts for it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.simulate import Span, Timeline, simulate
from zero_bubble.trace.memory import ChunkMemory, chunk_memory
from zero_bubble.trace.rank_file import Phase, TracedPass

__all__ = ["Measured"]


@dataclass(frozen=True, slots=True)
class Measured:
    """An iteration of a pipeline: all stages' passes and phases on the clock of its stage 0.

    Time 0 is the first thing any stage does in this iteration; times are ms.
    """

    pipeline: tuple[int, ...]
    """Global ranks, by stage."""
    iteration: int
    start: float
    """Time 0 on the clock of stage 0, in ms."""
    schedule: Schedule
    """The passes in the order they ran."""
    rows: tuple[tuple[TracedPass, ...], ...]
    """The same passes with their times, ``rows[stage]``."""
    phases: tuple[tuple[Phase, ...], ...]
    edges: tuple[tuple[int, int, float], ...]
    """(source stage, target stage, ms of a message)."""

    @property
    def placement(self) -> Placement:
        return self.schedule.placement

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages

    @property
    def length(self) -> float:
        """From time 0 to the last end of a pass or phase, in ms."""
        ends = [one.end for row in self.rows for one in row]
        return max(ends + [one.end for row in self.phases for one in row])

    @property
    def cost(self) -> float:
        """Longest time from a stage's first pass, its message being there, to its last end, in ms.

        As `Timeline.cost`, after the paper's section 5.3.
        """
        return max(row[-1].end - row[0].ready for row in self.rows)

    @property
    def work(self) -> tuple[float, ...]:
        """Time each stage computes, in ms."""
        return tuple(sum(one.end - one.ready for one in row) for row in self.rows)

    @property
    def bubble_rate(self) -> float:
        """(cost - work of the busiest stage) / cost, as `Timeline.bubble_rate`; 0.1 is 10 %."""
        return (self.cost - max(self.work)) / self.cost if self.cost else 0.0

    @property
    def stage_bubble_rates(self) -> tuple[float, ...]:
        """(cost - work of the stage) / cost for each stage."""
        cost = self.cost
        return tuple((cost - work) / cost if cost else 0.0 for work in self.work)

    @property
    def peak_memory(self) -> tuple[int | None, ...]:
        """Most bytes of activations each stage holds after a pass; None where nobody counted."""
        return tuple(
            max((one.held for one in row if one.held is not None), default=None)
            for row in self.rows
        )

    @property
    def costs(self) -> Costs:
        """Each chunk's median times in this iteration, its memory, and the measured messages.

        A message between stages that nobody measured takes the median of the others, 0 if there
        is none. Where only the fused backward ran, B and W are half of it each. Memory is 0 on
        stages where nobody counted.
        """
        times: dict[tuple[Kind, int, int], list[float]] = defaultdict(list)
        for stage, row in enumerate(self.rows):
            for one in row:
                times[one.what.kind, stage, one.what.chunk].append(one.end - one.ready)
        median = {key: statistics.median(values) for key, values in times.items()}
        fused = any(kind is Kind.BW for kind, _, _ in median)
        recomputed = any(kind is Kind.R for kind, _, _ in median)
        memory = [
            chunk_memory(row, self.placement.num_chunks(stage))
            for stage, row in enumerate(self.rows)
        ]
        edges = _median_edges(self.edges)
        return Costs(
            t_f=self._table(median, Kind.F),
            t_b=self._table(median, Kind.B),
            t_w=self._table(median, Kind.W),
            t_bw=self._table(median, Kind.BW) if fused else None,
            m_b=tuple(one.m_b for one in memory),
            m_w=tuple(one.m_w for one in memory),
            t_r=self._table(median, Kind.R) if recomputed else None,
            m_r=self._kept(memory) if recomputed else None,
            t_comm=statistics.median(ms for _, _, ms in edges) if edges else 0.0,
            t_edges=edges,
        )

    @property
    def timeline(self) -> Timeline:
        """The passes at their measured times; its ``cost`` is ours, its ``work`` by the medians."""
        spans = (tuple(Span(one.what, one.ready, one.end) for one in row) for row in self.rows)
        return Timeline(self.schedule, self.costs, tuple(spans))

    def predict(self) -> Timeline:
        """What the simulator says of this schedule with these costs."""
        return simulate(self.schedule, self.costs)

    def _kept(self, memory: Sequence[ChunkMemory]) -> Table:
        """M_R; what a stage without R's keeps is all."""
        return tuple(one.m_r or one.m_b for one in memory)

    def _table(self, median: dict[tuple[Kind, int, int], float], kind: Kind) -> Table:
        return tuple(
            tuple(_duration(median, kind, stage, chunk) for chunk in range(len(held)))
            for stage, held in enumerate(self.placement.positions)
        )


def _duration(
    median: dict[tuple[Kind, int, int], float], kind: Kind, stage: int, chunk: int
) -> float:
    if (found := median.get((kind, stage, chunk))) is not None:
        return found
    if kind is Kind.R:
        return 0.0
    if kind is Kind.BW:
        return sum(median.get((one, stage, chunk), 0.0) for one in (Kind.B, Kind.W))
    return median.get((Kind.BW, stage, chunk), 0.0) / 2


def _median_edges(edges: tuple[tuple[int, int, float], ...]) -> tuple[tuple[int, int, float], ...]:
    """An entry an edge: both of its ends may have measured it."""

    def entries() -> Iterator[tuple[int, int, float]]:
        for source, target in sorted({(source, target) for source, target, _ in edges}):
            times = [ms for one, other, ms in edges if (one, other) == (source, target)]
            yield source, target, statistics.median(times)

    return tuple(entries())
