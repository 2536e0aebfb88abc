"""What a search for a partition returns, tells on its way, and says if there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_bubble.costs import Costs
from zero_bubble.search.partition_model import Model
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

__all__ = ["NoPartitionFits", "Partition", "PartitionProgress", "idle_share"]


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """How far a search is."""

    schedules: int
    """Partitions that got a schedule so far."""
    cost: float
    """Best so far, in ms."""
    bound: float
    """As `Partition.bound`."""


@dataclass(frozen=True, slots=True)
class Partition:
    """Which layers each chunk gets, with a schedule for it."""

    model: Model
    sizes: tuple[int, ...]
    """Layers of each model position, embedding and loss included."""
    problem: Problem
    """Placement, costs of the chunks, microbatches. Memory limits are without weight memory."""
    memory_limit: tuple[float, ...]
    """Most memory of each stage, weights included."""
    solution: Solution
    """The schedule; its cost is the time of an iteration in ms."""
    even: Solution | None
    """A schedule for Megatron's even partition; None if it has none, or it does not fit."""
    bound: float
    """No schedule of any partition costs less, in ms."""

    @property
    def costs(self) -> Costs:
        """Times and memory of the chunks."""
        return self.problem.costs

    @property
    def layout(self) -> str:
        """Megatron's ``--pipeline-model-parallel-layout``: the parts in model order."""
        return self.model.layout(self.sizes)

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: at most so much better is possible; 0.01 is 1 %."""
        cost = self.solution.cost
        return max(0.0, (cost - self.bound) / cost) if cost else 0.0


class NoPartitionFits(ValueError):
    """No partition keeps the memory limits, or a search found none."""

    def __init__(self, limits: tuple[float, ...], needed: float, *, proven: bool) -> None:
        self.limits = limits
        """Most memory of each stage, weights included."""
        self.needed = needed
        """Weights and one microbatch, on all stages together."""
        self.proven = proven
        """Whether no partition fits at all."""
        super().__init__(self.described(lambda memory: f"{memory:.6g}"))

    def described(self, amount: Callable[[float], str]) -> str:
        """The error in one line, with amounts of memory as ``amount`` writes them."""
        stages = len(self.limits)
        every = (
            f"a memory limit of {amount(self.limits[0])} a stage"
            if len(set(self.limits)) == 1
            else f"memory limits of {', '.join(map(amount, self.limits))}"
        )
        none = "no partition fits" if self.proven else "no partition was found that fits"
        needed = f"weights and one microbatch take {amount(self.needed)} on all {stages} stages"
        return f"{none} {every}: {needed} together"


def idle_share(model: Model, stages: int, microbatches: int, cost: float) -> float:
    """1 - work of all layers / (stages * cost): what stages idle on average; 0.1 is 10 %.

    Unlike a bubble rate, which is measured by the busiest stage of a partition, it falls with the
    cost, whatever the partition.
    """
    return max(0.0, 1 - microbatches * model.work / (stages * cost)) if cost else 0.0
