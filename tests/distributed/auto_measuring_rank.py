"""A rank of a training run that counts messages, collectives and waits for the device, by step.

    auto_measuring_rank.py FILE [flags of pretrain_gpt.py]

The times of passes are taken as on a GPU, by events, for which CPU mode has a stand-in. Each rank
leaves FILE.RANK, a JSON object for each training step: what was called, from where in Megatron or
ours, to how often.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "monitored_barrier", "new_group", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "scatter_object_list", "isend", "irecv", "send", "recv",
    "batch_isend_irecv",
)  # fmt: skip
steps: list[Counter[str]] = []
counts: Counter[str] = Counter()


def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*given: Any, **options: Any) -> Any:
        counts[f"{name} {caller()}"] += 1
        return original(*given, **options)

    return call


def caller() -> str:
    """The innermost file in Megatron's packages or ours, from ``megatron/`` on."""
    frame = sys._getframe(2)
    while frame is not None:
        _, inside, path = frame.f_code.co_filename.rpartition("/megatron/")
        if inside:
            return path
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "elsewhere"


def count_collectives() -> None:
    """Before Megatron copies any."""
    import torch.distributed as dist

    for name in COLLECTIVES:
        original = getattr(dist.distributed_c10d, name)
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, counted(name, original))


def count_waits() -> None:
    """For the device, in whatever way; and take times by events of it."""
    import torch

    from megatron.zero_bubble.profile import monitor
    from megatron.zero_bubble.runtime.recording import DeviceClock

    torch.cuda.synchronize = counted("synchronize", torch.cuda.synchronize)
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        nothing: Callable[..., None] = lambda *_: None  # noqa: E731
        kind.synchronize = counted("synchronize", nothing)
    torch.cuda.Event.record = counted("record", torch.cuda.Event.record)
    monitor.clock_for = lambda device: DeviceClock()  # type: ignore[attr-defined]


def count_by_step() -> None:
    from megatron.training import training

    train_step = training.train_step

    def watched(*given: Any, **options: Any) -> Any:
        counts.clear()
        result = train_step(*given, **options)
        steps.append(Counter(counts))
        return result

    training.train_step = watched


if __name__ == "__main__":
    file = sys.argv.pop(1)
    count_collectives()
    import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

    # isort: split
    import pretrain_gpt

    count_waits()
    count_by_step()
    pretrain_gpt.main()
    with open(f"{file}.{os.environ['RANK']}", "w") as out:
        json.dump(steps, out)
