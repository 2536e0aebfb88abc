"""What a search returns."""

from __future__ import annotations

from dataclasses import dataclass

from zero_bubble.schedule import Schedule

__all__ = ["Solution"]


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule, what it costs, and how far from the optimum it can be."""

    schedule: Schedule
    cost: float
    """In ms, as `Timeline.cost`."""
    bound: float
    """No schedule for the same problem costs less than this, in ms."""
    how: str
    """What found it."""

    @property
    def gap(self) -> float:
        """(cost - bound) / cost: at most so much better is possible; 0.01 is 1 %."""
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether the schedule meets its bound."""
        return self.cost <= self.bound * (1 + 1e-9)
