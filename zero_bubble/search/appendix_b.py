"""The paper's estimate of where more memory stops paying (appendix B), for linear placement."""

from __future__ import annotations

import math
from dataclasses import dataclass

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement, linear

__all__ = ["Flattening", "flattening"]


@dataclass(frozen=True, slots=True)
class Flattening:
    """Two limits on a stage's memory, in the unit of the costs' memory."""

    knee: float
    """Where the bubble rate stops falling almost linearly:
    ((p-1)(T_B + 2 T_comm) + p T_F) / T_F x M_B. About (2p-1) M_B if T_F = T_B."""
    last_bubbles: float
    """What it takes to remove also the last bubbles, of less than T_F a stage:
    floor(((p-1)(T_B + 2 T_comm) + (2p-1) T_F) / T_F) x M_B. About (3p-2) M_B."""


def flattening(placement: Placement, costs: Costs) -> Flattening | None:
    """The paper's two limits; None if the placement is not linear or F takes no time.

    The formulas are for equal stages. Where they differ, the means over the stages and over the
    messages between neighbours stand in, so that the result is only a guide. ValueError if the
    costs do not fit the placement.
    """
    costs.require(placement)
    stages = placement.num_stages
    t_f = _mean(costs.t_f)
    if placement != linear(stages) or t_f <= 0:
        return None
    hops = [costs.comm(one, one + 1) + costs.comm(one + 1, one) for one in range(stages - 1)]
    back = (stages - 1) * _mean(costs.t_b) + math.fsum(hops)
    m_b = _mean(costs.m_b)
    # A quotient meant to be whole must not lose 1 to rounding.
    whole = math.floor((back + (2 * stages - 1) * t_f) / t_f + 1e-9)
    return Flattening(knee=(back + stages * t_f) / t_f * m_b, last_bubbles=whole * m_b)


def _mean(table: Table) -> float:
    return math.fsum(row[0] for row in table) / len(table)
