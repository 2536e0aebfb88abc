"""Records what really happened in some iterations, in a file a rank."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron.zero_bubble.profile.messages import Messages, messages_of
from megatron.zero_bubble.profile.monitor import NOTHING, MeasuredBatch, Wish
from megatron.zero_bubble.runtime.batch import BatchRequest
from megatron.zero_bubble.runtime.session import Session
from zero_bubble.trace.rank_file import RankTrace, TracedIteration, save_rank

__all__ = ["TraceRecorder"]

logger = logging.getLogger(__name__)


class TraceRecorder:
    """A `monitor.Party`.

    Args:
        session: runs the batches.
        directory: where files go.
        window: first and last iteration, counted from 1 at the start of the job.
        rank: this one, of the job.
        device: where the model is.
    """

    def __init__(
        self,
        session: Session,
        directory: Path,
        window: tuple[int, int],
        *,
        rank: int,
        device: torch.device,
    ) -> None:
        self._session, self._directory, self._window = session, directory, window
        self._rank, self._device = rank, device
        self._offset: int | None = None
        self._messages = Messages((), 0.0)
        self._iterations: list[TracedIteration] = []

    def wants(self, iteration: int) -> Wish:
        number = iteration - (self._offset or 0)
        first, last = self._window
        return Wish(times=True, memory=True) if first <= number <= last else NOTHING

    def lets_run_ahead(self, iteration: int) -> bool:
        """Before the first one messages are measured, which must not meet others."""
        return iteration - (self._offset or 0) != self._window[0]

    def before(self, iteration: int, request: BatchRequest) -> None:
        if self._offset is None:
            self._offset = iteration - 1
        if iteration - self._offset == self._window[0]:
            self._messages = messages_of(self._session, request, self._device) or self._messages

    def take(self, measured: MeasuredBatch) -> None:
        """Written at once, whole: what a job that ends early has recorded is there."""
        self._iterations.append(
            TracedIteration(
                measured.iteration,
                measured.program.name,
                measured.program.num_microbatches,
                measured.passes,
                measured.phases,
            )
        )
        stage, ranks = self._session.pipeline()
        trace = RankTrace(
            self._rank,
            stage,
            ranks,
            measured.program.placement,
            self._messages.clock_offset_ms,
            self._messages.edges,
            tuple(self._iterations),
        )
        try:
            save_rank(trace, self._directory)
        except OSError as error:
            logger.warning("--zero-bubble-trace %s: nothing is written: %s", self._directory, error)
