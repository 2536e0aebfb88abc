"""How long messages between stages take, and how far apart the stages' clocks are."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron.zero_bubble.runtime.transport import Receipt, Transport
from zero_bubble.placement import Placement
from zero_bubble.program import Channel, channels_between

if TYPE_CHECKING:
    from megatron.zero_bubble.runtime.batch import BatchRequest
    from megatron.zero_bubble.runtime.session import Session

__all__ = ["Messages", "measure_messages", "messages_of"]

_REPEATS = 7
_CLOCK_REPEATS = 30


@dataclass(frozen=True, slots=True)
class Messages:
    """What a stage has measured with its neighbours."""

    edges: tuple[tuple[int, int, float], ...]
    """(source stage, target stage, ms), both ways of each line that this stage began."""
    clock_offset_ms: float
    """To be added to this stage's host times to have them on stage 0's clock."""


def measure_messages(
    transport: Transport,
    placement: Placement,
    stage: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Messages:
    """Play messages to and fro on every line of the pipeline, one line after the other.

    To be called by all stages between two batches, when no message is under way. A message takes
    half of a round trip, the median of seven. The clocks are compared by the shortest round trip of
    a few bytes (Cristian's algorithm), along the shortest way from stage 0.
    """
    message, buffer = (torch.zeros(tuple(shape), dtype=dtype, device=device) for _ in range(2))
    edges: list[tuple[int, int, float]] = []
    offset: int | None = 0 if stage == 0 else None
    for one, other in _lines(placement):
        if stage not in (one, other):
            continue
        line = _Line(transport, _channel(placement, one, other), _channel(placement, other, one))
        if stage == one:
            ms = statistics.median(line.call(message, buffer) for _ in range(_REPEATS)) / 2e6
            edges += [(one, other, ms), (other, one, ms)]
            line.tell_time(device, offset or 0)
        else:
            for _ in range(_REPEATS):
                line.answer(message, buffer)
            known = line.ask_time(device)
            offset = known if offset is None else offset
    return Messages(tuple(edges), (offset or 0) / 1e6)


@dataclass(frozen=True, slots=True)
class _Line:
    """Two channels between the same stages, one each way; ``there`` leaves the caller."""

    transport: Transport
    there: Channel
    back: Channel

    def call(self, message: torch.Tensor, buffer: torch.Tensor) -> int:
        """A round trip, in ns."""
        receipt = self.transport.receive(self.back, buffer)
        begin = time.perf_counter_ns()
        self.transport.send(self.there, message)
        self._wait(receipt)
        end = time.perf_counter_ns()
        self.transport.drain()
        return end - begin

    def answer(self, message: torch.Tensor, buffer: torch.Tensor) -> None:
        """The other side of `call`."""
        self._wait(self.transport.receive(self.there, buffer))
        self.transport.send(self.back, message)
        self.transport.drain()

    def tell_time(self, device: torch.device, own_offset: int) -> None:
        """Ask for the other side's clock, and tell it its offset to stage 0's, in ns."""
        asked, stamp = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        trips = []
        for _ in range(_CLOCK_REPEATS):
            begin = time.perf_counter_ns()
            trip = self.call(asked, stamp)
            trips.append((trip, begin + trip // 2 - int(stamp.item())))
        asked[0] = own_offset + min(trips)[1]
        self.transport.send(self.there, asked)
        self.transport.drain()

    def ask_time(self, device: torch.device) -> int:
        """The other side of `tell_time`: this stage's offset."""
        asked, stamp = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        for _ in range(_CLOCK_REPEATS):
            self._wait(self.transport.receive(self.there, asked))
            stamp[0] = time.perf_counter_ns()
            self.transport.send(self.back, stamp)
            self.transport.drain()
        return int(self._wait(self.transport.receive(self.there, asked)).item())

    def _wait(self, receipt: Receipt) -> torch.Tensor:
        message = self.transport.wait(receipt)
        if message.device.type == "cuda":  # waiting has only ordered streams
            torch.cuda.current_stream(message.device).synchronize()
        return message


def messages_of(session: Session, request: BatchRequest, device: torch.device) -> Messages | None:
    """Measure messages, and clocks, between two batches; None before the first one."""
    from megatron.core.utils import get_model_config

    from megatron.zero_bubble.runtime.batch import message_shape

    if session.transport is None:  # not connected yet
        return None
    stage, _ = session.pipeline()
    config: Any = get_model_config(request.models[0])
    return measure_messages(
        session.transport,
        session.placement,
        stage,
        message_shape(request),
        config.pipeline_dtype,
        device,
    )


def _lines(placement: Placement) -> list[tuple[int, int]]:
    """Each pair of stages that exchange messages, once, so that the first of a pair is stage 0 or
    has been the second of one before."""
    neighbours: dict[int, set[int]] = {}
    for channel in channels_between(placement):
        neighbours.setdefault(channel.source, set()).add(channel.target)
    found, reached, queue = list[tuple[int, int]](), {0}, deque([0])
    while queue:
        one = queue.popleft()
        for other in sorted(neighbours.get(one, ())):
            if other not in reached:
                reached.add(other)
                queue.append(other)
                found.append((one, other))
    rest = {
        (one, other) for one, others in neighbours.items() for other in others if one < other
    } - {(min(pair), max(pair)) for pair in found}
    return found + sorted(rest)


def _channel(placement: Placement, source: int, target: int) -> Channel:
    return next(
        one for one in channels_between(placement) if (one.source, one.target) == (source, target)
    )
