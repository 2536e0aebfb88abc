"""How long a microbatch takes at least from one pass to another, on an otherwise empty pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from zero_bubble.search.problem import Floats, Problem

__all__ = ["Paths", "StageCosts"]


@dataclass(frozen=True, slots=True)
class Paths:
    """When one microbatch alone runs each pass, in ms from the start of its first F.

    The difference of two entries is the least time between those passes of any microbatch in any
    schedule: they are a chain. Lists are indexed by model position.
    """

    start_f: list[float]
    start_b: list[float]
    end_b: list[float]
    end_w: list[float]
    """End of W if it runs right after its B."""

    @classmethod
    def of(cls, problem: Problem) -> Paths:
        arrays = problem.arrays()
        count = len(arrays.t_f)
        start_f, start_b, end_b = [0.0] * count, [0.0] * count, [0.0] * count
        now = 0.0
        for at in range(count):
            start_f[at] = now + float(arrays.delay_f[at])
            now = start_f[at] + float(arrays.t_f[at])
        for at in range(count - 1, -1, -1):
            # R comes between F and B of its chunk; only on the last chunk nothing else does.
            computed = start_f[at] + float(arrays.t_f[at]) + float(arrays.t_r[at])
            start_b[at] = max(now + float(arrays.delay_b[at]), computed)
            now = end_b[at] = start_b[at] + float(arrays.t_b[at])
        end_w = [end + float(time) for end, time in zip(end_b, arrays.t_w, strict=True)]
        return cls(start_f, start_b, end_b, end_w)


@dataclass(frozen=True, slots=True)
class StageCosts:
    """A stage's chunks in the order of the model: positions, times in ms, memory.

    For every microbatch the first chunk's F and the last chunk's B come before the other F's and
    B's of the stage. So a stage's first pass is an F of its first chunk, its last F and its first B
    are the last chunk's, and its last B is the first chunk's.
    """

    positions: list[int]
    t_f: list[float]
    t_b: list[float]
    t_w: list[float]
    t_r: list[float]
    """Time of R, 0 without R's."""
    m_b: list[float]
    m_w: list[float]
    m_r: list[float]
    """What F takes: M_B without recomputation."""
    t_rest: list[float]
    """Time of the pass that takes the rest of M_B at its start: of R, without R's of B."""
    room: float
    """The memory limit, and as much above it as rounding may let a schedule have."""

    @classmethod
    def of(cls, problem: Problem, stage: int) -> StageCosts:
        arrays = problem.arrays()
        positions = sorted(problem.placement.positions[stage])

        def ordered(by_position: Floats) -> list[float]:
            return [float(by_position[position]) for position in positions]

        limit = problem.memory_limit[stage]
        return cls(
            positions=positions,
            t_f=ordered(arrays.t_f),
            t_b=ordered(arrays.t_b),
            t_w=ordered(arrays.t_w),
            t_r=ordered(arrays.t_r),
            m_b=ordered(arrays.m_b),
            m_w=ordered(arrays.m_w),
            m_r=ordered(arrays.m_r),
            t_rest=ordered(arrays.t_r if problem.has_recomputation else arrays.t_b),
            # Twice what `zero_bubble.check` lets pass.
            room=limit + 2e-9 * max(1.0, limit),
        )
