"""Four ranks that measure messages over gloo; their clocks are put wrong, and one sends slowly.

Imports Megatron once and forks the ranks: the import takes longer than all they do. Ends with code
0 if every rank found what it should.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.profile.messages import Messages, measure_messages
from megatron.zero_bubble.runtime.transport import Transport
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.program import Channel, channels_between

RANKS = 4
CPU = torch.device("cpu")
SHIFTS_MS = (0.0, 5e5, -3e4, 1e3)
"""By which the clock of each rank is ahead of the true one."""
TOLERANCE_MS = 50.0
"""Half of a round trip at worst, on a machine with other things to do."""
SLOW_RANK, SLOW_S = 2, 0.1


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                be_rank(rank, f"file://{directory}/store")
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


def be_rank(rank: int, meeting: str) -> None:
    """The whole life of a rank; does not return."""
    code = 1
    try:
        clock, shift = time.perf_counter_ns, round(SHIFTS_MS[rank] * 1e6)
        time.perf_counter_ns = lambda: clock() + shift
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
        # Three times in a row, as a job that is measured again.
        for _ in range(3):
            check(linear(RANKS), (0, 1, 2, 3))
        check(v_shape(RANKS), (3, 1, 0, 2))
        # Its last stage sends to the first one.
        check(interleaved(RANKS, 2), (0, 1, 2, 3))
        check(linear(1), (rank,))
        slow_messages()
        dist.barrier()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def connect(placement: Placement, ranks: tuple[int, ...]) -> Transport:
    return Transport(
        channels_between(placement), stage=ranks.index(dist.get_rank()), ranks=ranks,
        backend="gloo", device=CPU, wait_limit=60.0,
    )  # fmt: skip


def measured(transport: Transport, placement: Placement, ranks: tuple[int, ...]) -> list[Messages]:
    """By all stages, in their order."""
    stage = ranks.index(dist.get_rank())
    own = measure_messages(transport, placement, stage, (4, 1, 8), torch.float32, CPU)
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, own)
    return [every[rank] for rank in ranks]


def check(placement: Placement, ranks: tuple[int, ...]) -> None:
    transport = connect(placement, ranks)
    found = measured(transport, placement, ranks)
    edges = [(source, target) for one in found for source, target, _ in one.edges]
    lines = {(channel.source, channel.target) for channel in channels_between(placement)}
    assert len(edges) == len(lines), edges
    assert set(edges) == lines, edges
    times = {(source, target): ms for one in found for source, target, ms in one.edges}
    assert all(0 < ms < 1e3 for ms in times.values()), times
    assert all(times[source, target] == times[target, source] for source, target in lines), times
    for stage, one in enumerate(found):
        expected = SHIFTS_MS[ranks[0]] - SHIFTS_MS[ranks[stage]]
        assert abs(one.clock_offset_ms - expected) < TOLERANCE_MS, (stage, one, expected)
    assert found[0].clock_offset_ms == 0.0
    batches_go_on(transport, placement, ranks.index(dist.get_rank()))


def batches_go_on(transport: Transport, placement: Placement, stage: int) -> None:
    """A message of every channel is the one that was sent after measuring."""
    for number, channel in enumerate(channels_between(placement)):
        if channel.source == stage:
            transport.send(channel, torch.full((3,), float(number)))
            transport.drain()
        elif channel.target == stage:
            got = transport.wait(transport.receive(channel, torch.zeros(3)))
            assert got.tolist() == [number] * 3, (channel, got)


def slow_messages() -> None:
    """Half of a round trip has half of what one of the two sends late; other lines have nothing."""
    placement, ranks = linear(RANKS), (0, 1, 2, 3)
    transport = connect(placement, ranks)
    send = transport.send

    def send_late(channel: Channel, message: torch.Tensor) -> None:
        if dist.get_rank() == SLOW_RANK and message.is_floating_point():
            time.sleep(SLOW_S)
        send(channel, message)

    transport.send = send_late  # type: ignore[method-assign]
    late = 1e3 * SLOW_S / 2
    for one in measured(transport, placement, ranks):
        for source, target, ms in one.edges:
            assert (ms >= late) == (SLOW_RANK in (source, target)), (source, target, ms)
            assert ms < 2 * late, (source, target, ms)


if __name__ == "__main__":
    main()
