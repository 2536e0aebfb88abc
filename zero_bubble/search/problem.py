"""What a search is given: a placement, costs, a number of microbatches, memory limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from zero_bubble.amount import in_bytes, is_bytes
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement

__all__ = ["Arrays", "Floats", "Ints", "Problem"]

type Floats = npt.NDArray[np.float64]
type Ints = npt.NDArray[np.int64]


class Arrays(NamedTuple):
    """A problem as arrays, for compiled code; all but ``limit`` are indexed by model position."""

    stage: Ints
    """Stage that holds the position."""
    t_f: Floats
    t_b: Floats
    t_w: Floats
    t_r: Floats
    m_b: Floats
    m_w: Floats
    m_r: Floats
    """What F takes at its start; R, or without R's B, takes ``m_b - m_r`` at its start."""
    delay_f: Floats
    """Time from the end of F on the position before to when this one can use it; 0 at the first."""
    delay_b: Floats
    """Time from the end of B on the position after to when this one can use it; 0 at the last."""
    limit: Floats
    """Most memory, by stage."""
    held: Ints
    """``held[stage, chunk]``: position; -1 beyond a stage's number of chunks."""
    kinds: int
    """4 if the passes are F, B, W and R, 3 without R's; the time within B is then in ``t_b``."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Which schedule is wanted.

    ``memory_limit[stage]`` is the most memory a stage may hold, in the unit of the costs' memory;
    infinity is no limit. Where the costs have a time of recomputation, schedules have an R for each
    B, or with ``recompute_in_backward`` none: B then takes that time, too. ValueError if costs or
    limits do not fit the placement, there is no microbatch, or a limit is less than one microbatch
    needs.
    """

    placement: Placement
    costs: Costs
    num_microbatches: int
    memory_limit: tuple[float, ...]
    recompute_in_backward: bool = False

    def __post_init__(self) -> None:
        self.costs.require(self.placement)
        if self.num_microbatches < 1:
            raise ValueError(f"at least 1 microbatch is needed, not {self.num_microbatches}")
        stages = self.placement.num_stages
        if len(self.memory_limit) != stages:
            raise ValueError(
                f"{len(self.memory_limit)} memory limits for {stages} stages: give one each"
            )
        for stage, limit in enumerate(self.memory_limit):
            if math.isnan(limit) or limit < self.least_memory(stage) * (1 - 1e-9):
                given, least = _shown(limit, self.least_memory(stage))
                raise ValueError(
                    f"memory limit {given} of stage {stage} cannot be met: one microbatch takes "
                    f"{least} there, the least that works"
                )

    @classmethod
    def of(
        cls,
        placement: Placement,
        costs: Costs,
        num_microbatches: int,
        memory_limit: float | Sequence[float] = math.inf,
        *,
        recompute_in_backward: bool = False,
    ) -> Problem:
        """A problem with one limit for all stages, or a limit each."""
        limits = (
            (float(memory_limit),) * placement.num_stages
            if isinstance(memory_limit, int | float)
            else tuple(map(float, memory_limit))
        )
        return cls(placement, costs, num_microbatches, limits, recompute_in_backward)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def has_recomputation(self) -> bool:
        """Whether its schedules have R's."""
        return self.costs.t_r is not None and not self.recompute_in_backward

    def least_memory(self, stage: int) -> float:
        """The least limit a stage can work with: all its chunks hold one microbatch at once.

        Every F of a microbatch comes before any of its B's, so no order needs less; running one
        microbatch after the other needs no more. With recomputation a chunk holds M_R until its B
        is next, when those later in the model are done.
        """
        costs, held = self.costs, self.placement.positions[stage]
        if costs.m_r is None:
            return sum(costs.m_b[stage])
        kept = most = 0.0
        for chunk in sorted(range(len(held)), key=held.__getitem__):
            most = max(most, kept + costs.m_b[stage][chunk])
            kept += costs.kept(stage, chunk)
        return most

    @property
    def ideal(self) -> float:
        """What the busiest stage computes, in ms: no order costs less."""
        costs = self.costs
        return self.num_microbatches * max(
            sum(costs.t_f[stage])
            + sum(costs.t_b[stage])
            + sum(costs.t_w[stage])
            + sum(costs.recomputation(stage, chunk) for chunk in range(len(costs.t_f[stage])))
            for stage in range(self.num_stages)
        )

    def bubble_rate(self, cost: float) -> float:
        """(cost - ideal) / cost (paper, section 5.3), as `Timeline.bubble_rate`."""
        return (cost - self.ideal) / cost if cost else 0.0

    def arrays(self) -> Arrays:
        """The same as arrays by position."""
        placement, costs = self.placement, self.costs
        owners = [placement.owner(one) for one in range(placement.num_positions)]

        def by_position(table: Sequence[Sequence[float]]) -> Floats:
            return np.array([table[stage][chunk] for stage, chunk in owners], dtype=np.float64)

        hops = [
            (costs.comm(one[0], other[0]), costs.comm(other[0], one[0]))
            for one, other in pairwise(owners)
        ]
        chunks = max(map(len, placement.positions))
        held = np.full((self.num_stages, chunks), -1, dtype=np.int64)
        for stage, positions in enumerate(placement.positions):
            held[stage, : len(positions)] = positions
        t_b, t_r = by_position(costs.t_b), by_position(costs.t_r or costs.t_f)
        if costs.t_r is None:
            t_r[:] = 0.0
        if self.recompute_in_backward:
            t_b += t_r
            t_r[:] = 0.0
        return Arrays(
            stage=np.array([stage for stage, _ in owners], dtype=np.int64),
            t_f=by_position(costs.t_f),
            t_b=t_b,
            t_w=by_position(costs.t_w),
            t_r=t_r,
            m_b=by_position(costs.m_b),
            m_w=by_position(costs.m_w),
            m_r=by_position(costs.m_b if costs.m_r is None else costs.m_r),
            delay_f=np.array([0.0] + [there for there, _ in hops]),
            delay_b=np.array([back for _, back in hops] + [0.0]),
            limit=np.array(self.memory_limit, dtype=np.float64),
            held=held,
            kinds=4 if self.has_recomputation else 3,
        )


def _shown(limit: float, least: float) -> tuple[str, str]:
    """A limit and what is more than it, so that they read differently."""
    if not is_bytes(limit, least):
        return f"{limit:.6g}", f"{least:.6g}"
    return in_bytes(limit, rounding=ROUND_FLOOR), in_bytes(least, rounding=ROUND_CEILING)
