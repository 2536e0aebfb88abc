"""One rank of a pipeline whose stages send numbers to their neighbours over NCCL.

    python transport_rank.py MESSAGES

Ends with code 0 when every message has come in order and whole, else with an error.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])


def main() -> None:
    from tools.profile.one_gpu.device import rank_environment

    rank, ranks, messages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(sys.argv[1])
    os.environ.update(rank_environment("cuda", rank))
    import torch
    import torch.distributed as dist

    from megatron.zero_bubble.runtime.transport import Transport
    from zero_bubble.placement import linear
    from zero_bubble.program import channels_between

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    mine = [one for one in channels_between(linear(ranks)) if rank in (one.source, one.target)]
    transport = Transport(
        channels_between(linear(ranks)),
        stage=rank,
        ranks=range(ranks),
        backend="nccl",
        device=device,
        wait_limit=60.0,
    )
    incoming = [one for one in mine if one.target == rank]
    # All posted before any is sent: nobody may wait for another's order.
    receipts = [
        (channel, number, transport.receive(channel, torch.empty(1 << 20, device=device)))
        for number in range(messages)
        for channel in incoming
    ]
    for number in range(messages):
        for channel in mine:
            if channel.source == rank:
                value = float(100 * rank + number)
                transport.send(channel, torch.full((1 << 20,), value, device=device))
    for channel, number, receipt in receipts:
        expected = float(100 * channel.source + number)
        if not bool((transport.wait(receipt) == expected).all()):
            raise RuntimeError(f"message {number} of {channel} is not what was sent")
    transport.drain()
    torch.cuda.synchronize()
    print(f"{len(receipts)} messages came", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
