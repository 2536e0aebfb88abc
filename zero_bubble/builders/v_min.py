"""V-Min: two thirds of 1F1B's bubble at about a third of its memory."""

from __future__ import annotations

from zero_bubble.builders.v_lags import v_lagged
from zero_bubble.costs import Costs
from zero_bubble.schedule import Schedule

__all__ = ["v_min"]


def v_min(stages: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """The V schedule with about a third of 1F1B's memory (Qi et al. 2024).

    Each stage has at most 2 floor((p+4)/3) of its chunks' microbatches in flight, which are
    floor((p+4)/3) M_B if its two chunks keep equally much. With equal times T, free messages and
    m >= p the bubble is less than two thirds of 1F1B's 3(p-1)T: at most (4p-5)T/2. Where times
    differ it grows with m, since there is no steady state without bubbles.

    The order is fitted to the costs; without them to equal times. See `v_lagged` for how, for the
    time that takes, and for errors.
    """
    return v_lagged(
        "v-min", stages, microbatches, costs, lag=1, period=3, in_flight=(stages + 4) // 3
    )
