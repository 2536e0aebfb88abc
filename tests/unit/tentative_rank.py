"""A rank of three stages: messages thrown away, and the rows of a validation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.zero_bubble.optimizer.exchange import Exchange
from megatron.zero_bubble.runtime.transport import Transport
from zero_bubble.program import Channel, Flow

DOWN, UP = Channel(0, 1, Flow.FORWARD), Channel(1, 0, Flow.BACKWARD)
AROUND = Channel(0, 2, Flow.FORWARD)
CHANNELS = (DOWN, Channel(1, 2, Flow.FORWARD), AROUND, UP)
STALE, FRESH = -1.0, 1000.0
# (sent in vain, of these received, of these waited for)
CASES = [
    (sent, posted, waited)
    for sent, posted, waited in itertools.product(range(4), repeat=3)
    if waited <= posted <= sent
]


def message(value: float) -> torch.Tensor:
    return torch.tensor([value, value + 0.5])


def main() -> None:
    """Raises AssertionError at the first message that is not the expected one."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    transport = Transport(
        CHANNELS, stage=rank, ranks=(0, 1, 2), backend="gloo", device=torch.device("cpu"),
        wait_limit=60.0,
    )  # fmt: skip
    for scenario in (
        each_case_twice_in_a_row,
        nothing_has_been_sent_yet,
        kept_messages_count,
        another_channel_goes_on,
    ):
        scenario(transport, rank)
        transport.drain()
        dist.barrier()
    rows_go_down_and_up(rank)
    dist.destroy_process_group()


def send(transport: Transport, values: Sequence[float], channel: Channel = DOWN) -> None:
    for value in values:
        transport.send(channel, message(value))


def got(transport: Transport, value: float, channel: Channel = DOWN) -> None:
    received = transport.wait(transport.receive(channel, torch.empty(2)))
    assert torch.equal(received, message(value)), (channel, received, value)


def discard(transport: Transport, sent: dict[Channel, int]) -> int:
    """Returns how many buffers were asked for."""
    made: list[Channel] = []

    def buffer(channel: Channel) -> torch.Tensor:
        made.append(channel)
        return torch.empty(2)

    transport.discard_tentative(sent, buffer)
    return len(made)


def each_case_twice_in_a_row(transport: Transport, rank: int) -> None:
    """Whatever part of the stale messages was received, the next one is the fresh one."""
    for number, (sent, posted, waited) in enumerate(CASES):
        for again in range(2):
            stale = [STALE - index - 10 * again for index in range(sent)]
            if rank == 0:
                send(transport, stale)
            elif rank == 1:
                transport.begin_tentative()
                receipts = [transport.receive(DOWN, torch.empty(2)) for _ in range(posted)]
                for receipt, value in zip(receipts[:waited], stale, strict=False):
                    assert torch.equal(transport.wait(receipt), message(value))
                assert discard(transport, {DOWN: sent}) == sent - posted
        if rank == 0:
            send(transport, [FRESH + number])
        elif rank == 1:
            got(transport, FRESH + number)
        if number % 3 == 0:
            transport.drain()


def nothing_has_been_sent_yet(transport: Transport, rank: int) -> None:
    """To throw away waits for nobody: here the sender waits for it to be over."""
    if rank == 0:
        got(transport, 7.0, UP)
        send(transport, [STALE, STALE, FRESH])
    elif rank == 1:
        transport.begin_tentative()
        transport.receive(DOWN, torch.empty(2))
        discard(transport, {DOWN: 2})
        send(transport, [7.0], UP)
        got(transport, FRESH)


def kept_messages_count(transport: Transport, rank: int) -> None:
    """What has been kept is not thrown away by a later end of another attempt."""
    if rank == 0:
        send(transport, [1.0, 2.0, STALE, 3.0])
    elif rank == 1:
        transport.begin_tentative()
        first = transport.receive(DOWN, torch.empty(2))
        second = transport.receive(DOWN, torch.empty(2))
        transport.keep_tentative()
        transport.begin_tentative()
        assert discard(transport, {DOWN: 1}) == 1
        third = transport.receive(DOWN, torch.empty(2))
        for receipt, value in ((third, 3.0), (first, 1.0), (second, 2.0)):
            assert torch.equal(transport.wait(receipt), message(value))


def another_channel_goes_on(transport: Transport, rank: int) -> None:
    """Messages that were sent to one stage in vain do not concern those to another."""
    if rank == 0:
        send(transport, [STALE], DOWN)
        send(transport, [5.0], AROUND)
        send(transport, [6.0], DOWN)
    elif rank == 1:
        transport.begin_tentative()
        discard(transport, {DOWN: 1})
        got(transport, 6.0)
    else:
        transport.begin_tentative()
        kept = transport.receive(AROUND, torch.empty(2))
        discard(transport, {})
        assert torch.equal(transport.wait(kept), message(5.0))


def rows_go_down_and_up(rank: int) -> None:
    """Each stage knows the rows of earlier ones, then all rows; also where ranks go the other
    way round than stages, as those of a V do."""
    for ranks in ((0, 1, 2), (2, 1, 0)):
        exchange = Exchange(
            stage=ranks.index(rank), ranks=ranks, width=2, device=torch.device("cpu"),
            wait_limit=60.0,
        )  # fmt: skip
        for step in range(3):
            _validate(exchange, rank, [[one + step / 8, 100.0 * one] for one in range(3)])
        exchange.finish()
        dist.barrier()


def _validate(exchange: Exchange, rank: int, rows: list[list[float]]) -> None:
    exchange.finish()
    exchange.gather(rows[rank])
    exchange.receive_from_before()
    known = exchange.known(exchange.stage)
    assert len(known) == exchange.stage + 1
    assert rank in known
    assert exchange.rows[known].tolist() == [rows[one] for one in known]
    exchange.send_on()
    exchange.expect_result()
    exchange.result()
    assert exchange.rows.tolist() == rows


if __name__ == "__main__":
    main()
