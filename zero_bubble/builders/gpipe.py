"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["gpipe"]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all fused backwards, both in ascending order of microbatches.

    Bubble (p-1)(T_F+T_B+T_W), as in 1F1B; peak memory m M_B on every stage. ValueError for less
    than one stage or microbatch.
    """
    row = tuple(Pass(kind, one) for kind in (Kind.F, Kind.BW) for one in range(microbatches))
    return Schedule(linear(stages), microbatches, (row,) * stages, name="gpipe")
