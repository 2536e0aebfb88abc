"""From the reports of all ranks to one profile."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement
from zero_bubble.profile.profile import Profile, Scalar
from zero_bubble.profile.report import RankReport
from zero_bubble.schedule import Kind

__all__ = ["change", "merge", "outlier_line"]


def merge(
    placement: Placement,
    reports: Iterable[RankReport],
    job: Mapping[str, Scalar],
    *,
    before: Profile | None = None,
) -> Profile:
    """The profile of a job whose ranks report.

    All ranks of a stage (tensor, context and data parallelism) run the same schedule, and a batch
    waits for the slowest of them. So the largest of their times and of their M_B counts, and the
    least of their rooms. A message between two stages takes the median of what was measured.

    What no rank measured is taken from the profile ``before``: memory, messages and room, which
    only the first measurement of a job looks at. ValueError if a stage has no report, or one
    without a time for F, B or W.
    """
    by_stage: dict[int, list[RankReport]] = defaultdict(list)
    for one in reports:
        by_stage[one.stage].append(one)
    stages = range(placement.num_stages)
    if missing := [stage for stage in stages if stage not in by_stage]:
        raise ValueError(f"stage {missing[0]} has no report")

    def slowest(kind: Kind) -> Table:
        rows = []
        for stage in stages:
            for one in by_stage[stage]:
                if kind not in one.times:
                    raise ValueError(f"rank {one.rank}, stage {stage}: no {kind} was timed")
            rows.append(_largest([one.times[kind] for one in by_stage[stage]]))
        return tuple(rows)

    measured = all(one.m_b for row in by_stage.values() for one in row)
    if not measured and before is None:
        raise ValueError("no rank has measured memory, and there is no profile before this one")
    if measured:
        m_b = tuple(_largest([one.m_b for one in by_stage[stage]]) for stage in stages)
        m_w = tuple(_largest([one.m_w for one in by_stage[stage]]) for stage in stages)
        m_r = tuple(_largest([one.m_r or one.m_b for one in by_stage[stage]]) for stage in stages)
    elif before is not None:
        m_b, m_w = before.costs.m_b, before.costs.m_w
        m_r = before.costs.m_r or m_b
    edges = _edges(by_stage)
    if not edges and before is not None:
        edges = before.costs.t_edges
    # A stage without R's beside those with them, one without layers say, computes nothing again.
    recomputed = any(Kind.R in one.times for row in by_stage.values() for one in row)
    costs = Costs(
        t_f=slowest(Kind.F),
        t_b=slowest(Kind.B),
        t_w=slowest(Kind.W),
        # Of different ranks' figures the M_W may be the larger.
        m_b=tuple(tuple(map(max, *rows)) for rows in zip(m_b, m_w, m_r, strict=True)),
        m_w=m_w,
        t_r=_recomputation(placement, by_stage) if recomputed else None,
        m_r=m_r if recomputed else None,
        t_edges=edges,
    )
    rooms = [[one.room for one in by_stage[stage]] for stage in stages]
    room = tuple(_least(row) for row in rooms)
    if before is not None and all(one is None for one in room):
        room = before.room
    iterations = [one.iteration_ms for row in by_stage.values() for one in row if one.iteration_ms]
    return Profile(
        placement=placement,
        costs=costs,
        job=dict(job),
        room=room,
        iteration_ms=statistics.median(iterations) if iterations else 0.0,
    )


def _recomputation(placement: Placement, by_stage: Mapping[int, Sequence[RankReport]]) -> Table:
    """The slowest R of each chunk; 0 where there is none."""

    def times(one: RankReport) -> tuple[float, ...]:
        return one.times.get(Kind.R, (0.0,) * placement.num_chunks(one.stage))

    stages = range(placement.num_stages)
    return tuple(_largest([times(one) for one in by_stage[stage]]) for stage in stages)


def outlier_line(reports: Sequence[RankReport]) -> str | None:
    """What to say of passes that took much longer than others of their kind; None for nothing."""
    uneven = [one for one in reports if one.outliers]
    if not uneven:
        return None
    worst = max(uneven, key=lambda one: one.worst)
    return (
        f"uneven times: on {len(uneven)} of {len(reports)} ranks some passes took more than 1.5 "
        f"times the median of their kind, the worst {worst.worst:.1f} times, on rank {worst.rank} "
        f"(stage {worst.stage}); medians count"
    )


def change(before: Costs, after: Costs) -> float:
    """By how much the time of a pass has moved at most; 0.02 is 2 %."""
    return max(
        (
            abs(new / old - 1)
            for table in ("t_f", "t_b", "t_w", "t_r")
            for row, other in zip(
                getattr(before, table) or (), getattr(after, table) or (), strict=True
            )
            for old, new in zip(row, other, strict=True)
            if old
        ),
        default=0.0,
    )


def _edges(by_stage: Mapping[int, Sequence[RankReport]]) -> tuple[tuple[int, int, float], ...]:
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in by_stage.values():
        for one in row:
            for source, target, ms in one.edges:
                times[source, target].append(ms)
    return tuple((*edge, statistics.median(times[edge])) for edge in sorted(times))


def _largest(rows: Sequence[Sequence[float]]) -> tuple[float, ...]:
    return tuple(max(values) for values in zip(*rows, strict=True))


def _least(rooms: Sequence[float | None]) -> float | None:
    known = [one for one in rooms if one is not None]
    return min(known) if known else None
