"""Those who watch a session: what it tells them, and what it asks them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.zero_bubble.runtime.batch import BatchRequest
from megatron.zero_bubble.runtime.interpreter import Compute, Event
from megatron.zero_bubble.runtime.recording import Recording
from zero_bubble.program import Program

__all__ = ["Attendant", "BatchRecord"]


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What happened in one call, for those who watch."""

    program: Program
    stage: int
    forward_only: bool
    events: tuple[Event, ...]
    weight_store_peak: int


class Attendant(Protocol):
    """Told of training batches before they run, so that it can measure them."""

    def before(self, request: BatchRequest) -> None:
        """A batch is asked for; what is run for it may still be changed (`Session.reschedule`)."""

    def attend(
        self, compute: Compute, split_chunks: frozenset[int], request: BatchRequest, *, ahead: bool
    ) -> tuple[Compute, Recording | None]:
        """What computes in the place of a batch's computations, and what notes its passes.

        ``ahead``: the batch is that of the next iteration.
        """

    def lets_run_ahead(self) -> bool:
        """Whether a part of the next batch may run before this iteration is final."""
