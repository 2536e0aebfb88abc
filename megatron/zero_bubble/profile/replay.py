"""Runs a schedule with pauses in place of compute: the runtime against the simulator's prediction.

Each stage is a process of its own, with this project's interpreter and transport over gloo. Its
passes sleep for as long as the costs say. So what is measured is all that the simulator leaves out:
the order in which receives are posted, what an instruction costs, what a message really takes.
Sleeping takes no core, so that many stages fit on one machine.

**Pauses.** A pass sleeps until its own start plus its time. It starts when the pass before it has
ended and its message is there. One that starts late ends late: no later pause is made shorter for
it. Waking up takes its time, always about the same; a sleep begins to end earlier by the median of
that (`Sleeper`). What it takes longer, such as another stage's turn on the core, stays in.

**Messages.** A message carries the time when the pass that made it ended; all processes of a host
read the same clock. Its receiver goes on at that time plus the `Costs.comm` of the two stages, or
when the message has really come, whichever is later. So gloo's own latency hides in the predicted
one as far as that lasts, and the rest is measured.

**Times** are taken from the interpreter's event log: a pass starts when its instruction began, plus
what it waited for its message, and ends when its instruction ended.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from megatron.zero_bubble.runtime.interpreter import Event
from megatron.zero_bubble.runtime.transport import Receipt, Transport
from zero_bubble.costs import Costs
from zero_bubble.program import Flow, Run, channels_between
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import Span, Timeline

__all__ = ["DelayedTransport", "PausedCompute", "Sleeper", "StageLog", "timeline_of"]

MOST_LEAD_NS = 300_000
"""A sleep that ends later than this was held up: no property of the timer, and not corrected."""


@dataclass(slots=True)
class Sleeper:
    """Sleeps until a moment, by `time.perf_counter_ns`, without spinning.

    A sleep ends late, always by about as much: waking up takes its time. `learn` makes it begin to
    end that much earlier, so that a pause is right in the median. What is above the median stays.
    """

    lead_ns: int = 0
    """How much earlier than the moment that is meant a sleep is told to end."""
    _late_ns: list[int] = field(default_factory=list)

    def until(self, moment_ns: int) -> None:
        """Sleep until then; not at all if that has passed."""
        target = moment_ns - self.lead_ns
        left = target - time.perf_counter_ns()
        if left > 0:
            time.sleep(left / 1e9)
            self._late_ns.append(time.perf_counter_ns() - target)

    def learn(self) -> None:
        """From now on allow for the median lateness of the sleeps so far, 0.3 ms at most."""
        if self._late_ns:
            self.lead_ns = min(MOST_LEAD_NS, round(statistics.median(self._late_ns)))


@dataclass(slots=True)
class PausedCompute:
    """One stage's passes, as pauses: a `megatron.zero_bubble.runtime.interpreter.Compute`.

    For one iteration. What it sends is when the pass that made it ended, in ns; see
    `DelayedTransport`.
    """

    stage: int
    schedule: Schedule
    costs: Costs
    sleeper: Sleeper
    _fused: frozenset[tuple[int, int]] = field(init=False)
    _recomputed: frozenset[int] = field(init=False)
    _blanks: list[tuple[torch.Tensor, npt.NDArray[np.float64]]] = field(init=False)
    """Messages to be sent, with their memory: making one after a pass would lengthen that."""

    def __post_init__(self) -> None:
        fused = self.schedule.order(self.stage, (Kind.BW,))
        self._fused = frozenset((one.chunk, one.microbatch) for one in fused)
        self._recomputed = self.schedule.chunks_with(Kind.R)[self.stage]
        making = self.schedule.order(self.stage, (Kind.F, Kind.B, Kind.BW))
        blanks = [torch.zeros(1, dtype=torch.float64) for _ in making]
        self._blanks = [(one, one.numpy()) for one in blanks]

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        self._pause(Kind.F, chunk)
        message = self._now()
        is_last = self.schedule.placement.after(self.stage, chunk) is None
        return message, None if is_last else message

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        self._pause(Kind.BW if (chunk, microbatch) in self._fused else Kind.B, chunk)
        return None if input is None else self._now()

    def recompute(self, chunk: int, microbatch: int) -> None:
        self._pause(Kind.R, chunk)

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        self._pause(Kind.W, chunk, parts)

    def buffer(self, flow: Flow) -> torch.Tensor:
        return torch.empty(1, dtype=torch.float64)

    def finalize(self) -> None:
        """There are no gradients."""

    def _pause(self, kind: Kind, chunk: int, parts: int = 1) -> None:
        begin = time.perf_counter_ns()
        time_ms = self.costs.duration(kind, self.stage, chunk) / parts
        if kind in (Kind.B, Kind.BW) and chunk not in self._recomputed:
            time_ms += self.costs.recomputation(self.stage, chunk)
        self.sleeper.until(begin + round(time_ms * 1e6))

    def _now(self) -> torch.Tensor:
        """A message that says the time: exact while the host is up 104 days, then to 2 ns."""
        message, number = self._blanks.pop()
        number[0] = time.perf_counter_ns()
        return message


class DelayedTransport(Transport):
    """Gloo's messages, of which none arrives before the costs say so.

    Args:
        costs: a message takes at least their `Costs.comm` from the end of the pass that made it.
        wait_limit: seconds that a wait may take.
    """

    def __init__(
        self, schedule: Schedule, costs: Costs, sleeper: Sleeper, *, stage: int, wait_limit: float
    ) -> None:
        self._costs, self._sleeper = costs, sleeper
        self.latencies: list[float] = []
        """ms from the end of a pass until gloo had brought its message; only of those messages for
        which this stage was waiting already, since of the others nobody sees when they come."""
        super().__init__(
            channels_between(schedule.placement),
            stage=stage,
            ranks=range(schedule.num_stages),
            backend="gloo",
            device=torch.device("cpu"),
            wait_limit=wait_limit,
        )

    def wait(self, receipt: Receipt) -> torch.Tensor:
        began = time.perf_counter_ns()
        message = super().wait(receipt)
        arrived, sent = time.perf_counter_ns(), round(message.item())
        if sent > began:
            self.latencies.append((arrived - sent) / 1e6)
        channel = receipt.channel
        comm = self._costs.comm(channel.source, channel.target)
        self._sleeper.until(sent + round(comm * 1e6))
        return message


@dataclass(frozen=True, slots=True)
class StageLog:
    """What one stage did in one iteration."""

    events: tuple[Event, ...]
    latencies: tuple[float, ...] = ()
    """See `DelayedTransport.latencies`; ms."""

    def runs(self) -> Iterator[tuple[Pass, int, int, int]]:
        """Every pass with three times in ns: begin, ready (its message is there), end."""
        for one in self.events:
            if isinstance(one.instruction, Run):
                yield one.instruction.what, one.begin_ns, one.begin_ns + one.waited_ns, one.end_ns


def timeline_of(schedule: Schedule, costs: Costs, logs: Sequence[StageLog]) -> Timeline:
    """What ran, as the simulator's type, so that cost and bubble rate mean the same.

    ``logs`` has one for each stage. Times are ms from the first start of all stages. ValueError if
    what ran is not what the schedule says.
    """
    rows = [list(log.runs()) for log in logs]
    for stage, (row, wanted) in enumerate(zip(rows, schedule.passes, strict=True)):
        if tuple(what for what, *_ in row) != wanted:
            raise ValueError(
                f"stage {stage} ran other passes than the schedule's, or in another order"
            )
    zero = min(start for row in rows for _, _, start, _ in row)
    spans = tuple(
        tuple(Span(what, (start - zero) / 1e6, (end - zero) / 1e6) for what, _, start, end in row)
        for row in rows
    )
    return Timeline(schedule, costs, spans)
