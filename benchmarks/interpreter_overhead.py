"""What the interpreter itself costs: microseconds a pass, for programs whose passes are empty.

Two stages over gloo, one thread each. Without messages the bar is 100 us a pass; with messages
(one float each) the figure is mostly gloo's latency between two processes.

    .venv/bin/python benchmarks/interpreter_overhead.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import verdict

from megatron.zero_bubble.local_job import run_ranks

MICROBATCHES = 256
REPEATS = 9
BAR_US = 100.0
SCHEDULES = ("1f1b", "zb-h1", "zb-h2")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    worker: Path | None = parser.parse_args().worker
    if worker is not None:
        measure(worker)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        command = [__file__, "--worker", str(result)]
        run_ranks(command, 2, logs=Path(scratch), time_limit=300)
        figures = json.loads(result.read_text())
    print(f"us a pass, median of {REPEATS} runs of {MICROBATCHES} microbatches, slower stage")
    print(f"{'schedule':<10} {'no messages':>12} {'messages':>10}")
    for name, (alone, together) in figures.items():
        print(f"{name:<10} {alone:>12.1f} {together:>10.1f}")
    worst = max(alone for alone, _ in figures.values())
    return verdict(worst <= BAR_US, f"{worst:.1f} us a pass without messages, bar {BAR_US:g}")


def measure(result: Path) -> None:
    """One stage's part; rank 0 writes {schedule: [us without messages, us with]}."""
    import torch
    import torch.distributed as dist

    from megatron.zero_bubble.runtime.interpreter import Interpreter
    from megatron.zero_bubble.runtime.transport import Transport
    from zero_bubble.builders import build
    from zero_bubble.lower import lower
    from zero_bubble.placement import linear
    from zero_bubble.program import Receive, Run, Send, channels_between

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    stage = int(os.environ["RANK"])
    transport = Transport(
        channels_between(linear(2)),
        stage=stage,
        ranks=(0, 1),
        backend="gloo",
        device=torch.device("cpu"),
        wait_limit=60,
    )

    class Empty:
        """Passes that compute nothing."""

        message = torch.zeros(1)

        def forward(self, chunk, microbatch, input):
            return self.message, self.message if stage == 0 else None

        def backward(self, chunk, microbatch, input, output, output_grad):
            return self.message if stage == 1 else None

        def recompute(self, chunk, microbatch):
            pass

        def weight(self, chunk, microbatch, part=0, parts=1):
            pass

        def buffer(self, flow):
            return torch.empty(1)

        def finalize(self):
            pass

    figures = {}
    for name in SCHEDULES:
        row = lower(build(name, 2, MICROBATCHES)).instructions[stage]
        passes = sum(isinstance(one, Run) for one in row)
        alone = tuple(one for one in row if not isinstance(one, Send | Receive))
        medians = []
        for instructions in (alone, row):
            times = []
            for _ in range(REPEATS):
                dist.barrier()
                begin = time.perf_counter()
                Interpreter(stage, Empty(), transport).run(instructions)
                slower = torch.tensor((time.perf_counter() - begin) / passes * 1e6)
                dist.all_reduce(slower, op=dist.ReduceOp.MAX)
                times.append(slower.item())
            medians.append(statistics.median(times))
        figures[name] = medians
    if stage == 0:
        result.write_text(json.dumps(figures))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
