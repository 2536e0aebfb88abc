"""ZB-V: no bubble when F, B and W take equal time, at the memory of 1F1B."""

from __future__ import annotations

from zero_bubble.builders.v_lags import v_lagged
from zero_bubble.costs import Costs
from zero_bubble.schedule import Schedule

__all__ = ["zb_v"]


def zb_v(stages: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """The paper's V schedule at 1F1B's memory (section 6).

    Each stage has at most 2p of its chunks' microbatches in flight: p M_B, if its two chunks keep
    equally much. With equal times and free messages the bubble is 0 from m = 2p-1 microbatches on.
    On the nine profiles of the paper's Table 8 it is within 0.3 points of the published bubble rate
    (6.97 % to 2.36 %).

    The order is fitted to the costs; without them to equal times. See `v_lagged` for how, for the
    time that takes, and for errors.
    """
    return v_lagged("zb-v", stages, microbatches, costs, lag=2, period=2, in_flight=stages)
