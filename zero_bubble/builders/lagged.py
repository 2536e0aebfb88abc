"""The pattern that the handcrafted schedules share: B's behind F's, W's behind B's."""

from __future__ import annotations

from zero_bubble.schedule import Kind, Pass

__all__ = ["lagged_row"]


def lagged_row(microbatches: int, in_flight: int, lag: int) -> tuple[Pass, ...]:
    """The order of one stage with one chunk, B's and W's in ascending order of microbatches.

    ``in_flight`` forwards, then B, W, F in turn, where W is that of the microbatch ``lag`` before
    B's. So at most ``in_flight`` microbatches wait for B while at most ``lag`` wait for W (one more
    between a B and the W that follows it): the peak memory is
    ``in_flight * M_B + lag * M_W`` for M_W <= M_B.
    """
    forwards = [Pass(Kind.F, one) for one in range(microbatches)]
    weights = [Pass(Kind.W, one) for one in range(microbatches)]
    row = forwards[:in_flight]
    for one in range(microbatches):
        row.append(Pass(Kind.B, one))
        if one >= lag:
            row.append(weights[one - lag])
        row += forwards[one + in_flight : one + in_flight + 1]
    row += weights[max(0, microbatches - lag) :]
    return tuple(row)
