"""Activation memory of each schedule, counted in training, beside the simulator's prediction.

CPU ranks over gloo train one GPT through Megatron's training loop, linear schedules in one job, V
schedules in another, an iteration each. Every stage counts the bytes that it keeps for its backward
passes, by storage: what autograd saved in F, chunks' inputs and outputs between F and B, and what
the store keeps between B and W (`megatron.zero_bubble.profile.activations`).

Counted at the ends of passes: there the simulator has its peaks too, since it takes M_B as F starts
and frees it as B ends. What a pass allocates and frees within itself is no part of either. Its
largest is printed apart, as `in a pass`: gradients within some layer's B, about as much under every
schedule.

The prediction: M_B of a stage's chunk is what the F of microbatch 0 adds, M_W what is left of that
after its B, both in the first iteration of the job. `simulate` makes of them the peak of each
schedule. So the peak of an iteration of 12 microbatches is predicted from one microbatch, and that
of most schedules from another schedule's.

Embedding, final norm, output layer and loss are on one stage each, and where depends on placement.
So schedules are compared by what belongs to transformer layers: what is saved in their forwards,
what their W's need, and what stages exchange. `layers` is the peak of that alone.

In CPU mode a stage's output is kept until its B (on GPUs it is freed once it is sent): it counts.
A V has twice as many of them. Gloo keeps each sent message until the end of the iteration. That is
no activation for a backward: it does not count.

Bars: each stage within 5% of its prediction; in layers, the fullest stage of zb-v at most 5% above
that of 1f1b, and those of v-half and v-min at most 5% above the (floor(p/2) + 1)/p and
floor((p+4)/3)/p of 1f1b's that their formulas say. V-Half's pattern does not fit into less. Half of
1f1b's memory and one chunk, (p+1)/(2p), is a limit for the search: `auto` is what it finds.

    .venv/bin/python benchmarks/activation_memory.py
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common import verdict

from megatron.zero_bubble.local_job import run_ranks
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.placement import v_shape
from zero_bubble.schedule import Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

MICROBATCHES = 12
# The first of each job is the one that M_B and M_W are measured in, and so splits B and W.
JOBS = (("zb-h1", "1f1b", "zb-h2"), ("zb-v", "v-half", "v-min", "auto"))
TOLERANCE = 0.05


@dataclass(frozen=True)
class Counted:
    """One schedule's iteration on one stage, in bytes."""

    schedule: str
    stage: int
    amounts: tuple[tuple[int, int], ...]
    """(M_B, M_W) of each chunk."""
    peak: int
    layers: int
    """Peak of what belongs to transformer layers."""
    transient: int
    """Most that a pass allocated beyond what lived before and after it."""
    left: int
    """After the iteration."""
    predicted: float = 0.0

    @property
    def error(self) -> float:
        return self.peak / self.predicted - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4, help="with two layers each (default: 4)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    stages: int = options.stages
    rows: list[Counted] = []
    schedules = {name: schedule_of(name, stages) for names in JOBS for name in names}
    for names in JOBS:
        with tempfile.TemporaryDirectory() as scratch:
            counted = run(Path(scratch), {name: schedules[name] for name in names})
        first = [one for one in counted if one.schedule == names[0]]
        print(f"of one microbatch, KiB, measured in {names[0]}")
        report_amounts(first)
        rows += with_predictions(counted, costs_of(first), schedules)
    report(rows)
    if options.json:
        options.json.write_text(json.dumps([vars(one) for one in rows], indent=1))
    return judge(rows, stages)


def schedule_of(name: str, stages: int) -> Schedule:
    if name != "auto":
        return build(name, stages, MICROBATCHES)
    placement = v_shape(stages)
    chunk = 1.0  # the unit of memory; p M_B are 2p chunks
    costs = Costs.uniform(placement, 1, 1, 1, m_b=chunk, m_w=chunk)
    limit = (stages + 1) * chunk
    return auto(Problem.of(placement, costs, MICROBATCHES, [limit] * stages)).schedule


def run(scratch: Path, schedules: dict[str, Schedule]) -> list[Counted]:
    """Train an iteration by each schedule; by schedule and stage."""
    names, stages = list(schedules), next(iter(schedules.values())).num_stages
    files = [scratch / f"{name}.json" for name in names]
    for schedule, file in zip(schedules.values(), files, strict=True):
        save_schedule(schedule, file)
    worker = str(Path(__file__).with_name("activation_worker.py"))
    flags = f"""--pipeline-model-parallel-size {stages} --num-layers {2 * stages} --hidden-size 64
        --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
        --micro-batch-size 1 --global-batch-size {MICROBATCHES} --train-iters {len(names)}
        --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
        --split 100,0,0 --eval-interval 1000 --eval-iters 0 --log-interval 1000 --num-workers 0
        --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights
        --rerun-mode disabled """.split()
    flags += ["--pipeline-schedule", str(files[0])]
    command = [worker, str(scratch), ",".join(map(str, files)), *flags]
    run_ranks(command, stages, logs=scratch, time_limit=100 * stages)
    counted = [
        Counted(**one)
        for rank in range(stages)
        for one in json.loads((scratch / f"rank{rank}.json").read_text())
    ]
    return sorted(counted, key=lambda one: (names.index(one.schedule), one.stage))


def costs_of(measured: list[Counted]) -> Costs:
    """M_B and M_W of every stage and chunk in bytes. Times do not matter: orders are given."""

    def table(which: int) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(pair[which]) for pair in one.amounts) for one in measured)

    unit = tuple((1.0,) * len(one.amounts) for one in measured)
    return Costs(t_f=unit, t_b=unit, t_w=unit, m_b=table(0), m_w=table(1))


def with_predictions(
    counted: list[Counted], costs: Costs, schedules: dict[str, Schedule]
) -> list[Counted]:
    peaks = {
        name: simulate(schedules[name], costs).peak_memory
        for name in {one.schedule for one in counted}
    }
    return [
        Counted(**{**vars(one), "predicted": peaks[one.schedule][one.stage]}) for one in counted
    ]


def report_amounts(measured: list[Counted]) -> None:
    print(f"{'stage':>5} {'chunk':>5} {'M_B':>9} {'M_W':>9}")
    for one in measured:
        for chunk, (m_b, m_w) in enumerate(one.amounts):
            print(f"{one.stage:>5} {chunk:>5} {kib(m_b)} {kib(m_w)}")
    print()


def report(rows: list[Counted]) -> None:
    print("peak on each stage, KiB")
    print(
        f"{'schedule':<9}{'stage':>5} {'counted':>9} {'predicted':>9} {'error':>7} "
        f"{'layers':>9} {'in a pass':>9}"
    )
    for one in rows:
        print(
            f"{one.schedule:<9}{one.stage:>5} {kib(one.peak)} {kib(one.predicted)} "
            f"{one.error:>7.2%} {kib(one.layers)} {kib(one.transient)}"
        )
    print()


def judge(rows: list[Counted], stages: int) -> int:
    worst = max(rows, key=lambda one: abs(one.error))
    of_1f1b = {
        "zb-v": 1.0,
        "v-half": (stages // 2 + 1) / stages,
        "v-min": (stages + 4) // 3 / stages,
        "auto": (stages + 1) / (2 * stages),
    }
    fullest = {
        name: max(one.layers for one in rows if one.schedule == name)
        for names in JOBS
        for name in names
    }
    results = [
        verdict(
            abs(worst.error) <= TOLERANCE,
            f"each stage within {abs(worst.error):.2%} of its prediction, bar {TOLERANCE:.0%}",
        ),
        verdict(not any(one.left for one in rows), "nothing is kept after an iteration"),
    ]
    for name, share in of_1f1b.items():
        measured, bar = fullest[name] / fullest["1f1b"], share * (1 + TOLERANCE)
        results.append(
            verdict(
                measured <= bar,
                f"{name} keeps {measured:.3f} of what 1f1b does in layers; its "
                f"{'limit' if name == 'auto' else 'formula'} says {share:.3f}, bar {bar:.3f}",
            )
        )
    return max(results)


def kib(nbytes: float) -> str:
    return f"{nbytes / 1024:>9.1f}"


if __name__ == "__main__":
    sys.exit(main())
