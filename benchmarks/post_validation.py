"""What optimizer post-validation gains: iteration times without and with it, side by side.

For every schedule and number of stages two jobs train the same model and take turns of a few
iterations, so that noise meets both alike. Nothing meets between the iterations of a turn but what
training itself makes meet. An iteration's time is the mean distance between the ends of
iterations in a turn, on the stage where it is longest. The first iteration of a turn, which all
stages begin together, is left out.

The prediction is `zero_bubble.period` with the times of passes and messages, and of what else is in
an iteration, measured in the job without post-validation.

Where the machine has fewer cores than stages, passes are short and followed by sleep: a pass lasts
`PAUSE_MS`. That shows what the order of events gains, and not what a machine can compute.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common import verdict
from small_job import Report, measured_costs, megatron_flags
from turns import jobs_in_turns

from zero_bubble.builders import BUILDERS, build
from zero_bubble.costs import Costs
from zero_bubble.period import period_behind_barrier, period_with_run_ahead

__all__ = ["FLAG", "SCHEDULES", "STAGES", "Comparison", "as_json", "compare", "report"]

FLAG = "--optimizer-post-validation"
SCHEDULES = ("zb-h2", "zb-v")
"""Those that are without a bubble only if there is no barrier."""
STAGES = (2, 4)
"""The model's 8 layers can be spread evenly over chunks of these."""
OFF, ON = "off", "on"
ITERATIONS = 5
"""Of a turn."""
PAUSE_MS = 50.0
PAUSED_HIDDEN, PAUSED_SEQUENCE = 64, 32
START_SECONDS, SECONDS_AN_ITERATION = 300.0, 30.0
"""What a job may take to start, and an iteration on average."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one schedule on one number of stages; times in ms."""

    schedule: str
    stages: int
    microbatches: int
    paused: bool
    off: float
    on: float
    ratio: float
    """Median over repeats of the time without post-validation over the time with it."""
    predicted: float
    pass_ms: float
    """Mean of the times of F, B and W."""
    rest_ms: float
    """What is in an iteration without post-validation but its passes."""


def compare(schedule: str, stages: int, *, repeats: int, hidden: int, pauses: bool) -> Comparison:
    """Train in turns.

    Raises:
        JobFailed: names the rank that failed, and shows the end of its log.
    """
    paused = pauses or (os.cpu_count() or 1) < stages
    microbatches = 2 * stages
    flags = megatron_flags(
        schedule,
        stages=stages,
        microbatches=microbatches,
        # One more at the end, since the last of a run does not run ahead.
        iterations=ITERATIONS * (1 + repeats) + 1,
        hidden=PAUSED_HIDDEN if paused else hidden,
        sequence=PAUSED_SEQUENCE if paused else 256,
    )
    # Megatron's default clips this model's gradients in every iteration.
    flags = [str(PAUSE_MS if paused else 0), *flags, "--clip-grad", "1e6"]
    turns: dict[str, list[list[Report]]] = {OFF: [], ON: []}
    with (
        tempfile.TemporaryDirectory() as scratch,
        jobs_in_turns(
            Path(__file__).with_name("post_validation_worker.py"),
            {OFF: flags, ON: [*flags, FLAG]},
            stages,
            logs=Path(scratch),
            time_limit=START_SECONDS + SECONDS_AN_ITERATION * 2 * ITERATIONS * (1 + repeats),
        ) as jobs,
    ):
        for _ in range(1 + repeats):
            for job, its_turns in turns.items():
                its_turns.append(jobs.turn(job, str(ITERATIONS)))
        for job in turns:
            jobs.turn(job, "1")
        message_ms = {job: max(jobs.turn(job, "message")) for job in turns}[OFF]
    off, on = ([period(turn) for turn in turns[job][1:]] for job in (OFF, ON))
    counted = turns[OFF][1:]
    placement = BUILDERS[schedule].placement(stages)
    costs = measured_costs(placement, [one for turn in counted for one in turn], message_ms)
    rest = statistics.median(rest_ms(turn) for turn in counted)
    return Comparison(
        schedule,
        stages,
        microbatches,
        paused,
        off=statistics.median(off),
        on=statistics.median(on),
        ratio=statistics.median(one / other for one, other in zip(off, on, strict=True)),
        predicted=predicted_ratio(schedule, stages, microbatches, costs, rest),
        pass_ms=mean_pass(costs),
        rest_ms=rest,
    )


def period(turn: Sequence[Report]) -> float:
    """ms from one iteration to the next in a turn, on the stage where that is longest."""
    return max((one["ends"][-1] - one["ends"][0]) / (len(one["ends"]) - 1) for one in turn) * 1e3


def rest_ms(turn: Sequence[Report]) -> float:
    """ms of an iteration behind a barrier that are not in its batch, on the slowest stage."""
    batches = [max(each) for each in zip(*(one["batches"][1:] for one in turn), strict=True)]
    return period(turn) - statistics.mean(batches) * 1e3


def predicted_ratio(
    schedule: str, stages: int, microbatches: int, costs: Costs, rest: float
) -> float:
    order = build(schedule, stages, microbatches)
    behind = period_behind_barrier(order, costs, step=rest)
    return behind / period_with_run_ahead(order, costs, step=rest)


def mean_pass(costs: Costs) -> float:
    return statistics.mean(
        time for table in (costs.t_f, costs.t_b, costs.t_w) for row in table for time in row
    )


def report(found: Sequence[Comparison], least_share: float) -> int:
    """Print the table, and say whether enough of each predicted gain was met; the exit code."""
    print(
        f"{'schedule':<15}{'stages':>7}{'microbatches':>13}{'passes ms':>15}{'rest':>7}"
        f"{'off ms':>9}{'on ms':>9}{'off/on':>8}{'predicted':>11}"
    )
    for one in found:
        passes = f"{one.pass_ms:.1f}" + (" (paused)" if one.paused else "")
        print(
            f"{one.schedule:<15}{one.stages:>7}{one.microbatches:>13}{passes:>15}{one.rest_ms:>7.1f}"
            f"{one.off:>9.1f}{one.on:>9.1f}{one.ratio:>8.3f}{one.predicted:>11.3f}"
        )
    print()
    return max(_verdict(one, least_share) for one in found)


def _verdict(one: Comparison, least_share: float) -> int:
    gain, promised = one.ratio - 1, one.predicted - 1
    name = f"{one.schedule} on {one.stages} stages"
    if promised < 0.01:
        return verdict(gain > -0.05, f"{name} loses {-gain:.1%}; no gain is predicted, bar 5%")
    figure = f"{name} gains {gain:.1%} of {promised:.1%} predicted: {gain / promised:.0%}"
    return verdict(gain / promised >= least_share, f"{figure}, bar {least_share:.0%}")


def as_json(found: Sequence[Comparison]) -> list[Mapping[str, float | str]]:
    return [
        {
            "schedule": one.schedule,
            "stages": one.stages,
            "off_ms": one.off,
            "on_ms": one.on,
            "measured_ratio": one.ratio,
            "predicted_ratio": one.predicted,
        }
        for one in found
    ]
