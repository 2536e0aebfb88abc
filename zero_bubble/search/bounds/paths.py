"""How long a microbatch takes at least from one pass to another, on an otherwise empty pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from zero_bubble.search.problem import Problem

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
            start_b[at] = now + float(arrays.delay_b[at])
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
    m_b: list[float]
    m_w: list[float]
    room: float
    """The memory limit, and as much above it as rounding may let a schedule have."""

    @classmethod
    def of(cls, problem: Problem, stage: int) -> StageCosts:
        costs, held = problem.costs, problem.placement.positions[stage]
        chunks = sorted(range(len(held)), key=held.__getitem__)

        def ordered(row: tuple[float, ...]) -> list[float]:
            return [row[chunk] for chunk in chunks]

        limit = problem.memory_limit[stage]
        return cls(
            positions=[held[chunk] for chunk in chunks],
            t_f=ordered(costs.t_f[stage]),
            t_b=ordered(costs.t_b[stage]),
            t_w=ordered(costs.t_w[stage]),
            m_b=ordered(costs.m_b[stage]),
            m_w=ordered(costs.m_w[stage]),
            # Twice what `zero_bubble.check` lets pass.
            room=limit + 2e-9 * max(1.0, limit),
        )
