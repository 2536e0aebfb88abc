"""Throughput of our schedules over Megatron's own 1F1B, on two CPU stages, side by side.

Ranks over gloo, two a job and one thread each, train one GPT through Megatron's training loop.
Every iteration runs one schedule; they take turns, so that noise meets all alike. A placement has
a job of its own, since its model is built differently: as many layers in all, in chunks of its own.
All jobs are alive from start to end, and idle but for the one that has the turn.

Printed beside the measured ratios are those that the simulator predicts from the times of F, B, W,
fused backward and messages measured in the same run, for every chunk of every placement. The
optimizer's barrier counts: an iteration ends for both stages when the later one ends, and only then
come the reductions and the step.

Bars, where these schedules are asked for: 1f1b at least 0.97 of Megatron's; zb-h1 at least 60% of
its predicted gain. What is missing to the prediction is listed by cause, from the event log.

    .venv/bin/python benchmarks/cpu_pipeline.py
    .venv/bin/python benchmarks/cpu_pipeline.py --schedules 1f1b,interleaved,zb-h2,zb-v
    .venv/bin/python benchmarks/cpu_pipeline.py --post-validation off,on

The last compares our schedules with themselves: without --optimizer-post-validation and with it, on
2 and 4 stages (see post_validation.py). Bar: 60% of the predicted gain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import post_validation
from common import verdict
from small_job import Report, measured_costs, megatron_flags
from turns import jobs_in_turns

from megatron.zero_bubble.local_job import JobFailed
from zero_bubble.builders import BUILDERS, build
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement
from zero_bubble.simulate import Timeline, simulate

STAGES, MICROBATCHES = 2, 4
MEGATRON, REFERENCE = "megatron", "1f1b"
"""Megatron's own 1F1B, and the schedule of ours with the same passes: its times predict both."""
SCHEDULES = (REFERENCE, "zb-h1", "zb-h2")
WARM_UP = 1
LEAST_1F1B, LEAST_SHARE = 0.97, 0.60
START_SECONDS, SECONDS_AN_ITERATION = 300.0, 30.0
"""What a job may take to start, and an iteration on average."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What one placement's job measured, warm-up left out."""

    placement: Placement
    iterations: Mapping[str, Sequence[Sequence[Report]]]
    """By schedule: of every round the reports, one a stage."""
    message_ms: float

    def reports(self) -> Iterator[Report]:
        """Of all schedules, rounds and stages."""
        for rounds in self.iterations.values():
            for stages in rounds:
                yield from stages

    def median(self, name: str, what: str, stage: int = 0) -> float:
        """Of a schedule's iterations."""
        return statistics.median(stages[stage][what] for stages in self.iterations[name])

    def rest_ms(self) -> float:
        """An iteration without its passes: the optimizer and its barrier."""
        return statistics.median(one["seconds"] - one["passes"] for one in self.reports()) * 1e3

    def costs(self) -> Costs:
        """Of the passes and of a message."""
        return measured_costs(self.placement, self.reports(), self.message_ms)


def main() -> int:
    options = parse()
    if options.post_validation:
        return without_and_with_the_flag(options)
    asked: list[str] = options.schedules
    names = tuple(dict.fromkeys((MEGATRON, REFERENCE, *asked)))
    with tempfile.TemporaryDirectory() as scratch:
        try:
            jobs = run(Path(scratch), names, options.repeats, options.hidden)
        except JobFailed as error:
            print(error, file=sys.stderr)
            return 1
    measured = {name: jobs[placement_of(name).name] for name in names}
    predicted = {
        name: simulate(build(ours(name), STAGES, MICROBATCHES), measured[name].costs())
        for name in names
    }
    lasts = {name: span(predicted[name]) + measured[name].rest_ms() for name in names}
    figures = {
        name: {
            "measured_ratio": measured_ratio(measured, name),
            "predicted_ratio": lasts[MEGATRON] / lasts[name],
            "iteration_ms": measured[name].median(name, "seconds") * 1e3,
        }
        for name in names
    }
    report(jobs, figures)
    account(measured, predicted)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return verdicts(asked, figures)


def without_and_with_the_flag(options: argparse.Namespace) -> int:
    found = []
    for stages in options.stages:
        for name in options.schedules:
            try:
                one = post_validation.compare(
                    name,
                    stages,
                    repeats=options.repeats,
                    hidden=options.hidden,
                    pauses=options.pauses,
                )
            except JobFailed as error:
                print(error, file=sys.stderr)
                return 1
            found.append(one)
    if options.json:
        options.json.write_text(json.dumps(post_validation.as_json(found), indent=1))
    return post_validation.report(found, LEAST_SHARE)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9, help="iterations of each schedule")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument(
        "--schedules",
        metavar="NAME,...",
        help=f"known: {', '.join(BUILDERS)}. Beside Megatron's own; {REFERENCE} always runs then, "
        f"since predictions need its times (default: {','.join(SCHEDULES)}; with "
        f"--post-validation {','.join(post_validation.SCHEDULES)})",
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    group = parser.add_argument_group("post-validation")
    group.add_argument(
        "--post-validation",
        choices=["off,on"],
        metavar="off,on",
        help="compare each schedule without and with --optimizer-post-validation",
    )
    group.add_argument(
        "--stages",
        default="2,4",
        metavar="P,...",
        help="numbers of stages to compare on: some of "
        f"{', '.join(map(str, post_validation.STAGES))} (default: %(default)s)",
    )
    group.add_argument(
        "--pauses",
        action="store_true",
        help="sleep in place of computing, as where there are fewer cores than stages",
    )
    options = parser.parse_args()
    if options.repeats < 7:
        parser.error(f"--repeats {options.repeats}: the medians need at least 7")
    default = post_validation.SCHEDULES if options.post_validation else SCHEDULES
    options.schedules = options.schedules.split(",") if options.schedules else list(default)
    for name in options.schedules:
        if name not in BUILDERS:
            parser.error(f"--schedules {name}: no such schedule; known: {', '.join(BUILDERS)}")
    given, options.stages = options.stages, []
    for one in given.split(","):
        if not one.isdigit() or int(one) not in post_validation.STAGES:
            known = ", ".join(map(str, post_validation.STAGES))
            parser.error(f"--stages {given}: expected some of {known}, with commas between")
        options.stages.append(int(one))
    return options


def ours(name: str) -> str:
    """The builder whose schedule this is."""
    return REFERENCE if name == MEGATRON else name


def placement_of(name: str) -> Placement:
    return BUILDERS[ours(name)].placement(STAGES)


def run(scratch: Path, names: Sequence[str], repeats: int, hidden: int) -> dict[str, Measured]:
    """Train by all schedules in turns; by placement, what its job measured."""
    placements = {placement_of(name).name: placement_of(name) for name in names}
    its_names = {
        job: [name for name in names if placement_of(name) == placement]
        for job, placement in placements.items()
    }
    flags = {
        job: megatron_flags(
            ours(some[0]),
            stages=STAGES,
            microbatches=MICROBATCHES,
            iterations=(WARM_UP + repeats) * len(some),
            hidden=hidden,
        )
        for job, some in its_names.items()
    }
    rounds: list[dict[str, list[Report]]] = []
    with jobs_in_turns(
        Path(__file__).with_name("pipeline_worker.py"),
        flags,
        STAGES,
        logs=scratch,
        time_limit=START_SECONDS + SECONDS_AN_ITERATION * (WARM_UP + repeats) * len(names),
    ) as jobs:
        for _ in range(WARM_UP + repeats):
            rounds.append({name: jobs.turn(placement_of(name).name, name) for name in names})
        messages = {job: max(jobs.turn(job, "message")) for job in placements}
    return {
        job: Measured(
            placement,
            {name: [by_stage(one[name]) for one in rounds[WARM_UP:]] for name in its_names[job]},
            messages[job],
        )
        for job, placement in placements.items()
    }


def by_stage(reports: list[Report]) -> list[Report]:
    """Reports of the ranks, put in the order of their stages. Those of Megatron name no stage."""
    return sorted(reports, key=lambda one: one.get("stage", 0))


def span(timeline: Timeline) -> float:
    """ms from the common start of all stages to the end of the last pass."""
    return max(row[-1].end for row in timeline.spans)


def measured_ratio(measured: Mapping[str, Measured], name: str) -> float:
    """Median over rounds of Megatron's iteration time over this schedule's in the same round."""
    theirs, mine = (measured[one].iterations[one] for one in (MEGATRON, name))
    return statistics.median(
        one[0]["seconds"] / other[0]["seconds"] for one, other in zip(theirs, mine, strict=True)
    )


def report(jobs: Mapping[str, Measured], figures: Mapping[str, Mapping[str, float]]) -> None:
    print(f"{STAGES} stages, {MICROBATCHES} microbatches; medians, ms")
    print(f"{'placement':<13}{'stage':>5}{'chunk':>7}{'F':>9}{'B':>8}{'W':>8}{'fused':>8}")
    for job, measured in jobs.items():
        costs = measured.costs()
        tables = (costs.t_f, costs.t_b, costs.t_w, costs.t_bw or ())
        for stage, row in enumerate(measured.placement.positions):
            for chunk in range(len(row)):
                cells = (f"{one[stage][chunk]:8.1f}" if one[stage][chunk] else f"{'-':>8}"
                         for one in tables)  # fmt: skip
                print(f"{job:<13}{stage:>5}{chunk:>7} " + "".join(cells))
    for job, measured in jobs.items():
        print(
            f"{job}: a message {measured.message_ms:.2f}, "
            f"optimizer and its barrier {measured.rest_ms():.1f}"
        )
    print()
    width = max(10, *(len(name) + 2 for name in figures))
    print(f"{'schedule':<{width}}{'iteration ms':>13}{'over Megatron':>15}{'predicted':>11}")
    for name, one in figures.items():
        print(
            f"{name:<{width}}{one['iteration_ms']:>13.1f}{one['measured_ratio']:>15.3f}"
            f"{one['predicted_ratio']:>11.3f}"
        )


def account(measured: Mapping[str, Measured], predicted: Mapping[str, Timeline]) -> None:
    """Where an iteration's time goes, measured (and predicted), in ms."""
    width = max(10, *(len(name) + 2 for name in measured))
    print()
    print("where an iteration's time goes: measured (predicted), ms")
    print(
        f"{'schedule':<{width}}{'stage':>6}{'passes':>20}{'waiting':>20}{'messages':>10}{'rest':>20}"
    )
    for name, job in measured.items():
        if name == MEGATRON:
            continue
        end, rest = span(predicted[name]), job.rest_ms()
        for stage, spans in enumerate(predicted[name].spans):
            work = sum(one.end - one.start for one in spans)
            cells = {key: job.median(name, key, stage) * 1e3
                     for key in ("compute", "waited", "overhead", "seconds")}  # fmt: skip
            others = cells["seconds"] - cells["compute"] - cells["waited"] - cells["overhead"]
            # A stage that is done waits for the other in the optimizer's first reduction.
            idle_at_end = end - spans[-1].end
            print(
                f"{name:<{width}}{stage:>6}"
                f"{cells['compute']:>11.1f} ({work:6.1f})"
                f"{cells['waited']:>11.1f} ({end - work - idle_at_end:6.1f})"
                f"{cells['overhead']:>10.1f}"
                f"{others:>11.1f} ({rest + idle_at_end:6.1f})"
            )
    print()


def verdicts(asked: Sequence[str], figures: Mapping[str, Mapping[str, float]]) -> int:
    """Say of the schedules asked for whether those with a bar meet it; the exit code."""
    code = 0
    if REFERENCE in asked:
        fair = figures[REFERENCE]["measured_ratio"]
        figure = f"1f1b runs at {fair:.3f} of Megatron's, bar {LEAST_1F1B}"
        code = max(code, verdict(fair >= LEAST_1F1B, figure))
    if "zb-h1" in asked:
        gain, promised = (figures["zb-h1"][f"{one}_ratio"] - 1 for one in ("measured", "predicted"))
        share = gain / promised
        figure = (
            f"zb-h1 gains {gain:.1%} of {promised:.1%} predicted: {share:.0%}, bar "
            f"{LEAST_SHARE:.0%}"
        )
        code = max(code, verdict(promised > 0 and share >= LEAST_SHARE, figure))
    return code


if __name__ == "__main__":
    sys.exit(main())
