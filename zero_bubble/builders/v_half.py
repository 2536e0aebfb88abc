"""V-Half: half of 1F1B's bubble at about half of its memory."""

from __future__ import annotations

from zero_bubble.builders.v_lags import v_lagged
from zero_bubble.costs import Costs
from zero_bubble.schedule import Schedule

__all__ = ["v_half"]


def v_half(stages: int, microbatches: int, costs: Costs | None = None) -> Schedule:
    """The V schedule with about half of 1F1B's memory (Qi et al. 2024).

    Each stage has at most 2 floor(p/2) + 2 of its chunks' microbatches in flight, which are
    (floor(p/2) + 1) M_B if its two chunks keep equally much. With equal times T, free messages and
    m >= p the bubble is less than half of 1F1B's 3(p-1)T: (3p-4)T/2 for odd p, (3p-7)T/2 for even
    p from 4 on.

    The order is fitted to the costs; without them to equal times. See `v_lagged` for how, for the
    time that takes, and for errors.
    """
    return v_lagged(
        "v-half", stages, microbatches, costs, lag=1, period=2, in_flight=stages // 2 + 1
    )
