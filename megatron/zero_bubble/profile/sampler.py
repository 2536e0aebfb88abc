"""Which iterations are measured, and what a rank reports of them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.zero_bubble.profile.memory import peak, room
from megatron.zero_bubble.profile.messages import Messages
from megatron.zero_bubble.profile.monitor import NOTHING, MeasuredBatch, Wish
from zero_bubble.profile.report import BatchTimes, RankReport
from zero_bubble.schedule import Kind
from zero_bubble.trace.memory import chunk_memory
from zero_bubble.trace.rank_file import TracedPass

__all__ = ["Round", "Sampler", "times_of"]


@dataclass(frozen=True, slots=True)
class Round:
    """Iterations that are measured together, and then reported."""

    number: int
    first: int
    last: int
    whole: bool
    """Whether memory and messages are measured as well, in the first iteration, whose times then do
    not count."""

    @property
    def timed(self) -> range:
        """The iterations whose times count."""
        return range(self.first + self.whole, self.last + 1)

    def wants(self, iteration: int) -> Wish:
        if not self.first <= iteration <= self.last:
            return NOTHING
        return Wish(times=True, memory=self.whole and iteration == self.first)


@dataclass(slots=True)
class Sampler:
    """Collects what one rank measures in a round."""

    rank: int
    device: torch.device
    round: Round
    messages: Messages | None = None
    microbatches: int = 0
    """Of the last batch."""
    bytes_a_pass: float = 0.0
    """What recording the last batch took of the host's memory."""
    _batches: list[BatchTimes] = field(default_factory=list)
    _first: MeasuredBatch | None = None
    _stage: int = 0
    _chunks: int = 0
    _starts: dict[int, float] = field(default_factory=dict)

    def begins(self, iteration: int) -> None:
        """An iteration begins now."""
        if self.round.first <= iteration <= self.round.last + 1:
            self._starts[iteration] = time.perf_counter() * 1e3

    def take(self, measured: MeasuredBatch) -> None:
        """A batch of the round."""
        self.microbatches = measured.program.num_microbatches
        self.bytes_a_pass = measured.nbytes / max(1, len(measured.passes))
        self._stage = measured.stage
        self._chunks = measured.program.placement.num_chunks(measured.stage)
        if measured.wish.memory and measured.iteration == self.round.first:
            self._first = measured
        if measured.iteration in self.round.timed:
            self._batches.append(times_of(measured.passes))

    @property
    def is_complete(self) -> bool:
        has_memory = self._first is not None or not self.round.whole
        return has_memory and len(self._batches) == len(self.round.timed)

    def report(self) -> RankReport:
        """To be asked for once the round is complete."""
        first = self._first
        extra: dict[str, Any] = {}
        if first is not None:
            extra = chunk_memory(first.passes, self._chunks)._asdict()
            extra["room"] = room(self.device, peak(first.passes))
        if self.messages is not None:
            extra["edges"] = self.messages.edges
        return RankReport.of(
            self.rank,
            self._stage,
            self._chunks,
            self._batches,
            iteration_ms=self._period(),
            **extra,
        )

    def _period(self) -> float:
        # The last of them may have ended just now, before the next one begins.
        starts = {self.round.last + 1: time.perf_counter() * 1e3} | self._starts
        periods = [
            starts[one + 1] - starts[one]
            for one in self.round.timed
            if one in starts and one + 1 in starts
        ]
        return statistics.median(periods) if periods else 0.0


def times_of(passes: tuple[TracedPass, ...]) -> BatchTimes:
    """ms that each pass computed, by kind and chunk."""
    times: dict[tuple[Kind, int], list[float]] = {}
    for one in passes:
        times.setdefault((one.what.kind, one.what.chunk), []).append(one.end - one.ready)
    return times
