"""1F1B: one forward, one backward; the schedule that zero-bubble schedules start from."""

from __future__ import annotations

from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["one_f_one_b"]


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with fused backwards, as Megatron runs it.

    Stage s holds at most p-s microbatches in flight. Bubble (p-1)(T_F+T_B+T_W), peak memory p M_B
    on stage 0 (paper, Table 2). ValueError for less than one stage or microbatch.
    """
    rows = tuple(_row(microbatches, stages - stage) for stage in range(stages))
    return Schedule(linear(stages), microbatches, rows, name="1f1b")


def _row(microbatches: int, in_flight: int) -> tuple[Pass, ...]:
    forwards = [Pass(Kind.F, one) for one in range(microbatches)]
    row = forwards[:in_flight]
    for one in range(microbatches):
        row.append(Pass(Kind.BW, one))
        row += forwards[one + in_flight : one + in_flight + 1]
    return tuple(row)
