"""Memory of activations: what counted bytes say of a chunk, and what the model says of a stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

from zero_bubble.schedule import Kind
from zero_bubble.simulate import Timeline
from zero_bubble.trace.rank_file import TracedPass

__all__ = ["chunk_memory", "held_after"]


def chunk_memory(
    row: Sequence[TracedPass], chunks: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(M_B, M_W) in bytes of each chunk of a stage, by what its passes added and freed.

    The median of the F's is M_B, that of the W's M_W; without W's it is M_B, the most it can be.
    Where activations are recomputed in B, more may wait for W than F has kept: M_B is then M_W, so
    that nothing holds more than these two say.
    Passes before which or after which nobody counted are left out; 0 if nothing is left.
    """
    changes: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    before: int | None = 0
    for one in row:
        if before is not None and one.held is not None:
            changes[one.what.kind, one.what.chunk].append(one.held - before)
        before = one.held
    whole, part = [], []
    for chunk in range(chunks):
        m_b = max(statistics.median(changes[Kind.F, chunk] or [0]), 0.0)
        m_w = max(-statistics.median(changes[Kind.W, chunk] or [-m_b]), 0.0)
        whole.append(float(max(m_b, m_w)))
        part.append(float(m_w))
    return tuple(whole), tuple(part)


def held_after(timeline: Timeline, stage: int) -> list[float]:
    """What a stage holds after each of its passes, in the unit of the costs (paper, section 3.1).

    As `Timeline.peak_memory` counts: F adds M_B, B leaves M_W of it, W and BW leave nothing.
    """
    m_b, m_w = timeline.costs.m_b[stage], timeline.costs.m_w[stage]
    # Whole counts, not a running sum: a sum of fractions would drift with m.
    whole, part = [0] * len(m_b), [0] * len(m_b)
    held = []
    for one in timeline.schedule.passes[stage]:
        whole[one.chunk] += 1 if one.kind is Kind.F else 0 if one.kind is Kind.W else -1
        part[one.chunk] += {Kind.B: 1, Kind.W: -1}.get(one.kind, 0)
        held.append(sum(n * b + k * w for n, b, k, w in zip(whole, m_b, part, m_w, strict=True)))
    return held
