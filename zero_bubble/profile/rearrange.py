"""Costs of a placement, estimated from those that were measured on another one."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement

__all__ = ["rearranged"]


def rearranged(costs: Costs, placement: Placement, other: Placement) -> Costs:
    """The costs of ``placement``, as they would be if the model were cut as in ``other``.

    The model is a row of positions. Where ``other`` has more of them, each is cut into equal parts,
    and where it has fewer, neighbours are joined: a linear stage becomes two half stages of a V,
    and two neighbours of a V become a stage. A message takes as long as it did between the same
    stages; between stages that sent each other none, the median of the others.

    An estimate: embedding and loss are spread over the parts of their position, and what a pass
    costs however few layers it has is not known. ValueError if the costs are not those of
    ``placement``, or stages of either hold unequal numbers of chunks: their positions are then not
    equal parts of the model.
    """
    costs.require(placement)
    for one in (placement, other):
        if len(counts := {*map(len, one.positions)}) > 1:
            raise ValueError(
                f"stages of {sorted(counts)} chunks: costs can be taken over only where all "
                "stages hold equally many"
            )

    def moved(table: Table) -> Table:
        owners = map(placement.owner, range(placement.num_positions))
        parts = _resampled([table[s][c] for s, c in owners], other.num_positions)
        return tuple(tuple(parts[position] for position in row) for row in other.positions)

    used = _edges(other)
    edges = tuple(edge for edge in costs.t_edges if edge[:2] in used)
    return Costs(
        t_f=moved(costs.t_f),
        t_b=moved(costs.t_b),
        t_w=moved(costs.t_w),
        m_b=moved(costs.m_b),
        m_w=moved(costs.m_w),
        t_bw=None if costs.t_bw is None else moved(costs.t_bw),
        t_r=None if costs.t_r is None else moved(costs.t_r),
        m_r=None if costs.m_r is None else moved(costs.m_r),
        t_comm=_usual_message(costs),
        t_edges=edges,
    )


def _resampled(values: Sequence[float], number: int) -> list[float]:
    """The same total over ``number`` equal parts of the row that ``values`` are equal parts of."""
    fine = math.lcm(len(values), number)
    cut, joined = fine // len(values), fine // number
    return [
        math.fsum(values[at // cut] / cut for at in range(part * joined, (part + 1) * joined))
        for part in range(number)
    ]


def _edges(placement: Placement) -> set[tuple[int, int]]:
    """Between which stages messages go, activations and gradients."""
    stages = [placement.owner(position)[0] for position in range(placement.num_positions)]
    hops = {hop for hop in pairwise(stages) if hop[0] != hop[1]}
    return hops | {(target, source) for source, target in hops}


def _usual_message(costs: Costs) -> float:
    """A profile may give each edge's time, and none for all."""
    if costs.t_comm or not costs.t_edges:
        return costs.t_comm
    return statistics.median(time for _, _, time in costs.t_edges)
