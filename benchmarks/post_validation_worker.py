"""One rank of post_validation.py: trains as many iterations as it is told, and reports times.

python benchmarks/post_validation_worker.py PORT JOB PAUSE [Megatron's flags]

PAUSE is the least time of an F, a B and a W, in ms: what a pass computes in less is followed by
sleep, so that stages can share a core. 0 leaves passes as they are.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

# isort: split
import torch
import torch.distributed as dist
from megatron.training import get_args, training
from turns import Line

import pretrain_gpt
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.profile.times import batch_times, message_time
from megatron.zero_bubble.runtime.compute import MegatronCompute
from megatron.zero_bubble.runtime.watching import BatchRecord
from zero_bubble.program import Flow

MESSAGES = 20


class Paused:
    """A batch's computations, each lasting at least its time."""

    def __init__(self, compute: MegatronCompute, seconds: float) -> None:
        self._compute, self._seconds = compute, seconds

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._lasting(1, lambda: self._compute.forward(chunk, microbatch, input))

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        passes = 1 if chunk in self._compute.split_chunks else 2
        return self._lasting(
            passes, lambda: self._compute.backward(chunk, microbatch, input, output, output_grad)
        )

    def recompute(self, chunk: int, microbatch: int) -> None:
        self._lasting(1, lambda: self._compute.recompute(chunk, microbatch))

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        self._lasting(1, lambda: self._compute.weight(chunk, microbatch, part, parts))

    def buffer(self, flow: Flow) -> torch.Tensor:
        return self._compute.buffer(flow)

    def finalize(self) -> None:
        self._compute.finalize()

    def _lasting[Result](self, passes: int, compute: Callable[[], Result]) -> Result:
        end = time.perf_counter() + passes * self._seconds
        result = compute()
        time.sleep(max(0.0, end - time.perf_counter()))
        return result


class Recorder:
    """Takes the place of train_step: does the iterations of a turn without a pause in between."""

    def __init__(self, line: Line, pause_ms: float) -> None:
        self.line, self._pause_ms = line, pause_ms
        self.train_step = training.train_step
        self.report: dict[str, Any] | None = None
        """What the last turn brought. It is sent when all that follows its last step is done."""
        self._left = 0

    def __call__(self, *given: Any, **options: Any) -> Any:
        if self._left == 0:
            self._next_turn()
        result = self.train_step(*given, **options)
        self._left -= 1
        assert self.report is not None
        self.report["ends"].append(time.perf_counter())
        return result

    def _next_turn(self) -> None:
        session = current_session()
        if self.report is None:
            session.listeners.append(self._batch)
            if self._pause_ms:
                session.instrument = lambda compute: Paused(compute, self._pause_ms / 1e3)
        self.line.send(self.report)
        self._left = int(self.line.receive())
        self.report = {"ends": [], "batches": [], "ms": []}
        dist.barrier()

    def _batch(self, record: BatchRecord) -> None:
        assert self.report is not None
        events = record.events
        self.report["stage"] = record.stage
        self.report["batches"].append((events[-1].end_ns - events[0].begin_ns) / 1e9)
        times = batch_times(events)
        self.report["ms"] += [(kind, chunk, each) for (kind, chunk), each in times.passes.items()]


def main() -> None:
    port, job, pause_ms = (sys.argv.pop(1) for _ in range(3))
    line = Line.to_coordinator(int(port), job, int(os.environ["RANK"]))
    recorder = Recorder(line, float(pause_ms))
    training.train_step = recorder
    pretrain_gpt.main()
    report = recorder.report
    line.send(report)
    # A last turn, for the time of a message.
    line.receive()
    assert report is not None
    line.send(time_of_message(report["stage"]))


def time_of_message(stage: int) -> float:
    """ms of an activation from stage 0 to stage 1; 0 on the others, which only keep time."""
    args = get_args()
    if stage > 1:
        for _ in range(MESSAGES):
            dist.barrier()
        return 0.0
    shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
    transport = current_session().transport
    return message_time(transport, stage, shape, args.params_dtype, MESSAGES)


if __name__ == "__main__":
    main()
