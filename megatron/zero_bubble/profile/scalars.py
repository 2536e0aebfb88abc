"""The measured bubble rate, tokens per second and undone steps, for TensorBoard and wandb."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from megatron.zero_bubble.profile.board import Board
from megatron.zero_bubble.profile.monitor import NOTHING, MeasuredBatch, Wish
from megatron.zero_bubble.runtime.batch import BatchRequest
from megatron.zero_bubble.runtime.session import Session
from zero_bubble.trace.rank_file import TracedPass

__all__ = ["Scalars", "work_and_cost"]


class Scalars:
    """A `monitor.Party` on every rank; the rank that writes reads what the others have left.

    Args:
        session: runs the batches.
        board: for notes between ranks.
        rank: this one, of the job.
        last_rank: the job's last, which writes.
        interval: iterations from one value to the next.
        write: takes an iteration and its values; None on ranks that do not write.
        tokens: in the batch of the present iteration, on all replicas together.
        counts: steps by outcome; empty without post-validation.
    """

    def __init__(
        self,
        session: Session,
        board: Board,
        *,
        rank: int,
        last_rank: int,
        interval: int,
        write: Callable[[int, dict[str, float]], None] | None,
        tokens: Callable[[], int],
        counts: Callable[[], Mapping[str, int]],
    ) -> None:
        self._session, self._board, self._rank = session, board, rank
        self._last_rank = last_rank
        self._interval, self._write = interval, write
        self._tokens, self._counts = tokens, counts
        self._began = 0.0
        self._waiting: dict[int, dict[str, float]] = {}
        """By iteration, until all stages have left their times: they may be behind this one."""

    def wants(self, iteration: int) -> Wish:
        return NOTHING if iteration % self._interval else Wish(times=True)

    def lets_run_ahead(self, iteration: int) -> bool:
        return True

    def before(self, iteration: int, request: BatchRequest) -> None:
        now = time.perf_counter()
        before, self._began = self._began, now
        if self._write is None:
            return
        if before and iteration - 1 in self._waiting:
            self._waiting[iteration - 1]["tokens-per-second"] = self._tokens() / (now - before)
        self._write_what_is_there()

    def take(self, measured: MeasuredBatch) -> None:
        if not self._replica_writes():
            return
        note = f"bubble/{measured.iteration}/{self._rank}"
        self._board.post(note, json.dumps(work_and_cost(measured.passes)))
        if self._write is not None:
            values = {}
            if counts := self._counts():
                values["rolled-back-steps"] = float(counts["rolled_back"])
            self._waiting[measured.iteration] = values

    def _replica_writes(self) -> bool:
        """Whether this rank's pipeline is that of the rank that writes: the last of the job."""
        return self._last_rank in self._session.pipeline()[1]

    def _write_what_is_there(self) -> None:
        """In order, as far as all stages of this rank's pipeline have left their times."""
        while self._waiting and self._write is not None:
            iteration = next(iter(self._waiting))
            notes = [f"bubble/{iteration}/{rank}" for rank in self._session.pipeline()[1]]
            if not self._board.has_all(notes):
                return
            values = self._waiting.pop(iteration)
            times = [json.loads(self._board.look(note) or "[0, 0]") for note in notes]
            for note in notes:
                self._board.remove(note)
            work, cost = map(max, zip(*times, strict=True))
            self._write(iteration, {"bubble-rate": (cost - work) / cost if cost else 0.0, **values})


def work_and_cost(passes: tuple[TracedPass, ...]) -> tuple[float, float]:
    """ms that a stage computed, and from its first start to its last end, as in
    `zero_bubble.simulate.Timeline`."""
    work = sum(one.end - one.ready for one in passes)
    return work, passes[-1].end - passes[0].ready if passes else 0.0
