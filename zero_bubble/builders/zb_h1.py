"""ZB-H1: 1F1B's forwards and backwards, with W's late enough to fill the tail."""

from __future__ import annotations

from zero_bubble.builders.lagged import lagged_row
from zero_bubble.placement import linear
from zero_bubble.schedule import Schedule

__all__ = ["zb_h1"]


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """The handcrafted schedule at 1F1B's memory (paper, section 2, Figure 3 top).

    F's and B's in 1F1B's order; on stage s, W's lag s microbatches behind. What stage s holds less
    in flight than stage 0 pays for the W's it holds back, hence a peak memory of at most p M_B.
    Bubble (p-1)(T_F+T_B-T_W) (Table 2). ValueError for less than one stage or microbatch.
    """
    rows = tuple(
        lagged_row(microbatches, in_flight=stages - stage, lag=stage) for stage in range(stages)
    )
    return Schedule(linear(stages), microbatches, rows, name="zb-h1")
