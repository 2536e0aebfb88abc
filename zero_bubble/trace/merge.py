"""The ranks' files of a traced job, merged: each pipeline's iterations on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from zero_bubble.check import check
from zero_bubble.schedule import Schedule
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.rank_file import (
    Phase,
    RankTrace,
    TracedIteration,
    TracedPass,
    load_rank,
    rank_file,
)

__all__ = ["Traces", "load_traces", "merge"]

_SHOWN = 8
"""Of a list in a message."""


@dataclass(frozen=True, slots=True)
class Traces:
    """The whole iterations of a traced job, and what is missing from it."""

    measured: tuple[Measured, ...]
    """By pipeline, then iteration."""
    missing: tuple[str, ...]
    """A sentence for each thing that should be there: a rank's file, a stage's iteration."""


def load_traces(directory: str | Path, iterations: Container[int] | None = None) -> Traces:
    """Merge the files in a directory; ``iterations`` are those wanted, all by default.

    What is incomplete is left out and told in `Traces.missing`. ValueError if files contradict
    each other, one is not a rank's trace, or nothing is left; OSError if one can't be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(
            f"{directory}: no such directory: give the one of the job's --zero-bubble-trace"
        )
    files = sorted(directory.glob("trace-rank*.json"))
    if not files:
        raise ValueError(
            f"{directory}: no trace-rank*.json in it: run the job with --zero-bubble-trace "
            f"{directory}"
        )
    ranks = []
    for path in files:
        ranks.append(load_rank(path))
        expected = rank_file(directory, ranks[-1].rank)
        if path != expected:
            raise ValueError(f"{path}: it is the trace of rank {ranks[-1].rank}, {expected.name}")
    traces = merge(ranks, iterations)
    if not traces.measured:
        raise ValueError(f"{directory}: no whole iteration. {' '.join(traces.missing)}".strip())
    return traces


def merge(ranks: Sequence[RankTrace], iterations: Container[int] | None = None) -> Traces:
    """Put ranks' traces together by pipeline; ValueError if they contradict each other."""
    pipelines: dict[tuple[int, ...], list[RankTrace]] = defaultdict(list)
    for one in sorted(ranks, key=lambda one: one.rank):
        pipelines[one.pipeline].append(one)
    _require_disjoint(pipelines)
    measured: list[Measured] = []
    missing: list[str] = []
    for pipeline, members in sorted(pipelines.items()):
        if absent := sorted(set(pipeline) - {one.rank for one in members}):
            names = ", ".join(rank_file("", rank).name for rank in absent[:_SHOWN])
            missing.append(
                f"Pipeline {_named(pipeline)} is left out: {_listed(absent, 'rank')} left no file "
                f"({names}{', ...' if len(absent) > _SHOWN else ''})."
            )
            continue
        members = sorted(members, key=lambda one: one.stage)
        _require_one_placement(members)
        found, lost = _pipeline(members, iterations)
        measured += found
        missing += lost
    return Traces(tuple(measured), tuple(missing))


def _require_disjoint(pipelines: dict[tuple[int, ...], list[RankTrace]]) -> None:
    owner: dict[int, tuple[int, ...]] = {}
    for pipeline in pipelines:
        for rank in pipeline:
            other = owner.setdefault(rank, pipeline)
            if other != pipeline:
                raise ValueError(
                    f"rank {rank} is in pipeline {_named(other)} by one file and in "
                    f"{_named(pipeline)} by another: they are of different jobs; empty the "
                    "directory before a new one"
                )


def _require_one_placement(members: Sequence[RankTrace]) -> None:
    first = members[0]
    for one in members[1:]:
        if one.placement != first.placement:
            raise ValueError(
                f"rank {one.rank} has the placement {[*map(list, one.placement.positions)]}, rank "
                f"{first.rank} of the same pipeline {[*map(list, first.placement.positions)]}: "
                "they are of different jobs; empty the directory before a new one"
            )


def _pipeline(
    members: Sequence[RankTrace], iterations: Container[int] | None
) -> tuple[list[Measured], list[str]]:
    recorded = [{one.iteration: one for one in rank.iterations} for rank in members]
    numbers = sorted(set[int]().union(*recorded))
    measured, missing = [], []
    for number in numbers:
        if iterations is not None and number not in iterations:
            continue
        if lacking := [stage for stage, found in enumerate(recorded) if number not in found]:
            missing.append(
                f"Iteration {number} of pipeline {_named(members[0].pipeline)} is left out: "
                f"{_listed(lacking, 'stage')} did not record it."
            )
            continue
        measured.append(_measured(members, [found[number] for found in recorded]))
    if iterations is not None and not measured and not missing:
        missing.append(
            f"Pipeline {_named(members[0].pipeline)} recorded "
            f"{_listed(numbers, 'iteration') if numbers else 'no iteration'}, none of those wanted."
        )
    return measured, missing


def _measured(members: Sequence[RankTrace], parts: Sequence[TracedIteration]) -> Measured:
    first, where = parts[0], f"iteration {parts[0].iteration} of pipeline "
    where += _named(members[0].pipeline)
    for rank, part in zip(members, parts, strict=True):
        if (part.schedule, part.num_microbatches) != (first.schedule, first.num_microbatches):
            raise ValueError(
                f"{where}: rank {rank.rank} ran {part.schedule!r} with {part.num_microbatches} "
                f"microbatches, rank {members[0].rank} {first.schedule!r} with "
                f"{first.num_microbatches}: they are of different jobs"
            )
    schedule = Schedule(
        members[0].placement,
        first.num_microbatches,
        tuple(tuple(one.what for one in part.passes) for part in parts),
        name=first.schedule,
    )
    if violations := check(schedule):
        raise ValueError(f"{where}: the passes are not those of a whole batch: {violations[0]}")
    offsets = [rank.clock_offset_ms for rank in members]
    start = min(
        offset + min(one.begin for one in events)
        for part, offset in zip(parts, offsets, strict=True)
        for events in (part.passes, part.phases)
        if events
    )
    shifts = [offset - start for offset in offsets]
    return Measured(
        members[0].pipeline,
        first.iteration,
        start,
        schedule,
        tuple(
            tuple(_shifted(one, shift) for one in part.passes)
            for part, shift in zip(parts, shifts, strict=True)
        ),
        tuple(
            tuple(Phase(one.what, one.begin + shift, one.end + shift) for one in part.phases)
            for part, shift in zip(parts, shifts, strict=True)
        ),
        tuple(edge for rank in members for edge in rank.edges),
    )


def _shifted(one: TracedPass, shift: float) -> TracedPass:
    return TracedPass(one.what, one.begin + shift, one.ready + shift, one.end + shift, one.held)


def _named(pipeline: tuple[int, ...]) -> str:
    return "-".join(map(str, pipeline[:_SHOWN])) + ("-..." if len(pipeline) > _SHOWN else "")


def _listed(numbers: Sequence[int], what: str) -> str:
    text = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {text}"
