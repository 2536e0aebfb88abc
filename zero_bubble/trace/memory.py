"""Memory of activations: what counted bytes say of a chunk, and what the model says of a stage."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from zero_bubble.schedule import Kind
from zero_bubble.simulate import Timeline
from zero_bubble.trace.rank_file import TracedPass

__all__ = ["ChunkMemory", "chunk_memory", "held_after"]


class ChunkMemory(NamedTuple):
    """Bytes that a microbatch takes on each chunk of a stage, as in `zero_bubble.costs.Costs`."""

    m_b: tuple[float, ...]
    m_w: tuple[float, ...]
    m_r: tuple[float, ...] = ()
    """Empty without R's; a chunk that has none beside others that do keeps all, M_B."""


def chunk_memory(row: Sequence[TracedPass], chunks: int) -> ChunkMemory:
    """Memory of each chunk of a stage, by what its passes added and freed.

    The median of the F's is M_B, that of the W's M_W; without W's it is M_B, the most it can be.
    With R's the median of the F's is M_R, and M_B is what F and R add together. Where activations
    are recomputed in B, more may wait for W than F has kept: M_B is then M_W, so that nothing holds
    more than these say.
    Passes before which or after which nobody counted are left out; 0 if nothing is left.
    """
    changes: dict[tuple[Kind, int], list[int]] = defaultdict(list)
    before: int | None = 0
    for one in row:
        if before is not None and one.held is not None:
            changes[one.what.kind, one.what.chunk].append(one.held - before)
        before = one.held
    whole, part, kept = [], [], []
    for chunk in range(chunks):
        kept.append(max(statistics.median(changes[Kind.F, chunk] or [0]), 0.0))
        m_b = kept[-1] + max(statistics.median(changes[Kind.R, chunk] or [0]), 0.0)
        m_w = max(-statistics.median(changes[Kind.W, chunk] or [-m_b]), 0.0)
        whole.append(float(max(m_b, m_w)))
        part.append(float(m_w))
    recomputed = any(changes[Kind.R, chunk] for chunk in range(chunks))
    return ChunkMemory(tuple(whole), tuple(part), tuple(map(float, kept)) if recomputed else ())


def held_after(timeline: Timeline, stage: int) -> list[float]:
    """What a stage holds after each of its passes, in the unit of the costs (paper, section 3.1).

    As `Timeline.peak_memory` counts: F adds M_B, B leaves M_W of it, W and BW leave nothing. With
    recomputation F adds M_R, and R the rest of M_B.
    """
    costs, row = timeline.costs, timeline.schedule.passes[stage]
    chunks = range(len(costs.m_b[stage]))
    recomputed = {one.chunk for one in row if one.kind is Kind.R}
    # Whole counts, not a running sum: a sum of fractions would drift with m.
    kept, whole, part = [0] * len(chunks), [0] * len(chunks), [0] * len(chunks)
    held = []
    for one in row:
        chunk = one.chunk
        if one.kind is Kind.F:
            kept[chunk] += 1
        elif one.kind is Kind.R:
            kept[chunk] -= 1
            whole[chunk] += 1
        elif one.kind in (Kind.B, Kind.BW):
            (whole if chunk in recomputed else kept)[chunk] -= 1
        part[chunk] += {Kind.B: 1, Kind.W: -1}.get(one.kind, 0)
        held.append(
            sum(
                kept[chunk] * costs.kept(stage, chunk)
                + whole[chunk] * costs.m_b[stage][chunk]
                + part[chunk] * costs.m_w[stage][chunk]
                for chunk in chunks
            )
        )
    return held
