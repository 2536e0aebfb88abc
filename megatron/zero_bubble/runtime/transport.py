"""Messages between stages: one in-order line a channel, non-blocking both ways."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron.zero_bubble.errors import PipelineError
from zero_bubble.program import Channel

__all__ = ["Receipt", "Transport", "memory_taken"]

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 300.0
PURPOSE = "zero-bubble"


class Work(Protocol):
    """The part of torch.distributed's Work that is used."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


@dataclass(slots=True)
class Receipt:
    """A posted receive: the buffer is good after `Transport.wait`."""

    channel: Channel
    buffer: torch.Tensor
    work: Work
    waited: bool = False


class Transport:
    """Point-to-point messages of one stage of one pipeline.

    Every channel is a process group of its own with two members: a communicator and a stream on
    NCCL, a set of connections on gloo. So messages of one channel arrive in the order sent, and
    those of different channels do not wait for each other. A message moves only once both sides
    have asked for it, so the receiver posts early (`zero_bubble.lower`).

    Groups are made and connected when the transport is, by all ranks of the job together.

    Args:
        channels: all channels of a pipeline, in one order on all ranks.
        stage: this stage.
        ranks: global rank of every stage of this pipeline.
        backend: ``nccl`` or ``gloo``.
        device: where messages live.
        wait_limit: seconds that a wait may take. On NCCL it is enforced by torch's watchdog.
        purpose: tells the groups of two transports apart in torch's messages.
    """

    def __init__(
        self,
        channels: Iterable[Channel],
        *,
        stage: int,
        ranks: Sequence[int],
        backend: str,
        device: torch.device,
        wait_limit: float,
        purpose: str = PURPOSE,
    ) -> None:
        self._stage, self._ranks, self._device = stage, tuple(ranks), device
        self._wait_limit, self._purpose = wait_limit, purpose
        # Waiting on NCCL only orders streams, and must not stop the host.
        self._host_waits = backend != "nccl"
        self._groups: dict[Channel, dist.ProcessGroup] = {}
        self._sent: dict[Channel, deque[tuple[Work, torch.Tensor]]] = defaultdict(deque)
        self._tentative: dict[Channel, list[Receipt]] | None = None
        self._unwanted: list[Receipt] = []
        taken = memory_taken(device, lambda: self._connect(tuple(channels), backend))
        if taken is not None:
            logger.info(
                "stage %d: %d channels (%s), whose communicators take %.0f MiB of the GPU",
                stage,
                len(self._groups),
                purpose,
                taken / 2**20,
            )

    def _connect(self, channels: Sequence[Channel], backend: str) -> None:
        # torch names a group by how many were made before it, so that every rank of the job has
        # to take part in the making of every group, the other pipelines' included.
        pipelines: list[tuple[int, ...]] = [()] * dist.get_world_size()
        dist.all_gather_object(pipelines, self._ranks)
        # Where the host waits, each wait has the limit; meeting to connect may take longer.
        timeout = self._wait_limit
        if self._host_waits:
            timeout = max(timeout, CONNECT_SECONDS)
        for ranks in sorted(set(pipelines)):
            for channel in channels:
                group = dist.new_group(
                    [ranks[channel.source], ranks[channel.target]],
                    timeout=timedelta(seconds=timeout),
                    backend=backend,
                    group_desc=f"{self._purpose} {channel}",
                )
                if ranks == self._ranks and self._stage in (channel.source, channel.target):
                    self._groups[channel] = group
        # One message now, so that no communicator is made in the middle of an iteration.
        for channel in self._groups:
            hello = torch.zeros(1, device=self._device)
            if channel.source == self._stage:
                self.send(channel, hello)
                self.drain()
            else:
                self.wait(self.receive(channel, hello))

    def receive(self, channel: Channel, buffer: torch.Tensor) -> Receipt:
        """Post the receive of the channel's next message into ``buffer``."""
        source = self._ranks[channel.source]
        with self._blaming(channel):
            work = dist.irecv(buffer, source, group=self._groups[channel])
        assert work is not None  # None only for ranks outside the group
        receipt = Receipt(channel, buffer, work)
        if self._tentative is not None:
            self._tentative.setdefault(channel, []).append(receipt)
        return receipt

    def wait(self, receipt: Receipt) -> torch.Tensor:
        """The received message; PipelineError if the peer is gone or the limit passes."""
        if not receipt.waited:
            self._await(receipt.work, receipt.channel)
            receipt.waited = True
        return receipt.buffer

    def begin_tentative(self) -> None:
        """What is received from now on may have to be thrown away."""
        self._tentative = {}

    def keep_tentative(self) -> None:
        """What was received since `begin_tentative` counts."""
        self._tentative = None

    def discard_tentative(
        self, sent: Mapping[Channel, int], buffer: Callable[[Channel], torch.Tensor]
    ) -> None:
        """Throw away all that was sent to this stage since `begin_tentative`.

        A channel delivers in order, so that what nobody reads must be received all the same. That
        need not have happened when this returns: `drain` waits for it.

        Args:
            sent: how many messages were sent to this stage on each channel; no more of them
                have been asked for.
            buffer: an empty tensor for a message of a channel.
        """
        posted, self._tentative = self._tentative or {}, None
        for channel in sorted(sent):
            receipts = posted.get(channel, [])
            missing = sent[channel] - len(receipts)
            receipts = receipts + [self.receive(channel, buffer(channel)) for _ in range(missing)]
            self._unwanted += [one for one in receipts if not one.waited]

    def send(self, channel: Channel, message: torch.Tensor) -> None:
        """Start sending; the message is kept until it has left.

        Gloo tells that only to those who wait, so that there it is kept until `drain`.
        """
        self._forget_completed(channel)
        message = message.contiguous()
        target = self._ranks[channel.target]
        with self._blaming(channel):
            work = dist.isend(message, target, group=self._groups[channel])
        assert work is not None
        self._sent[channel].append((work, message))

    def drain(self) -> None:
        """Wait until all messages have left, and those to be thrown away have come."""
        while self._unwanted:
            self.wait(self._unwanted.pop(0))
        for channel, sent in self._sent.items():
            while sent:
                work, _ = sent.popleft()
                self._await(work, channel)

    def _forget_completed(self, channel: Channel) -> None:
        sent = self._sent[channel]
        while sent and sent[0][0].is_completed():
            sent.popleft()

    def _await(self, work: Work, channel: Channel) -> None:
        if not self._host_waits:
            work.wait()
            return
        with self._blaming(channel):
            work.wait(timedelta(seconds=self._wait_limit))

    def _whose_channel(self) -> str:
        return (
            "" if self._purpose == PURPOSE else f" ({self._purpose.removeprefix('zero-bubble ')})"
        )

    @contextmanager
    def _blaming(self, channel: Channel) -> Iterator[None]:
        """Say which channel and stage an error of the backend is about."""
        try:
            yield
        except RuntimeError as error:
            peer = channel.source if channel.target == self._stage else channel.target
            timed_out = "Timed out" in str(error) or "timed out" in str(error)
            what = (
                f"waited {self._wait_limit:g} s (the limit) on"
                if timed_out
                else "lost the connection of"
            )
            raise PipelineError(
                f"{what} channel {channel}{self._whose_channel()}, whose other end is stage {peer} "
                f"(rank {self._ranks[peer]}): "
                + ("that stage is stuck" if timed_out else "that stage's process ended")
                + "; look at its own output"
            ) from error


def memory_taken(device: torch.device, connect: Callable[[], None]) -> int | None:
    """Connect; the bytes of the device that this took, outside of torch's allocator. None on a CPU.

    Waits for the device, so that a channel that cannot be connected is noticed here. What other
    processes take of the same device meanwhile counts too.
    """
    if device.type != "cuda":
        connect()
        return None
    torch.cuda.synchronize(device)
    held, free = torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]
    connect()
    torch.cuda.synchronize(device)
    cached: int = torch.cuda.memory_reserved(device) - held
    left: int = torch.cuda.mem_get_info(device)[0]
    taken: int = free - left - cached
    return max(0, taken)
