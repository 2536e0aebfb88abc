"""One GPU as a pipeline: every schedule on N ranks that share it, side by side with Megatron's.

    PYTHONPATH=. python tools/profile/one_gpu_pipeline.py --ranks 4
    PYTHONPATH=. python tools/profile/one_gpu_pipeline.py --device cpu --ranks 2

MPS gives each rank a share of the GPU of its own, so that one rank's idle time is really idle and a
bubble costs time. Ranks talk over NCCL, by sockets: it takes them for different hosts. So kernels
and messages are real, and the ratio of two schedules in one call is a measurement; absolute times
are those of a quarter of a GPU and of slow messages. MPS is started with directories of its own,
and stopped in any case. No setting of the GPU is changed.

A placement is a job, and so is each with post-validation, since models or steps differ. Jobs run
one after the other. Within a job schedules take turns of five iterations, of which three are timed.
Each turn begins with the same weights, drawn by their names in the model, with a fresh optimizer,
and with the same data. So losses, and all parameters after a turn, must have the bits of
Megatron's own 1F1B, whatever the placement. auto-1p and auto-2p are searched for within the job, by
what 1f1b and zb-h1 took in it. Layers of Transformer Engine are built to delay weight gradients or
not to, so that with them schedules that split have a job of their own.

Bars: those bits; activations of each stage within 10 % of what the simulator says; with 4 ranks and
12 microbatches auto-2p, without or with post-validation, at least 1.12 of Megatron's 1F1B.

With --device cpu the same runs over gloo at toy size. Its times mean nothing for GPUs, and a CPU
with fewer cores than ranks has no idle stages at all.

Needs torch, megatron-core, numpy, and this checkout on PYTHONPATH. numba and llvmlite are needed
for auto-*, zb-v, v-half and v-min, which are searched for; without them these are left out. psutil
is not needed: nothing is saved. To take it to a machine without a network: the checkout, and the
wheels of megatron-core, numba and llvmlite (57 MiB).

Exit code: 0 if all bars are met, 1 if one is missed or a rank failed, 2 for a user's error, 3
without a GPU or MPS, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # In place of this script's own directory, whose modules have names of the standard library's.
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from megatron.zero_bubble.local_job import JobFailed, run_ranks
from megatron.zero_bubble.signals import stopping_once
from tools.profile.one_gpu.device import Unavailable, mps, require_device, shared_environment
from tools.profile.one_gpu.measured import MeasuredTurn, load_turns
from tools.profile.one_gpu.options import (
    ROUNDS,
    parser,
    require_size,
    schedules_of,
    size_of,
    validation_of,
    variables,
)
from tools.profile.one_gpu.plan import (
    ITERATIONS,
    Job,
    Size,
    jobs_of,
    megatron_flags,
    plan_of,
    write_schedules,
)
from tools.profile.one_gpu.report import Result, lines, results_of, share_of, verdicts
from zero_bubble.amount import amount
from zero_bubble.cli.common import UsageError
from zero_bubble.cli.output import require_writable
from zero_bubble.export.svg import draw_all

UNAVAILABLE, STOPPED = 3, 130
START_SECONDS = 400.0
"""What a job may take to start, and to search."""
SECONDS_AN_ITERATION = 15.0
WORKER = Path(__file__).resolve().parent / "one_gpu" / "worker.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; see the top of the file."""
    try:
        with stopping_once():  # so that ranks and MPS are ended
            return run(parser(__doc__).parse_args(argv))
    except Unavailable as error:
        print(
            f"one_gpu_pipeline.py: {error}. --device cpu tries the same at toy size",
            file=sys.stderr,
        )
        return UNAVAILABLE
    except (UsageError, OSError) as error:
        print(f"one_gpu_pipeline.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("one_gpu_pipeline.py: stopped", file=sys.stderr)
        return STOPPED


def run(options: argparse.Namespace) -> int:
    size = size_of(options)
    schedules = schedules_of(options)
    validation = validation_of(options)
    given = variables(options.env)
    for flag in ("json", "svg"):
        if getattr(options, flag) is not None:
            require_writable(f"--{flag}", getattr(options, flag))
    require_size(options.ranks, size, schedules)
    multiprocessors = 0
    if options.device == "cuda":
        multiprocessors = require_device()
    else:
        print("on CPUs, over gloo, at toy size: times mean nothing for GPUs", flush=True)
    begin = time.monotonic()
    jobs = jobs_of(schedules, validation, size.layer)
    with scratch(options.logs) as directory, sharing(options.device) as clients:
        write_schedules(jobs, options.ranks, size, directory)
        environment = shared_environment(options.device, options.ranks, clients | given)
        measured, failed = run_jobs(jobs, options, size, directory, environment)
        if not measured[jobs[0]]:  # which begins with Megatron's 1F1B
            return 1
        results = results_of(measured, options.ranks, size)
    print(f"\n{options.ranks} stages, {size.microbatches} microbatches; medians of turns")
    print("\n".join(lines(results)))
    bars = verdicts(results, options.ranks, size, times_count=options.device == "cuda")
    if multiprocessors:
        bars.insert(0, share_of(measured, options.ranks, multiprocessors))
    else:
        print("not judged: the gain over Megatron's 1F1B, since times of CPUs say nothing of GPUs")
    bars += [(False, f"job {one} failed, as said above") for one in failed]
    for met, sentence in bars:
        print(f"{'met' if met else 'MISSED'}: {sentence}")
    code = int(not all(met for met, _ in bars))
    seconds = time.monotonic() - begin
    print(f"{seconds:.0f} s in all")
    save(options, size, results, seconds)
    return code


@contextmanager
def scratch(logs: str | None) -> Iterator[Path]:
    """A directory for schedules, logs and measurements; kept if it is asked for."""
    if logs is None:
        with tempfile.TemporaryDirectory() as directory:
            yield Path(directory)
        return
    path = Path(logs).resolve()
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise UsageError(f"--logs {logs}: it is not empty, and what is in it would be mixed up")
    yield path


@contextmanager
def sharing(device: str) -> Iterator[dict[str, str]]:
    """MPS where it is needed; yields the variables of its clients."""
    if device == "cpu":
        yield {}
        return
    with mps() as clients:
        yield clients


def run_jobs(
    jobs: Sequence[Job],
    options: argparse.Namespace,
    size: Size,
    directory: Path,
    environment: Mapping[str, str],
) -> tuple[dict[Job, list[MeasuredTurn]], list[str]]:
    """Run all jobs, one after the other.

    Returns:
        Their turns, also of a job that failed after some; and the names of those that failed.
    """
    rounds = options.rounds or ROUNDS[options.device]
    measured, failed = {}, []
    for job in jobs:
        plan = plan_of(job, rounds, options.device, directory)
        where, file = Path(plan.directory), directory / f"{job.name}.json"
        where.mkdir()
        plan.save(file)
        begin = time.monotonic()
        try:
            run_ranks(
                [
                    str(WORKER),
                    str(file),
                    *megatron_flags(job, plan, options.ranks, size, directory),
                ],
                options.ranks,
                logs=where,
                time_limit=START_SECONDS + SECONDS_AN_ITERATION * ITERATIONS * len(plan.turns),
                environment=environment,
            )
        except JobFailed as error:
            print(f"one_gpu_pipeline.py: job {job.name}: {error}", file=sys.stderr, flush=True)
            failed.append(job.name)
        measured[job] = load_turns(where, options.ranks)
        seconds = time.monotonic() - begin
        print(f"job {job.name}: {', '.join(job.schedules)}; {seconds:.0f} s", flush=True)
    return measured, failed


def save(
    options: argparse.Namespace, size: Size, results: Sequence[Result], seconds: float
) -> None:
    if options.json is not None:
        data = {
            "device": options.device,
            "ranks": options.ranks,
            **asdict(size),
            "seconds": seconds,
            "schedules": [as_json(one) for one in results],
        }
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if options.svg is not None:
        drawn = [(one.timeline, one.label) for one in results if one.timeline is not None]
        titles = [f"{label}: one iteration" for _, label in drawn]
        text = draw_all([one for one, _ in drawn], titles=titles, amount=amount)
        Path(options.svg).write_text(text, encoding="utf-8")


def as_json(result: Result) -> dict[str, Any]:
    """All of a row but its timeline."""
    return {
        name: getattr(result, name) for name in Result.__dataclass_fields__ if name != "timeline"
    }


if __name__ == "__main__":
    sys.exit(main())
