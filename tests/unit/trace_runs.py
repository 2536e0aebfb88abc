"""Made-up jobs: what the ranks of a pipeline would record, times drawn by chance."""

from __future__ import annotations

import random

from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.trace.rank_file import Phase, RankTrace, TracedIteration, TracedPass

HELD = {Kind.F: 3000, Kind.R: 0, Kind.B: -2000, Kind.W: -1000, Kind.BW: -3000}
"""Bytes that each pass adds."""
MESSAGE = 0.25
"""ms."""


def made_run(
    schedule: Schedule,
    *,
    iterations: tuple[int, ...] = (10,),
    seed: int = 0,
    first_rank: int = 0,
    counted: bool = True,
) -> list[RankTrace]:
    """A file for each stage; each rank's clock is off by its own offset."""
    chance = random.Random(seed)
    pipeline = tuple(range(first_rank, first_rank + schedule.num_stages))
    offsets = [0.0, *(chance.uniform(-500, 500) for _ in pipeline[1:])]
    recorded: list[list[TracedIteration]] = [[] for _ in pipeline]
    start = chance.uniform(0, 1000)
    for number in iterations:
        rows = _run(schedule, chance, start, counted)
        for stage, row in enumerate(rows):
            phases = _phases(row, chance)
            start = max(start, phases[-1].end)
            recorded[stage].append(
                TracedIteration(
                    number,
                    schedule.name,
                    schedule.num_microbatches,
                    tuple(_moved(one, -offsets[stage]) for one in row),
                    tuple(
                        Phase(one.what, one.begin - offsets[stage], one.end - offsets[stage])
                        for one in phases
                    ),
                )
            )
        start += 1.0
    return [
        RankTrace(
            rank,
            stage,
            pipeline,
            schedule.placement,
            offsets[stage],
            tuple((stage, other, MESSAGE) for other in range(len(pipeline)) if other != stage),
            tuple(recorded[stage]),
        )
        for stage, rank in enumerate(pipeline)
    ]


def _run(
    schedule: Schedule, chance: random.Random, start: float, counted: bool
) -> list[list[TracedPass]]:
    placement = schedule.placement
    ends: dict[tuple[Kind, int, int], float] = {}
    rows: list[list[TracedPass]] = [[] for _ in schedule.passes]
    busy = [start + chance.uniform(0, 0.5) for _ in rows]
    held = [0] * len(rows)
    while any(len(row) < len(order) for row, order in zip(rows, schedule.passes, strict=True)):
        for stage, row in enumerate(rows):
            while len(row) < len(schedule.passes[stage]):
                what = schedule.passes[stage][len(row)]
                arrival = _arrival(schedule, stage, what, ends)
                if arrival is None:
                    break
                begin = busy[stage] + (chance.uniform(0, 0.3) if row else 0.0)
                ready = max(begin, arrival)
                end = ready + _duration(what, chance)
                held[stage] += HELD[what.kind]
                row.append(TracedPass(what, begin, ready, end, held[stage] if counted else None))
                busy[stage] = end
                made = Kind.B if what.kind is Kind.BW else what.kind
                ends[made, placement.positions[stage][what.chunk], what.microbatch] = end
    return rows


def _arrival(
    schedule: Schedule, stage: int, what: Pass, ends: dict[tuple[Kind, int, int], float]
) -> float | None:
    """When what a pass reads is there; None as long as nobody has made it."""
    placement = schedule.placement
    position = placement.positions[stage][what.chunk]
    if what.kind in (Kind.R, Kind.W):
        return 0.0
    source = position - 1 if what.kind is Kind.F else position + 1
    if source < 0 or source == placement.num_positions:
        return 0.0
    kind = Kind.F if what.kind is Kind.F else Kind.B
    end = ends.get((kind, source, what.microbatch))
    if end is None:
        return None
    return end + (MESSAGE if placement.owner(source)[0] != stage else 0.0)


def _duration(what: Pass, chance: random.Random) -> float:
    mean = {Kind.F: 5.0, Kind.R: 3.0, Kind.B: 5.5, Kind.W: 4.0, Kind.BW: 9.5}[what.kind]
    return mean * chance.uniform(0.9, 1.2)


def _phases(row: list[TracedPass], chance: random.Random) -> list[Phase]:
    begin = row[-1].end + 0.1
    middle = begin + chance.uniform(1, 2)
    return [
        Phase("finalize", begin, middle),
        Phase("optimizer step", middle, middle + chance.uniform(3, 5)),
    ]


def _moved(one: TracedPass, shift: float) -> TracedPass:
    return TracedPass(one.what, one.begin + shift, one.ready + shift, one.end + shift, one.held)
