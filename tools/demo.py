"""Train a small GPT on real text under three schedules, on this machine's CPUs, and compare them.

The text is the source of Python's standard library, bytes as tokens. Two pipeline stages over gloo
train the same model from the same seed with Megatron's own 1F1B, with ZB-H1 and with ZB-H2, through
Megatron's training loop, then evaluate and save a checkpoint. The losses must agree in every bit.

    .venv/bin/python tools/demo.py            (or: make demo)
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.zero_bubble.local_job import JobFailed, run_ranks
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export import svg
from zero_bubble.simulate import Timeline, simulate

ROOT = Path(__file__).resolve().parent.parent
STAGES, MICROBATCHES, MICROBATCH_SIZE = 2, 4, 4
SCHEDULES = {"megatron": "Megatron 1F1B", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2"}
TEXT_BYTES = 4_000_000
TIME_LIMIT = 600.0
BUSY = 1.1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=80)
    parser.add_argument("--output", type=Path, default=ROOT / "demo-output")
    options = parser.parse_args()
    if options.iterations < 10:
        parser.error(f"--iterations {options.iterations}: at least 10")
    output: Path = options.output
    print("Three training runs; together 2 to 4 minutes on two cores.")
    data = prepare(output)
    runs = {}
    for name in SCHEDULES:
        try:
            runs[name] = train(name, options.iterations, data, output)
        except JobFailed as error:
            print(error, file=sys.stderr)
            return 1
    costs = measured_costs(runs)
    predicted = {name: predict(name, costs) for name in SCHEDULES}
    picture = output / "schedules.svg"
    picture.write_text(svg.draw_all(list(predicted.values()), titles=list(SCHEDULES.values())))
    return report(runs, predicted, picture)


@dataclass(frozen=True, slots=True)
class Run:
    """What the two ranks of one training run wrote down."""

    ranks: tuple[dict[str, Any], ...]

    @property
    def losses(self) -> list[str]:
        """Of every iteration, exactly (hexadecimal); the last stage has them."""
        losses: list[str] = self.ranks[-1]["losses"]
        return losses

    @property
    def numbers(self) -> tuple[list[str], list[str], list[str]]:
        """All that must agree between runs: losses, gradient norms, validation losses."""
        last = self.ranks[-1]
        return last["losses"], last["grad_norms"], last["validation"]

    @property
    def samples_per_second(self) -> float:
        """From the median iteration of the second half."""
        seconds: list[float] = self.ranks[0]["seconds"]
        return MICROBATCHES * MICROBATCH_SIZE / statistics.median(seconds[len(seconds) // 2 :])

    def times(self, stage: int, kind: str) -> list[float]:
        """ms of each pass of this kind on a stage, in the second half of the iterations."""
        batches = self.ranks[stage]["batches"]
        return [
            (end - begin) * 1e3
            for batch in batches[len(batches) // 2 :]
            for its_kind, begin, end in batch
            if its_kind == kind
        ]

    def bubble_rate(self) -> float:
        """Median over iterations of (cost - work) / cost, as the paper defines it, of what ran."""
        rates: list[float] = []
        columns = zip(*(rank["batches"] for rank in self.ranks), strict=True)
        for batch in list(columns)[len(self.ranks[0]["batches"]) // 2 :]:
            cost = max(stage[-1][2] - stage[0][1] for stage in batch)
            work = max(sum(end - begin for _, begin, end in stage) for stage in batch)
            rates.append((cost - work) / cost)
        return statistics.median(rates)


def prepare(output: Path) -> Path:
    """The standard library's sources as a data set of Megatron's."""
    sources = sysconfig.get_path("stdlib")
    print(f"Text: the Python standard library in {sources}", flush=True)
    prefix = output / "data" / "text"
    command = [sys.executable, str(ROOT / "tools" / "prepare_text.py"), sources, "--suffix", ".py"]
    command += ["--max-bytes", str(TEXT_BYTES), "--output-prefix", str(prefix), "--overwrite"]
    subprocess.run(command, check=True)
    return prefix


def train(name: str, iterations: int, data: Path, output: Path) -> Run:
    """Train, evaluate and save under one schedule."""
    print(f"\n{SCHEDULES[name]}: training {iterations} iterations ... ", end="", flush=True)
    here = output / name
    shutil.rmtree(here, ignore_errors=True)
    begin = time.perf_counter()
    worker = str(ROOT / "tools" / "demo_worker.py")
    run_ranks(
        [worker, str(here), *megatron_flags(name, iterations, data, here)],
        STAGES,
        logs=here,
        time_limit=TIME_LIMIT,
    )
    seconds = time.perf_counter() - begin
    print(f"done in {seconds:.0f} s, start, evaluation and checkpoint included")
    results = (json.loads((here / f"rank{rank}.json").read_text()) for rank in range(STAGES))
    return Run(tuple(results))


def megatron_flags(name: str, iterations: int, data: Path, here: Path) -> list[str]:
    """Megatron's command line; paths are words of their own, whatever is in them."""
    flags = f"""--pipeline-schedule {name} --pipeline-model-parallel-size {STAGES}
        --num-layers 4 --hidden-size 256 --num-attention-heads 4
        --seq-length 64 --max-position-embeddings 64 --hidden-dropout 0 --attention-dropout 0
        --micro-batch-size {MICROBATCH_SIZE} --global-batch-size {MICROBATCHES * MICROBATCH_SIZE}
        --train-iters {iterations} --lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 5
        --split 90,5,5 --tokenizer-type NullTokenizer --vocab-size 257
        --eval-interval {iterations} --eval-iters 4 --log-interval 10 --seed 1234
        --save-interval {iterations}""".split()
    return [*flags, "--data-path", str(data), "--save", str(here / "checkpoints")]


def measured_costs(runs: dict[str, Run]) -> Costs:
    """Median times of the passes on each stage: F, B and W from ZB-H1, fused ones from Megatron."""

    def times(name: str, kind: str) -> tuple[tuple[float], ...]:
        run = runs[name]
        return tuple((statistics.median(run.times(stage, kind)),) for stage in range(STAGES))

    unit = ((1.0,),) * STAGES
    return Costs(
        t_f=times("zb-h1", "F"),
        t_b=times("zb-h1", "B"),
        t_w=times("zb-h1", "W"),
        t_bw=times("megatron", "BW"),
        m_b=unit,
        m_w=unit,
        t_comm=max(rank["message_ms"] for rank in runs["zb-h1"].ranks),
    )


def predict(name: str, costs: Costs) -> Timeline:
    """What the simulator makes of the measured times."""
    return simulate(build("1f1b" if name == "megatron" else name, STAGES, MICROBATCHES), costs)


def report(runs: dict[str, Run], predicted: dict[str, Timeline], picture: Path) -> int:
    """Print the comparison; the exit code says whether all numbers agree."""
    print(f"\n{'loss at iteration':<20}" + "".join(f"{title:>16}" for title in SCHEDULES.values()))
    iterations = len(runs["megatron"].losses)
    for one in sorted({1, *range(10, iterations + 1, max(10, iterations // 10)), iterations}):
        row = (float.fromhex(run.losses[one - 1]) for run in runs.values())
        print(f"{one:<20}" + "".join(f"{loss:>16.10f}" for loss in row))
    row = (float.fromhex(run.numbers[2][0]) for run in runs.values())
    print(f"{'validation':<20}" + "".join(f"{loss:>16.10f}" for loss in row))

    print(f"\n{'schedule':<16}{'samples/s':>10}{'bubble predicted':>18}{'measured':>10}"
          f"{'activations':>13}")  # fmt: skip
    for name, title in SCHEDULES.items():
        memory = max(predicted[name].peak_memory)
        print(
            f"{title:<16}{runs[name].samples_per_second:>10.1f}"
            f"{predicted[name].bubble_rate:>18.1%}{runs[name].bubble_rate():>10.1%}{memory:>11g} M"
        )
    busy = slowdown(runs)
    if busy > BUSY:
        print(
            f"This machine was busy: the same passes took {busy - 1:.0%} longer in one run than in"
        )
        print("another, so that samples/s do not compare. The losses do.")
    print(
        "(activations: most microbatches held on a stage. Each run starts its stages together, so"
    )
    print("two stages and the optimizer's barrier leave ZB-H2 little to gain over ZB-H1.)")

    print(f"\nPicture of the three schedules with the measured times: {picture}")
    return identical(runs)


def slowdown(runs: dict[str, Run]) -> float:
    """How much longer the forward passes, the same in all runs, took in the slowest of them."""
    medians = [
        statistics.median([ms for stage in range(STAGES) for ms in run.times(stage, "F")])
        for run in runs.values()
    ]
    return max(medians) / min(medians)


def identical(runs: dict[str, Run]) -> int:
    """Compare every loss and gradient norm, bit by bit."""
    reference = runs["megatron"].numbers
    iterations = len(reference[0])
    for name, run in runs.items():
        for what, ours, theirs in zip(
            ("loss", "gradient norm", "validation loss"), run.numbers, reference, strict=True
        ):
            if ours != theirs:
                pairs = itertools.zip_longest(ours, theirs)
                first = next(i for i, pair in enumerate(pairs, 1) if pair[0] != pair[1])
                print(f"DIFFERENT: {what} {first} of {SCHEDULES[name]} is not Megatron's")
                return 1
    begin, end = (float.fromhex(reference[0][i]) for i in (0, -1))
    if end > 0.8 * begin:
        print(f"The loss did not fall: {begin:.3f} to {end:.3f}")
        return 1
    print(f"Loss fell from {begin:.3f} to {end:.3f}.")
    print(f"{', '.join(SCHEDULES.values())}: all {iterations} losses, gradient norms and the")
    print("validation losses of the three runs are bit-identical.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
