"""What the registry knows of a builder: its function, its placement, what it may be told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, linear
from zero_bubble.schedule import Schedule

__all__ = ["Builder"]


@dataclass(frozen=True, slots=True)
class Builder:
    """A known schedule: ``function(stages, microbatches)``, with ``chunks`` or ``costs`` if taken.

    ``arrange`` gives its placement: of (stages, chunks) if chunks can be chosen, else of stages.
    """

    function: Callable[..., Schedule]
    arrange: Callable[..., Placement] = linear
    default_chunks: int | None = None
    """Chunks a stage if nothing else is asked for; None if there is no choice."""
    takes_costs: bool = False
    """Whether the order depends on times: the function then takes ``costs: Costs | None``."""

    @property
    def takes_chunks(self) -> bool:
        return self.default_chunks is not None

    @property
    def is_linear(self) -> bool:
        """Whether every stage has one chunk, in the order of the model."""
        return self.arrange is linear

    def placement(self, stages: int, chunks: int | None = None) -> Placement:
        """Where the schedule's chunks are: what its costs must be for."""
        return self.arrange(stages, *self._chunks(chunks))

    def build(
        self,
        stages: int,
        microbatches: int,
        *,
        chunks: int | None = None,
        costs: Costs | None = None,
    ) -> Schedule:
        """The schedule, as `zero_bubble.builders.build`."""
        options = {"costs": costs} if self.takes_costs else {}
        return self.function(stages, microbatches, *self._chunks(chunks), **options)

    def _chunks(self, wanted: int | None) -> tuple[int, ...]:
        if self.default_chunks is None:
            return ()
        return (self.default_chunks if wanted is None else wanted,)
