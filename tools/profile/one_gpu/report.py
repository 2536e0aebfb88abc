"""From turns to a row for each schedule, the table, and the bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.profile.one_gpu.measured import (
    MeasuredTurn,
    Report,
    costs_of,
    iteration_ms,
    megatrons_bubble,
    split_ratio,
)
from tools.profile.one_gpu.plan import FUSED, MEGATRON, Job, Size, schedule_of
from zero_bubble.amount import BYTES
from zero_bubble.cli.table import table
from zero_bubble.costs import Costs
from zero_bubble.simulate import Timeline, simulate
from zero_bubble.trace.measured import Measured

__all__ = [
    "LEAST_GAIN",
    "MEMORY_TOLERANCE",
    "Result",
    "difference",
    "lines",
    "memory_error",
    "results_of",
    "share_of",
    "verdicts",
]

LEAST_GAIN = 1.12
"""Of `GAINING` over Megatron's 1F1B, with the stages and microbatches below."""
GAINING, GAINS_WITH = "auto-2p", (4, 12)
MEMORY_TOLERANCE = 0.10
SHARE_TOLERANCE = 1.1
"""Shares are rounded to what the GPU can give."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What the turns of one schedule say, medians over rounds; memory by stage, in bytes."""

    schedule: str
    validates: bool
    iteration_ms: float
    samples_per_second: float
    ratio: float
    """Time of Megatron's 1F1B over this one's."""
    bubble: float | None
    """Measured, of the passes alone; None where their times are not known."""
    predicted_bubble: float | None
    memory: tuple[int | None, ...]
    """Most bytes of activations after a pass."""
    predicted_memory: tuple[float, ...]
    allocated: int
    """Most bytes that torch had allocated on a rank; 0 on a CPU."""
    different: str | None
    """The first difference of a turn's losses or parameters from those of Megatron's 1F1B."""
    split_ratio: float | None
    """(B + W) / fused backward in the times of this placement."""
    timeline: Timeline | None = None
    """Of one iteration, with the memory of another; None for Megatron's own."""

    @property
    def label(self) -> str:
        return f"{self.schedule}, validated" if self.validates else self.schedule


def results_of(jobs: Mapping[Job, Sequence[MeasuredTurn]], ranks: int, size: Size) -> list[Result]:
    """A row for each schedule of each job, in their order.

    Raises:
        ValueError: no turn of Megatron's 1F1B is there to compare with.
    """
    theirs = [one for turns in jobs.values() for one in turns if one.label == MEGATRON]
    if not theirs:
        raise ValueError("no turn of Megatron's 1F1B has ended")
    return [
        _result(
            job,
            name,
            [one for one in turns if one.label == name],
            _like(job, jobs),
            theirs,
            ranks,
            size,
        )
        for job, turns in jobs.items()
        for name in job.schedules
        if any(one.label == name for one in turns)
    ]


def _like(job: Job, jobs: Mapping[Job, Sequence[MeasuredTurn]]) -> list[MeasuredTurn]:
    """All turns of the placement, with post-validation or without."""
    return [
        turn
        for other, turns in jobs.items()
        if (other.placement, other.validates) == (job.placement, job.validates)
        for turn in turns
    ]


def _result(
    job: Job,
    name: str,
    mine: Sequence[MeasuredTurn],
    alike: Sequence[MeasuredTurn],
    theirs: Sequence[MeasuredTurn],
    ranks: int,
    size: Size,
) -> Result:
    times = [iteration_ms(one.reports) for one in mine]
    base = statistics.median(iteration_ms(one.reports) for one in theirs)
    traced = [one.iterations for one in alike if one.iterations]
    last = mine[-1].iterations
    schedule = last[-1].schedule if last else schedule_of(name, ranks, size.microbatches)
    costs = costs_of(schedule.placement, traced, FUSED) if traced else None
    predicted = None if costs is None else simulate(schedule, costs)
    ms = statistics.median(times)
    # Turns of one job alternate, those of others come later: by rounds only where both are there.
    paired = zip(theirs, mine, strict=False) if MEGATRON in job.schedules else ()
    ratios = [iteration_ms(one.reports) / iteration_ms(other.reports) for one, other in paired]
    return Result(
        schedule=name,
        validates=job.validates,
        iteration_ms=ms,
        samples_per_second=size.batch / ms * 1e3,
        ratio=statistics.median(ratios) if ratios else base / ms,
        bubble=_bubble(mine),
        predicted_bubble=None if predicted is None else predicted.bubble_rate,
        memory=_memory(mine[-1], ranks),  # in the first one libraries allocate, too
        predicted_memory=() if predicted is None else predicted.peak_memory,
        allocated=max(one["allocated"] for turn in mine for one in turn.reports),
        different=next(filter(None, (difference(theirs[0], one) for one in mine)), None),
        split_ratio=None if costs is None else split_ratio(traced, costs),
        timeline=_timeline(last, costs) if last and costs is not None else None,
    )


def _timeline(iterations: Sequence[Measured], costs: Costs) -> Timeline:
    """Of the iteration that took the median, the first left out, which counts memory."""
    some = sorted(iterations[1:] or iterations, key=lambda one: one.cost)
    shown = some[len(some) // 2].timeline
    return replace(shown, costs=replace(shown.costs, m_b=costs.m_b, m_w=costs.m_w))


def _bubble(turns: Sequence[MeasuredTurn]) -> float | None:
    """Without the first iteration of each turn, whose memory is looked at."""
    rates = [one.bubble_rate for turn in turns for one in turn.iterations[1:]]
    rates += [rate for turn in turns if (rate := megatrons_bubble(turn.reports)) is not None]
    return statistics.median(rates) if rates else None


def _memory(turn: MeasuredTurn, ranks: int) -> tuple[int | None, ...]:
    if turn.iterations:
        return turn.iterations[0].peak_memory
    return tuple(_held(turn.reports[rank]) for rank in range(ranks))


def _held(report: Report) -> int | None:
    held: int | None = report.get("held")
    return held


def difference(theirs: MeasuredTurn, mine: MeasuredTurn) -> str | None:
    """Where a turn's losses or parameters first differ from another one's; None if nowhere."""
    if len(theirs.losses) != len(mine.losses):
        return f"{len(mine.losses)} losses instead of {len(theirs.losses)}"
    for number, (one, other) in enumerate(zip(theirs.losses, mine.losses, strict=True), 1):
        if one != other:
            return f"loss of iteration {number}: {other!r} instead of {one!r}"
    if missing := theirs.digests.keys() ^ mine.digests.keys():
        return f"parameter {min(missing)} is not in both"
    return next(
        (
            f"parameter {name}"
            for name, value in sorted(theirs.digests.items())
            if mine.digests[name] != value
        ),
        None,
    )


def memory_error(result: Result) -> float | None:
    """Of measured over predicted memory the furthest from 1 of all stages, less 1."""
    errors = [
        held / predicted - 1
        for held, predicted in zip(result.memory, result.predicted_memory, strict=False)
        if held is not None and predicted
    ]
    return max(errors, key=abs, default=None)


def lines(results: Sequence[Result]) -> list[str]:
    """The table, and what it leaves out."""
    heads = ("schedule", "iteration ms", "samples/s", "over Megatron", "bubble", "predicted",
             "same bits", "allocated GiB")  # fmt: skip
    rows = [
        (
            one.label,
            f"{one.iteration_ms:.1f}",
            f"{one.samples_per_second:.2f}",
            f"{one.ratio:.3f}",
            _percent(one.bubble),
            _percent(one.predicted_bubble),
            "no" if one.different else "yes",
            f"{one.allocated / BYTES['GiB']:.1f}" if one.allocated else "-",
        )
        for one in results
    ]
    said = [table(heads, rows), "", "activations at most, MiB by stage: measured (predicted)"]
    said.append(
        table(("schedule", "stages 0, 1, ..."), ((one.label, _stages(one)) for one in results))
    )
    ratio = next((one.split_ratio for one in results if one.split_ratio is not None), None)
    said.append("")
    said.append(f"(B + W) / fused backward: {'-' if ratio is None else f'{ratio:.3f}'}")
    if all(held is None for held in results[0].memory):
        said.append("memory of Megatron's own schedules is counted on a GPU alone")
    said += [f"{one.label} differs: {one.different}" for one in results if one.different]
    if any(one.validates for one in results):
        said.append(
            "validated: with --optimizer-post-validation; its measured bubble contains the "
            "optimizer's step, which there lies between the passes of an iteration"
        )
    return said


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"


def _stages(one: Result) -> str:
    predicted = one.predicted_memory or (None,) * len(one.memory)
    return "  ".join(
        f"{_mib(held)} ({_mib(said)})" for held, said in zip(one.memory, predicted, strict=True)
    )


def _mib(nbytes: float | None) -> str:
    return "-" if nbytes is None else f"{nbytes / BYTES['MiB']:.1f}"


def share_of(
    jobs: Mapping[Job, Sequence[MeasuredTurn]], ranks: int, all_of_them: int
) -> tuple[bool, str]:
    """Whether each rank had its share of the GPU's multiprocessors, and a sentence that says so.

    A process that does not reach MPS runs without it, and says nothing.
    """
    most = max(
        one["multiprocessors"] for turns in jobs.values() for turn in turns for one in turn.reports
    )
    return most * ranks <= all_of_them * SHARE_TOLERANCE, (
        f"each of {ranks} ranks has {most} of {all_of_them} multiprocessors"
    )


def verdicts(
    results: Sequence[Result], ranks: int, size: Size, *, times_count: bool
) -> list[tuple[bool, str]]:
    """Whether each bar is met, and a sentence that says so.

    Args:
        times_count: whether the device's times mean anything.
    """
    different = [one.label for one in results if one.different]
    found = [
        (
            not different,
            "losses and parameters have the bits of Megatron's 1F1B"
            + (f", but for {', '.join(different)}" if different else ""),
        )
    ]
    errors = [(error, one) for one in results if (error := memory_error(one)) is not None]
    if errors:
        worst, which = max(errors, key=lambda one: abs(one[0]))
        found.append(
            (
                abs(worst) <= MEMORY_TOLERANCE,
                f"activations within {abs(worst):.1%} of the prediction (worst: {which.label}), "
                f"bar {MEMORY_TOLERANCE:.0%}",
            )
        )
    gains = [one for one in results if one.schedule == GAINING]
    if times_count and gains and (ranks, size.microbatches) == GAINS_WITH:
        best = max(gains, key=lambda one: one.ratio)
        found.append(
            (
                best.ratio >= LEAST_GAIN,
                f"{best.label} at {best.ratio:.3f} of Megatron's 1F1B, bar {LEAST_GAIN}",
            )
        )
    return found
