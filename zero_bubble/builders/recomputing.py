"""Recomputation as a pass of its own, for a schedule that was made without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from zero_bubble.costs import Costs
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["with_recomputation", "within_backward"]


def with_recomputation(schedule: Schedule) -> Schedule:
    """The schedule with an R right before each B or BW.

    No pass runs later than if B recomputed itself, and none holds memory for longer: but R waits
    for no gradient, so that it may run while B would wait for one. Chunks that have R's keep
    theirs.
    """
    present = schedule.chunks_with(Kind.R)
    rows = zip(schedule.passes, present, strict=True)
    passes = tuple(tuple(_with_r(row, chunks)) for row, chunks in rows)
    return replace(schedule, passes=passes)


def within_backward(costs: Costs) -> Costs:
    """Costs without recomputation whose B, and BW, take the time of it.

    For what knows no recomputation: times are right for schedules without R's, and memory counts
    as if all was kept, which is more than it takes.
    """
    if costs.t_r is None:
        return costs

    def longer(table: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(time + costs.recomputation(stage, chunk) for chunk, time in enumerate(row))
            for stage, row in enumerate(table)
        )

    return replace(
        costs.without_recomputation(),
        t_b=longer(costs.t_b),
        t_bw=None if costs.t_bw is None else longer(costs.t_bw),
    )


def _with_r(row: tuple[Pass, ...], present: frozenset[int]) -> Iterator[Pass]:
    for one in row:
        if one.kind in (Kind.B, Kind.BW) and one.chunk not in present:
            yield Pass(Kind.R, one.microbatch, one.chunk)
        yield one
