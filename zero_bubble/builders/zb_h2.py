"""ZB-H2: no bubble at all when F, B and W take equal time, for about twice 1F1B's memory."""

from __future__ import annotations

from zero_bubble.builders.lagged import lagged_row
from zero_bubble.placement import linear
from zero_bubble.schedule import Schedule

__all__ = ["zb_h2"]


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """The handcrafted schedule without bubbles (paper, section 2, Figure 3 bottom).

    Stage s runs 2(p-s)-1 warm-up forwards, which fill the wait for its first gradient, and its W's
    lag 2s microbatches behind, which fills the wait for its last. Peak memory at most (2p-1) M_B,
    bubble (p-1)(T_F+T_B-2T_W) from m >= 2p-1 microbatches on (Table 2). ValueError for less than
    one stage or microbatch.
    """
    rows = tuple(
        lagged_row(microbatches, in_flight=2 * (stages - stage) - 1, lag=2 * stage)
        for stage in range(stages)
    )
    return Schedule(linear(stages), microbatches, rows, name="zb-h2")
