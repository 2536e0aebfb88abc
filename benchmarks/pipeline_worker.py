"""One rank of cpu_pipeline.py: trains, another schedule each iteration, and records times."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)
import torch
import torch.distributed as dist
from cpu_pipeline import SCHEDULES
from megatron.core.pipeline_parallel import schedules
from megatron.training import training

import pretrain_gpt
from megatron.zero_bubble.arguments import schedule_for
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.runtime.session import BatchRecord
from zero_bubble.program import Flow, Run, channels_between


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
        """Times of the passes in ms, and sums in seconds, from the event log."""
        ms: dict[str, list[float]] = defaultdict(list)
        compute = waited = overhead = 0
        for event in self.record.events if self.record else ():
            spent = event.end_ns - event.begin_ns - event.waited_ns
            waited += event.waited_ns
            if isinstance(event.instruction, Run):
                ms[event.instruction.what.kind].append(spent / 1e6)
                compute += spent
            else:
                overhead += spent
        return {
            "ms": ms,
            "compute": compute / 1e9,
            "waited": waited / 1e9,
            "overhead": overhead / 1e9,
        }


def timed(function: Any, seconds: list[float]) -> Any:
    def wrapper(**options: Any) -> Any:
        begin = time.perf_counter()
        result = function(**options)
        seconds[0] = time.perf_counter() - begin
        return result

    return wrapper


def message_ms(repeats: int = 20) -> float:
    """Median time of one activation from stage to stage, both sides ready: half a round trip."""
    session = current_session()
    transport, stage = session.transport, int(os.environ["RANK"])
    program = session.program(1, 2, forward_only=False)
    there, back = channels_between(program.placement)
    assert there.flow is Flow.FORWARD
    message = torch.zeros(256, 2, pretrain_gpt.get_args().hidden_size)
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        if stage == 0:
            transport.send(there, message)
            transport.wait(transport.receive(back, torch.empty_like(message)))
        else:
            transport.wait(transport.receive(there, torch.empty_like(message)))
            transport.send(back, message)
        transport.drain()
        times.append((time.perf_counter() - begin) * 1e3 / 2)
    return statistics.median(times)


def main() -> None:
    scratch = Path(sys.argv.pop(1))
    recorder = Recorder()
    training.train_step = recorder
    pretrain_gpt.main()
    result = {"iterations": recorder.iterations, "message_ms": message_ms()}
    (scratch / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
