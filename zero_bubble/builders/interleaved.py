"""Interleaved 1F1B: several chunks a stage, so that the pipeline fills and drains faster."""

from __future__ import annotations

from zero_bubble.placement import interleaved
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["group_size", "interleaved_1f1b"]


def interleaved_1f1b(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Interleaved 1F1B with fused backwards (Narayanan et al. 2021), in Megatron's order.

    Microbatches go through a stage in groups (see `group_size`): a group runs its F's on each chunk
    in turn, its backwards on each chunk from the last. With v chunks and groups of n, stage s
    starts with 2(p-s-1) + (v-1)n forwards, or with all of them if there are fewer.

    If p divides m and messages are free, the bubble is (p-1)(T_F+T_B+T_W)/v, the times being those
    of whole stages; the peak memory is (p + (p-1)/v) M_B, on stage 0. One chunk is plain 1F1B, as
    in Megatron. ValueError for less than one stage, microbatch or chunk.
    """
    placement = interleaved(stages, chunks)
    size = group_size(stages, microbatches)
    forwards = _in_groups(Kind.F, range(chunks), size, microbatches)
    backwards = _in_groups(Kind.BW, range(chunks)[::-1], size, microbatches)
    hops = 2 if chunks > 1 else 1
    rows = []
    for stage in range(stages):
        warm_up = min(hops * (stages - stage - 1) + (chunks - 1) * size, len(forwards))
        row = forwards[:warm_up]
        for index, backward in enumerate(backwards):
            row += forwards[warm_up + index : warm_up + index + 1]
            row.append(backward)
        rows.append(tuple(row))
    return Schedule(placement, microbatches, tuple(rows), name="interleaved")


def group_size(stages: int, microbatches: int) -> int:
    """How many microbatches a stage runs on a chunk before it turns to the next chunk.

    p, Megatron's default, if p divides m. Otherwise the last group would be short, and a group of
    less than p can leave stages waiting for each other: Megatron refuses it. So this is the
    smallest size from p on that leaves no remainder below p; Megatron runs it with
    ``--microbatch-group-size-per-virtual-pipeline-stage``. With m below p, which Megatron refuses
    too, all m are one group of nominal size p.
    """
    for size in range(stages, microbatches):
        rest = microbatches % size
        if rest == 0 or rest >= stages:
            return size
    return max(stages, microbatches)


def _in_groups(kind: Kind, chunks: range, size: int, microbatches: int) -> list[Pass]:
    """Each group of microbatches on one chunk after the other."""
    return [
        Pass(kind, one, chunk)
        for first in range(0, microbatches, size)
        for chunk in chunks
        for one in range(first, min(first + size, microbatches))
    ]
