"""One rank of cpu_pipeline.py: trains, each iteration by the schedule told, and reports times.

python benchmarks/pipeline_worker.py PORT JOB [Megatron's flags]
"""

from __future__ import annotations

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
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args, training
from turns import Line

import pretrain_gpt
from megatron.zero_bubble.arguments import schedule_for
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.profile.times import batch_times, message_time
from megatron.zero_bubble.runtime.watching import BatchRecord


class Recorder:
    """Takes the place of train_step: asks for the iteration's schedule, and times it."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.train_step = training.train_step
        self.stage = -1
        """Of the scheduler, which need not be the pipeline's rank; known from the first batch."""
        self.report: dict[str, Any] | None = None
        """What the last turn brought. It is sent when all that follows a step is done, too."""
        self._record: BatchRecord | None = None

    def __call__(self, *given: Any, **options: Any) -> Any:
        self.line.send(self.report)
        forward_backward = self._choose(self.line.receive())
        passes = [0.0]
        given = (*given[:6], timed(forward_backward, passes), *given[7:])
        dist.barrier()
        begin = time.perf_counter()
        result = self.train_step(*given, **options)
        dist.barrier()
        seconds = time.perf_counter() - begin
        later = torch.tensor(passes[0])
        dist.all_reduce(later, op=dist.ReduceOp.MAX)
        self.report = {"seconds": seconds, "passes": later.item(), **self._details()}
        return result

    def _choose(self, name: str) -> Any:
        """The forward_backward function that runs this schedule."""
        self._record = None
        if name == "megatron":
            return schedules.forward_backward_pipelining_without_interleaving
        session = current_session()
        session.listeners[:] = [partial(setattr, self, "_record")]
        session.reschedule(partial(schedule_for, name))
        # Now, since training does it once and not in every iteration.
        stages = get_args().pipeline_model_parallel_size
        session.program(get_num_microbatches(), stages, forward_only=False)
        return session.forward_backward

    def _details(self) -> dict[str, Any]:
        """From the event log: the stage, ms of each pass by kind and chunk, and sums in seconds."""
        if self._record is None:
            return {}
        self.stage = self._record.stage
        times = batch_times(self._record.events)
        return {
            "stage": self.stage,
            "ms": [(kind, chunk, each) for (kind, chunk), each in times.passes.items()],
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
    port, job = sys.argv.pop(1), sys.argv.pop(1)
    line = Line.to_coordinator(int(port), job, int(os.environ["RANK"]))
    recorder = Recorder(line)
    training.train_step = recorder
    pretrain_gpt.main()
    line.send(recorder.report)
    # A last turn, for the time of a message.
    line.receive()
    args = get_args()
    shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
    transport = current_session().transport
    line.send(message_time(transport, recorder.stage, shape, args.params_dtype))


if __name__ == "__main__":
    main()
