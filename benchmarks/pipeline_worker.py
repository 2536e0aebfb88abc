"""One rank of cpu_pipeline.py: trains, another schedule each iteration, and records times."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

# isort: split
import torch
import torch.distributed as dist
from cpu_pipeline import SCHEDULES
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args, training

import pretrain_gpt
from megatron.zero_bubble.arguments import schedule_for
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.profile.times import batch_times, message_time
from megatron.zero_bubble.runtime.session import BatchRecord


class Recorder:
    """Takes the place of train_step: chooses the iteration's schedule, and times it."""

    def __init__(self) -> None:
        self.train_step = training.train_step
        self.iterations: list[dict[str, Any]] = []
        self.record: BatchRecord | None = None

    def __call__(self, *given: Any, **options: Any) -> Any:
        session = current_session()
        name = SCHEDULES[len(self.iterations) % len(SCHEDULES)]
        forward_backward = schedules.forward_backward_pipelining_without_interleaving
        self.record = None
        if name != "megatron":
            session.listeners[:] = [partial(setattr, self, "record")]
            session.reschedule(partial(schedule_for, name))
            forward_backward = session.forward_backward
        passes = [0.0]
        given = (*given[:6], timed(forward_backward, passes), *given[7:])
        dist.barrier()
        begin = time.perf_counter()
        result = self.train_step(*given, **options)
        dist.barrier()
        seconds = time.perf_counter() - begin
        later = torch.tensor(passes[0])
        dist.all_reduce(later, op=dist.ReduceOp.MAX)
        self.iterations.append(
            {"schedule": name, "seconds": seconds, "passes": later.item(), **self.details()}
        )
        return result

    def details(self) -> dict[str, Any]:
        """From the event log: ms of each pass, by kind, and sums in seconds."""
        times = batch_times(self.record.events if self.record else ())
        return {
            "ms": times.passes,
            "compute": times.compute / 1e3,
            "waited": times.waited / 1e3,
            "overhead": times.messages / 1e3,
        }


def timed(function: Any, seconds: list[float]) -> Any:
    def wrapper(**options: Any) -> Any:
        begin = time.perf_counter()
        result = function(**options)
        seconds[0] = time.perf_counter() - begin
        return result

    return wrapper


def main() -> None:
    scratch = Path(sys.argv.pop(1))
    recorder = Recorder()
    training.train_step = recorder
    pretrain_gpt.main()
    args, rank = get_args(), int(os.environ["RANK"])
    shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
    message_ms = message_time(current_session().transport, rank, shape, args.params_dtype)
    result = {"iterations": recorder.iterations, "message_ms": message_ms}
    (scratch / f"rank{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
