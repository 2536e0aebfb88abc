"""The ranks of a job as objects, for rescheduler_checks.py.

They share a store in memory. What one of them does may come before or after what another does, as
far as a pipeline lets them. With run-ahead a rank may begin iteration i, and end its batch, before
rank 0 begins i; but none ends the optimizer's step of i before all have ended their batches of i.
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from logging.handlers import BufferingHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore

from megatron.zero_bubble.profile import coordinator as coordinator_module
from megatron.zero_bubble.profile import rescheduler as rescheduler_module
from megatron.zero_bubble.profile.board import Board
from megatron.zero_bubble.profile.coordinator import Coordinator
from megatron.zero_bubble.profile.messages import Messages
from megatron.zero_bubble.profile.monitor import MeasuredBatch, Wish
from megatron.zero_bubble.profile.rescheduler import Rescheduler, Settings
from megatron.zero_bubble.profile.search import SearchFailed
from zero_bubble.builders import build
from zero_bubble.export.json_io import ScheduleFile, parse_file, save_schedule
from zero_bubble.lower import lower
from zero_bubble.placement import linear
from zero_bubble.schedule import Pass
from zero_bubble.trace.rank_file import TracedPass

RANKS, MICROBATCHES = 3, 6
NO_DRIFT = Settings(first=3, last=5, drift_interval=0)
FIRST = "zb-h1"
STARTS = {m: build(FIRST, RANKS, m) for m in (MICROBATCHES, 8)}
PROGRAMS = {m: lower(schedule) for m, schedule in STARTS.items()}


@dataclass
class Searches:
    """In place of `search.Search`: finds ZB-H2 after some looks, by another name each time."""

    looks: int = 0
    fails: bool = False
    begun: list[FakeSearch] = field(default_factory=list)

    def __call__(self, profile: Any, microbatches: int, limit: str, effort: str) -> FakeSearch:
        self.begun.append(FakeSearch(self, len(self.begun), profile, microbatches, self.looks))
        return self.begun[-1]


@dataclass
class FakeSearch:
    searches: Searches
    number: int
    profile: Any
    microbatches: int
    looks: int
    stopped: bool = False

    def command(self, costs: str) -> str:
        return f"schedule auto --costs {costs}"

    def result(self, *, wait: bool = False) -> ScheduleFile | None:
        assert not self.stopped
        if self.looks and not wait:
            self.looks -= 1
            return None
        if self.searches.fails:
            raise SearchFailed("there is none")
        return parse_file(json.loads(self.text()))

    def text(self) -> str:
        return _found(self.number, self.microbatches)

    def stop(self) -> None:
        self.stopped = True


@cache
def _found(number: int, microbatches: int) -> str:
    """A schedule file's text."""
    found = replace(build("zb-h2", RANKS, microbatches), name=f"found-{number}")
    with tempfile.TemporaryDirectory() as directory:
        save_schedule(found, Path(directory) / "schedule.json")
        return (Path(directory) / "schedule.json").read_text()


class Job:
    """All ranks; ``ms`` is how long a pass takes in an iteration."""

    def __init__(
        self,
        searches: Searches,
        settings: Settings = NO_DRIFT,
        *,
        patient: bool = False,
        stop: bool = False,
        cache: Path | None = None,
        ms: Callable[[int], float] = lambda iteration: 1.0,
    ) -> None:
        self.searches, self.ms = searches, ms
        store = HashStore()
        self.validates = True
        """Whether ranks ask if they may run ahead, as with post-validation."""
        self.sizes: dict[int, tuple[int, int]] = {}
        """From an iteration on: (microbatches, sequence length)."""
        self.ranks = []
        for rank in range(RANKS):
            board = Board(store, patience=5.0)
            coordinator = None
            if rank == 0:
                coordinator = Coordinator(
                    board, RANKS, linear(RANKS), {}, limit="2p", effort="quick", cache=cache,
                    stop=stop, barrier=False, patient=patient,
                )  # fmt: skip
            self.ranks.append(Rank(self, rank, board, coordinator, settings))

    def request(self, iteration: int) -> Any:
        begun = [one for one in self.sizes if one <= iteration]
        microbatches, length = self.sizes[max(begun)] if begun else (MICROBATCHES, 32)
        return SimpleNamespace(
            seq_length=length,
            micro_batch_size=1,
            options=SimpleNamespace(num_microbatches=microbatches),
        )

    def train(self, iterations: int, *, first: int = 1, skipped: int = 0) -> None:
        """One iteration after the other, all ranks in step; ``skipped`` is left out."""
        for iteration in range(first, iterations + 1):
            if iteration != skipped:
                for rank in self.ranks:
                    rank.begin(iteration)
                for rank in self.ranks:
                    rank.end_batch()
                for rank in self.ranks:
                    rank.end_step()

    def train_out_of_step(self, iterations: int, draw: random.Random) -> int:
        """Any rank may go on whenever the others have come far enough.

        A batch is handed on up to three iterations after it has ended, as from a GPU. Returns how
        many batches have ended before rank 0 began that iteration.
        """
        early = 0
        while any(rank.stepped < iterations for rank in self.ranks):
            rank = draw.choice(self.ranks)
            now = rank.begun
            if rank.stepped == now:
                if now < iterations:
                    rank.begin(now + 1)
            elif rank.ended < now:
                if self._has_messages(rank):
                    early += self.ranks[0].begun < now
                    rank.end_batch()
            elif all(one.ended >= now for one in self.ranks):  # their gradients' norm is known
                rank.end_step(hand_on=draw.random() < 0.4 or rank.unread_for(now) >= 3)
        return early

    def _has_messages(self, rank: Rank) -> bool:
        """Forwards of earlier stages, which may have run ahead; backwards of later ones."""
        earlier, later = self.ranks[: rank.number], self.ranks[rank.number + 1 :]
        return all(one.begun >= rank.begun or one.is_ahead for one in earlier) and all(
            one.begun >= rank.begun for one in later
        )

    @property
    def running(self) -> list[str]:
        """What runs in each iteration; the same on all ranks, or AssertionError."""
        rows = [rank.running for rank in self.ranks]
        assert all(row == rows[0] for row in rows), rows
        return [*rows[0].values()]

    @property
    def measured(self) -> list[int]:
        """Iterations that are measured; the same on all ranks, or AssertionError."""
        rows = [rank.measured for rank in self.ranks]
        assert all(row == rows[0] for row in rows), rows
        return rows[0]


@dataclass(frozen=True)
class _Batch:
    iteration: int
    request: Any
    name: str
    """Of the schedule."""
    wish: Wish


class Rank:
    """One rank, and what it does in each iteration: `begin`, `end_batch`, `end_step`."""

    def __init__(
        self, job: Job, number: int, board: Board, coordinator: Coordinator | None,
        settings: Settings,
    ) -> None:  # fmt: skip
        self._job, self.number, self.board = job, number, board
        session: Any = SimpleNamespace(reschedule=self._reschedule, placement=linear(RANKS))
        self.party = Rescheduler(
            session, board, coordinator, settings,
            start=lambda microbatches: STARTS[microbatches],
            rank=number, device=torch.device("cpu"),
        )  # fmt: skip
        self.begun = self.ended = self.stepped = 0
        """The last iteration that has begun, whose batch has ended, whose step has."""
        self.running: dict[int, str] = {}
        self.measured: list[int] = []
        self.memory: list[int] = []
        self.lets_run_ahead: dict[int, bool] = {}
        self.unread: list[MeasuredBatch] = []
        self._batch: _Batch | None = None
        self._ahead: _Batch | None = None

    @property
    def is_ahead(self) -> bool:
        """Whether a part of the next batch has run."""
        return self._ahead is not None

    def begin(self, iteration: int) -> None:
        """The batch is asked for; what has run ahead is its beginning, if it is the same one."""
        request = self._job.request(iteration)
        self.party.before(iteration, request)
        ahead, self._ahead = self._ahead, None
        asked = iteration, request
        kept = ahead is not None and (ahead.iteration, ahead.request) == asked
        self._batch = ahead if kept else self._attend(*asked)
        self.begun = iteration

    def end_batch(self) -> None:
        """The step begins; in it this rank asks whether it may run ahead."""
        batch = self._batch
        assert batch is not None
        now, wish = batch.iteration, batch.wish
        self.running[now] = batch.name
        if wish.times:
            self.measured.append(now)
            self.memory += [now] * wish.memory
            self.unread.append(self._measure(batch))
        if self._job.validates:
            lets = self.lets_run_ahead[now + 1] = self.party.lets_run_ahead(now + 1)
            if lets and self.number < RANKS - 1:  # the last stage knows the result at once
                self._ahead = self._attend(now + 1, batch.request)
        self.ended = now

    def end_step(self, *, hand_on: bool = True) -> None:
        while hand_on and self.unread:
            self.party.take(self.unread.pop(0))
        self.stepped = self.ended

    def unread_for(self, iteration: int) -> int:
        """How many iterations ago the oldest batch was that has not been handed on."""
        return iteration - self.unread[0].iteration if self.unread else 0

    def _reschedule(self, build_schedule: Any) -> None:
        self._ahead = None

    def _attend(self, iteration: int, request: Any) -> _Batch:
        name = self.party.schedule(RANKS, request.options.num_microbatches).name
        return _Batch(iteration, request, name, self.party.wants(iteration))

    def _measure(self, batch: _Batch) -> MeasuredBatch:
        passes, now = [], 0.0
        for what, held in (("0F0", 100), ("0I0", 40), ("0W0", 0)):
            end = now + self._job.ms(batch.iteration)
            passes.append(TracedPass(Pass.parse(what), now, now, end, held))
            now = end
        program = PROGRAMS[batch.request.options.num_microbatches]
        return MeasuredBatch(batch.iteration, program, self.number, batch.wish, tuple(passes), ())


@contextmanager
def searching(**fields: Any) -> Iterator[Searches]:
    searches = Searches(**fields)
    messages = Messages(((0, 1, 0.1), (1, 0, 0.1), (1, 2, 0.1), (2, 1, 0.1)), 0.0)
    with (
        mock.patch.object(coordinator_module, "Search", searches),
        mock.patch.object(rescheduler_module, "messages_of", return_value=messages),
    ):
        yield searches


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the two modules say."""
    handler, lines = BufferingHandler(capacity=10**6), list[str]()
    loggers = [coordinator_module.logger, rescheduler_module.logger]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.addHandler(handler)
        one.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.removeHandler(handler)
            one.setLevel(level)
        lines += [record.getMessage() for record in handler.buffer]
