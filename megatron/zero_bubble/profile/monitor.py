"""Measures the batches that somebody wants measured, and hands on what it measured.

Nothing waits for it: on a GPU a batch is handed on once its events are past, at the start of a
later batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.zero_bubble.profile.memory import Meter
from megatron.zero_bubble.runtime.batch import BatchRequest
from megatron.zero_bubble.runtime.interpreter import Compute
from megatron.zero_bubble.runtime.recording import Clock, Recording, clock_for
from megatron.zero_bubble.runtime.session import Session
from megatron.zero_bubble.runtime.watching import BatchRecord
from zero_bubble.program import Program
from zero_bubble.trace.rank_file import Phase, TracedPass

__all__ = ["NOTHING", "MeasuredBatch", "Monitor", "Party", "Wish"]


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants to know of a batch."""

    times: bool = False
    memory: bool = False
    """Implies times, which are less exact then: counting takes time."""


NOTHING = Wish()


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """A batch and what follows it up to the end of the optimizer's step. Times in ms."""

    iteration: int
    """Counted from 1."""
    program: Program
    stage: int
    wish: Wish
    passes: tuple[TracedPass, ...]
    phases: tuple[Phase, ...]
    nbytes: int = 0
    """What recording it took of the host's memory."""


class Party(Protocol):
    """Somebody who wants batches measured."""

    def wants(self, iteration: int) -> Wish:
        """What of this iteration, counted from 1."""

    def before(self, iteration: int, request: BatchRequest) -> None:
        """An iteration begins: its batch is asked for."""

    def take(self, measured: MeasuredBatch) -> None:
        """What was wanted, at some time after the batch."""

    def lets_run_ahead(self, iteration: int) -> bool:
        """Whether a part of this iteration may run before the one before it is final."""


@dataclass(slots=True)
class _Open:
    """A batch of which something is still to come."""

    iteration: int
    wish: Wish
    parties: tuple[Party, ...]
    """Who wants it."""
    recording: Recording
    record: BatchRecord | None = None
    """None until the batch has ended."""
    phases: list[Phase] = field(default_factory=list)


class Monitor:
    """A session's attendant (`runtime.watching.Attendant`).

    Args:
        session: whose training batches are measured.
        iteration: the number of the present iteration, counted from 1.
    """

    def __init__(self, session: Session, iteration: Callable[[], int]) -> None:
        self._session, self._iteration = session, iteration
        self.parties: list[Party] = []
        self.waits = False
        """Whether a batch is handed on before the next one begins, even if the device must be
        waited for."""
        self._open: dict[int, _Open] = {}
        self._ended: deque[_Open] = deque()
        self._clock: Clock | None = None
        self._meter: Meter | None = None
        session.attendant = self
        session.listeners.append(self._batch_ended)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return torch.empty(0, device="cuda").device

    @property
    def clock(self) -> Clock:
        """Of the device."""
        if self._clock is None:
            self._clock = clock_for(self.device)
        return self._clock

    def before(self, request: BatchRequest) -> None:
        now = self._iteration()
        for number in [one for one in self._open if one < now]:
            self._close(number)  # its optimizer has not stepped
        self.hand_on(wait=self.waits)
        if self._clock is None or self._begins_with_memory(now):
            self._clock = clock_for(self.device)  # between batches: it may wait for the device
        for party in self.parties:
            party.before(now, request)

    def attend(
        self, compute: Compute, split_chunks: frozenset[int], request: BatchRequest, *, ahead: bool
    ) -> tuple[Compute, Recording | None]:
        number = self._iteration() + ahead
        self._open.pop(number, None)  # what has been thrown away
        wishes = [(party, party.wants(number)) for party in self.parties]
        wanting = tuple(party for party, wish in wishes if wish.times or wish.memory)
        if not wanting:
            return compute, None
        wish = Wish(times=True, memory=any(wish.memory for _, wish in wishes))
        held = None
        if wish.memory:
            if self._meter is None:
                store = self._session.store
                self._meter = Meter(request.models, store.pending, self.device)
            compute, held = self._meter.begin(compute, split_chunks)
        recording = Recording(self.clock, held)
        self._open[number] = _Open(number, wish, wanting, recording)
        return compute, recording

    def _begins_with_memory(self, iteration: int) -> bool:
        """The clocks of host and device drift apart; a trace wants them together."""
        return any(
            one.wants(iteration).memory and not one.wants(iteration - 1).memory
            for one in self.parties
        )

    def lets_run_ahead(self) -> bool:
        return all(party.lets_run_ahead(self._iteration() + 1) for party in self.parties)

    def step_begins(self) -> None:
        """The optimizer begins its step."""
        open_one = self._open.get(self._iteration())
        if open_one is not None:
            open_one.recording.begin()

    def step_ended(self, events: Iterable[tuple[str, int, int]] = ()) -> None:
        """The optimizer has ended its step, in parts of which (what, begin, end) are known, in ns
        of the host's clock."""
        now = self._iteration()
        phases = [Phase(what, begin / 1e6, end / 1e6) for what, begin, end in events]
        open_one, next_one = self._open.get(now), self._open.get(now + 1)
        if open_one is not None:
            if phases:
                open_one.phases += phases
            else:
                open_one.recording.end("optimizer step")
            self._close(now)
        if next_one is not None:
            # It has run ahead, and goes on only after these.
            next_one.phases += phases
        self.hand_on()

    def hand_on(self, *, wait: bool = False) -> None:
        """Give the parties what is past; ``wait`` for the device to have all."""
        while self._ended and (wait or self._ended[0].recording.is_past):
            one = self._ended.popleft()
            assert one.record is not None
            phases = (*one.recording.phases(), *one.phases)
            passes = one.recording.passes()
            start = passes[0].begin if passes else 0.0
            measured = MeasuredBatch(
                one.iteration,
                one.record.program,
                one.record.stage,
                one.wish,
                passes,
                tuple(phase for phase in phases if phase.end >= start),
                one.recording.nbytes,
            )
            for party in one.parties:
                party.take(measured)

    def _batch_ended(self, record: BatchRecord) -> None:
        one = self._open.get(self._iteration())
        if one is not None and not record.forward_only:
            one.record = record

    def _close(self, number: int) -> None:
        one = self._open.pop(number)
        if one.record is not None:
            self._ended.append(one)
