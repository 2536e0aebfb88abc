"""The ranks of a job as objects, for rescheduler_checks.py.

They share a store in memory. A step of one of them may come before or after that of another, as
far as a pipeline lets them: whoever begins iteration i + 1 has had a forward of rank 0 in i.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from megatron.zero_bubble.profile.monitor import MeasuredBatch
from megatron.zero_bubble.profile.rescheduler import Rescheduler, Settings
from megatron.zero_bubble.profile.search import SearchFailed
from zero_bubble.builders import build
from zero_bubble.export.json_io import ScheduleFile, load_file, save_schedule
from zero_bubble.lower import lower
from zero_bubble.placement import linear
from zero_bubble.schedule import Pass
from zero_bubble.trace.rank_file import TracedPass

RANKS, MICROBATCHES = 3, 6
NO_DRIFT = Settings(first=3, last=5, drift_interval=0)
PROGRAMS = {m: lower(build("zb-h1", RANKS, m)) for m in (MICROBATCHES, 8)}
FIRST = "zb-h1"


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
    command: tuple[str, ...] = ("schedule", "auto")

    def result(self, *, wait: bool = False) -> ScheduleFile | None:
        assert not self.stopped
        if self.looks and not wait:
            self.looks -= 1
            return None
        if self.searches.fails:
            raise SearchFailed("there is none")
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "schedule.json"
            path.write_text(self.text())
            return load_file(path)

    def text(self) -> str:
        found = replace(build("zb-h2", RANKS, self.microbatches), name=f"found-{self.number}")
        with tempfile.TemporaryDirectory() as directory:
            save_schedule(found, Path(directory) / "schedule.json")
            return (Path(directory) / "schedule.json").read_text()

    def stop(self) -> None:
        self.stopped = True


class Job:
    """All ranks; ``ms`` is how long a pass takes in an iteration."""

    def __init__(
        self,
        searches: Searches,
        settings: Settings = NO_DRIFT,
        *,
        patient: bool = False,
        stop: bool = False,
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
                    board, RANKS, linear(RANKS), {}, limit="2p", effort="quick", cache=None,
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

    def train(self, iterations: int, *, skipped: int = 0) -> None:
        """One iteration after the other, all ranks in step; ``skipped`` is left out."""
        for iteration in range(1, iterations + 1):
            if iteration != skipped:
                for rank in self.ranks:
                    rank.begin(iteration)
                for rank in self.ranks:
                    rank.end(iteration)

    def train_out_of_step(self, iterations: int, draw: random.Random) -> None:
        """Any rank may go on whenever the others have come far enough.

        A batch is handed on up to three iterations after it has ended, as from a GPU.
        """
        while any(rank.ended < iterations for rank in self.ranks):
            rank = draw.choice(self.ranks)
            others = [one for one in self.ranks if one is not rank]
            now = rank.begun
            if rank.ended < now:
                # No step without messages from all others in this iteration.
                if all(one.begun >= now for one in others):
                    rank.end(now, hand_on=draw.random() < 0.4 or rank.unread_for(now) >= 3)
            elif now < iterations and all(one.begun >= now for one in others):
                rank.begin(now + 1)

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


class Rank:
    """One rank, and what it does in each iteration."""

    def __init__(
        self, job: Job, number: int, board: Board, coordinator: Coordinator | None,
        settings: Settings,
    ) -> None:  # fmt: skip
        self._job, self.number, self.board = job, number, board
        session: Any = SimpleNamespace(reschedule=lambda build: None, placement=linear(RANKS))
        self.party = Rescheduler(
            session, board, coordinator, settings,
            start=lambda microbatches: build(FIRST, RANKS, microbatches),
            rank=number, device=torch.device("cpu"),
        )  # fmt: skip
        self.begun = self.ended = 0
        self.running: dict[int, str] = {}
        self.measured: list[int] = []
        self.memory: list[int] = []
        self.lets_run_ahead: dict[int, bool] = {}
        self.unread: list[MeasuredBatch] = []

    def begin(self, iteration: int) -> None:
        request = self._job.request(iteration)
        self.party.before(iteration, request)
        microbatches = request.options.num_microbatches
        self.running[iteration] = self.party.schedule(RANKS, microbatches).name
        wish = self.party.wants(iteration)
        if wish.times:
            self.measured.append(iteration)
            self.memory += [iteration] * wish.memory
            passes, now = [], 0.0
            for what, held in (("0F0", 100), ("0I0", 40), ("0W0", 0)):
                end = now + self._job.ms(iteration)
                passes.append(TracedPass(Pass.parse(what), now, now, end, held))
                now = end
            program = PROGRAMS[microbatches]
            self.unread.append(
                MeasuredBatch(iteration, program, self.number, wish, tuple(passes), ())
            )
        self.begun = iteration

    def unread_for(self, iteration: int) -> int:
        """How many iterations ago the oldest batch was that has not been handed on."""
        return iteration - self.unread[0].iteration if self.unread else 0

    def end(self, iteration: int, *, hand_on: bool = True) -> None:
        if self._job.validates:
            self.lets_run_ahead[iteration + 1] = self.party.lets_run_ahead(iteration + 1)
        while hand_on and self.unread:
            self.party.take(self.unread.pop(0))
        self.ended = iteration


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
