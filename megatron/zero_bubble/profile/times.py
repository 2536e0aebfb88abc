"""What a batch's event log says about time, and how long a message takes."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.zero_bubble.runtime.interpreter import Event
from megatron.zero_bubble.runtime.transport import Transport
from zero_bubble.placement import linear
from zero_bubble.program import Flow, Run, channels_between
from zero_bubble.schedule import Kind, Pass

__all__ = ["BatchTimes", "batch_times", "message_time"]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """One stage's times in one batch, in ms of the host's clock (on a GPU: of launching)."""

    passes: dict[tuple[Kind, int], list[float]] = field(default_factory=dict)
    """By kind of pass and chunk, in the order they began, without the wait for their messages."""
    waited: float = 0.0
    """For messages."""
    messages: float = 0.0
    """Starting sends and receives, and finalizing gradients."""
    span: float = 0.0
    """From the start of the first pass, its message being there, to the end of the last."""

    @property
    def compute(self) -> float:
        """In passes."""
        return sum(map(sum, self.passes.values()))


def batch_times(events: Sequence[Event]) -> BatchTimes:
    """Add up an event log."""
    times: dict[Pass, float] = defaultdict(float)  # of a W in shares, all of them together
    waited = messages = 0
    runs = [event for event in events if isinstance(event.instruction, Run)]
    for event in events:
        spent = event.end_ns - event.begin_ns - event.waited_ns
        waited += event.waited_ns
        if isinstance(event.instruction, Run):
            times[event.instruction.what] += spent / 1e6
        else:
            messages += spent
    passes: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for what, spent_ms in times.items():
        passes[what.kind, what.chunk].append(spent_ms)
    span = runs[-1].end_ns - runs[0].begin_ns - runs[0].waited_ns if runs else 0
    return BatchTimes(dict(passes), waited / 1e6, messages / 1e6, span / 1e6)


def message_time(
    transport: Transport, stage: int, shape: Sequence[int], dtype: torch.dtype, repeats: int = 20
) -> float:
    """ms from stage to stage for a message of this shape, both sides ready: half a round trip.

    To be called by the first two stages of a linear pipeline together; median of the repeats.
    """
    there, back = channels_between(linear(2))
    assert there.flow is Flow.FORWARD
    message, buffer = (torch.zeros(tuple(shape), dtype=dtype) for _ in range(2))
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        if stage == 0:
            transport.send(there, message)
            transport.wait(transport.receive(back, buffer))
        else:
            transport.wait(transport.receive(there, buffer))
            transport.send(back, message)
        transport.drain()
        times.append((time.perf_counter() - begin) * 1e3 / 2)
    return statistics.median(times)
