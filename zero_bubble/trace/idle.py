"""Why a stage does not compute: each of its gaps, with the cause."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Pass
from zero_bubble.simulate import Timeline
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.rank_file import Phase, TracedPass

__all__ = ["Cause", "Gap", "idle_by_cause", "measured_gaps", "predicted_gaps", "waits_by_source"]


class Cause(StrEnum):
    """Why a stage idles."""

    ACTIVATION = "waiting for an activation"
    GRADIENT = "waiting for a gradient"
    BETWEEN = "between passes"
    """The host: launching, sends, reading the batch."""
    NO_WORK = "no work"
    """Before the stage's first pass is ready, and after its last."""
    FINALIZE = "finalizing gradients"
    OPTIMIZER = "optimizer"
    """The optimizer's step, and every phase that is not named after finalizing."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Time in which a stage computes no pass; ms."""

    cause: Cause
    begin: float
    end: float
    source: int | None = None
    """The stage whose message it waits for."""
    before: Pass | None = None
    """The pass that comes next."""
    phase: str = ""
    """The phase's name, where one is the cause."""

    @property
    def duration(self) -> float:
        return self.end - self.begin


def measured_gaps(measured: Measured) -> tuple[tuple[Gap, ...], ...]:
    """The gaps of each stage, in order of time.

    With the stage's passes they cover the iteration, so they add up to `Measured.length` minus the
    stage's work. Before a pass is ready, the stage waits for its message from the time the pass
    begins; until a stage's first pass is ready it has no work. Phases count where no pass waits or
    computes.
    """
    length, placement = measured.length, measured.placement
    return tuple(
        tuple(_gaps(placement, stage, row, phases, length))
        for stage, (row, phases) in enumerate(zip(measured.rows, measured.phases, strict=True))
    )


def predicted_gaps(timeline: Timeline) -> tuple[tuple[Gap, ...], ...]:
    """The same for a simulated timeline, from 0 to the last end."""
    length = max((row[-1].end for row in timeline.spans if row), default=0.0)
    gaps = []
    for stage, spans in enumerate(timeline.spans):
        row, now = [], 0.0
        for span in spans:
            row.append(TracedPass(span.what, now, span.start, span.end))
            now = span.end
        gaps.append(tuple(_gaps(timeline.schedule.placement, stage, row, (), length)))
    return tuple(gaps)


def idle_by_cause(gaps: Sequence[Gap]) -> dict[Cause, float]:
    """ms of each cause, 0 for one that is not there."""
    return {
        cause: sum((gap.duration for gap in gaps if gap.cause is cause), 0.0) for cause in Cause
    }


def waits_by_source(gaps: Sequence[Gap]) -> dict[tuple[Cause, int], float]:
    """ms of waiting for messages by (activation or gradient, stage that sends it)."""
    waits: dict[tuple[Cause, int], float] = {}
    for gap in gaps:
        if gap.source is not None and gap.cause is not Cause.NO_WORK:
            key = gap.cause, gap.source
            waits[key] = waits.get(key, 0.0) + gap.duration
    return waits


def _gaps(
    placement: Placement,
    stage: int,
    row: Sequence[TracedPass],
    phases: Sequence[Phase],
    length: float,
) -> Iterator[Gap]:
    now = 0.0
    for index, one in enumerate(row):
        cause, source = _wait(placement, stage, one.what)
        rest = Cause.BETWEEN if index else Cause.NO_WORK
        yield from _without_message(now, one.begin, phases, rest, one.what)
        if one.ready != one.begin:
            cause = cause if index else Cause.NO_WORK
            yield Gap(cause, one.begin, one.ready, source, one.what)
        now = one.end
    yield from _without_message(now, length, phases, Cause.NO_WORK, None)


def _wait(placement: Placement, stage: int, what: Pass) -> tuple[Cause, int | None]:
    """What a pass waits for, and from which stage; without a message it is the host."""
    if what.kind in (Kind.W, Kind.R):
        return Cause.BETWEEN, None
    forward = what.kind is Kind.F
    other = (placement.before if forward else placement.after)(stage, what.chunk)
    if other is None or other[0] == stage:
        return Cause.BETWEEN, None
    return (Cause.ACTIVATION if forward else Cause.GRADIENT), other[0]


def _without_message(
    begin: float, end: float, phases: Sequence[Phase], rest: Cause, before: Pass | None
) -> Iterator[Gap]:
    """A stretch between passes: phases where there are some, ``rest`` where not."""
    now = begin
    for phase in sorted(phases, key=lambda phase: phase.begin):
        first, last = max(phase.begin, now), min(phase.end, end)
        if first >= last:
            continue
        if first > now:
            yield Gap(rest, now, first, before=before)
        cause = Cause.FINALIZE if phase.what.startswith("finalize") else Cause.OPTIMIZER
        yield Gap(cause, first, last, before=before, phase=phase.what)
        now = last
    # Below 0 by what clocks are too coarse for: the sum over an iteration stays exact.
    if now != end:
        yield Gap(rest, now, end, before=before)
