"""Starts on a known schedule, measures, and goes over to the schedule that was found for it.

All ranks do the same in the same iteration: what they measure follows from the iteration's number,
and what they run from announcements that name the iteration (`coordinator`).
"""

from __future__ import annotations

import json
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.distributed as dist

from megatron.zero_bubble.auto_arguments import SWITCH_AFTER
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.profile.board import Board
from megatron.zero_bubble.profile.coordinator import Announcement, Coordinator, Wanted
from megatron.zero_bubble.profile.messages import messages_of
from megatron.zero_bubble.profile.monitor import NOTHING, MeasuredBatch, Wish
from megatron.zero_bubble.profile.sampler import Round, Sampler
from megatron.zero_bubble.runtime.batch import BatchRequest
from megatron.zero_bubble.runtime.session import Session
from zero_bubble.export.json_io import parse_file
from zero_bubble.schedule import Schedule

__all__ = ["Rescheduler", "Settings"]

logger = logging.getLogger(__name__)

_DRIFT_BATCHES = 3
_LATE = 5
"""Iterations after which a batch that was measured must have been handed on."""
_COMPARED = 10
"""Iterations whose times are compared after a switch."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags say."""

    first: int = 5
    """Iterations that are measured first, counted from 1 at the start of the job."""
    last: int = 10
    drift_interval: int = 100
    """Iterations from the end of one measurement to the next; 0 switches that off."""
    drift_threshold: float = 0.02
    """Share of the predicted cost that a new schedule has to gain."""
    total: int | None = None
    """The last iteration of the job."""


@dataclass(slots=True)
class _Gain:
    """Iteration times before a switch, and after it."""

    before: float
    predicted: float
    """Share of the iteration."""
    name: str
    starts: list[float] = field(default_factory=list)


class Rescheduler:
    """A `monitor.Party`.

    Args:
        session: runs the batches.
        board: for notes between ranks.
        coordinator: on one rank of the job; None on the others.
        settings: the flags.
        start: the schedule to start on, for a number of microbatches.
        rank: this one, of the job.
        profiled: whether there is a profile already.
        known: schedules found before, by number of microbatches.
    """

    def __init__(
        self,
        session: Session,
        board: Board,
        coordinator: Coordinator | None,
        settings: Settings,
        *,
        start: Callable[[int], Schedule],
        rank: int,
        device: torch.device,
        profiled: bool = False,
        known: dict[int, Schedule] | None = None,
    ) -> None:
        self._session, self._board, self._coordinator = session, board, coordinator
        self._settings, self._start = settings, start
        self._rank, self._device = rank, device
        self._profiled = profiled
        self._known = dict(known or {})
        self._asked = set(self._known)
        self._rounds = 0
        self._sampler: Sampler | None = None
        self._sizes: tuple[int, int] | None = None
        self._microbatches = 0
        self._next_drift: int | None = None
        self._read = 0
        self._epoch = 0
        self._coming: list[Announcement] = []
        self._gain: _Gain | None = None
        self._starts: list[float] = []
        self._begun = False

    def schedule(self, stages: int, microbatches: int) -> Schedule:
        """What runs for this number of microbatches now; a `session.BuildSchedule`."""
        return self._known.get(microbatches) or self._start(microbatches)

    def wants(self, iteration: int) -> Wish:
        return NOTHING if self._sampler is None else self._sampler.round.wants(iteration)

    def lets_run_ahead(self, iteration: int) -> bool:
        self._read_announcements()
        if any(one.at == iteration and one.epoch == self._epoch for one in self._coming):
            return False
        sampler = self._sampler
        return sampler is None or not (sampler.round.whole and sampler.round.first == iteration)

    def before(self, iteration: int, request: BatchRequest) -> None:
        self._note_start()
        self._plan(iteration, request)
        sampler = self._sampler
        if sampler is not None and iteration > sampler.round.last + _LATE:
            # An iteration of the round was left out (--iterations-to-skip).
            length = sampler.round.last - sampler.round.first
            self._measure(iteration + 1, iteration + 1 + length, whole=sampler.round.whole)
        if sampler is not None:
            sampler.begins(iteration)
            if sampler.round.whole and iteration == sampler.round.first:
                sampler.messages = messages_of(self._session, request, self._device)
        if self._coordinator is not None:
            self._coordinator.tick(iteration)
        self._read_announcements()
        for one in [one for one in self._coming if one.at <= iteration]:
            self._coming.remove(one)
            if one.epoch == self._epoch:
                self._follow(one)

    def take(self, measured: MeasuredBatch) -> None:
        sampler = self._sampler
        if sampler is not None:
            sampler.take(measured)
            if sampler.is_complete:
                self._report(sampler)

    def _plan(self, iteration: int, request: BatchRequest) -> None:
        """Decide what to measure and to search for; the same on all ranks."""
        microbatches = request.options.num_microbatches
        sizes = request.seq_length, request.micro_batch_size
        if (microbatches, sizes) != (self._microbatches, self._sizes):
            # What an iteration takes is not to be compared with what it took.
            self._microbatches, self._gain = microbatches, None
            self._starts = self._starts[-1:]
        if not self._begun:
            self._begun, self._sizes = True, sizes
            if not self._profiled:
                offset, last = iteration - 1, self._settings.total
                self._measure(offset + self._settings.first, offset + self._settings.last)
                if last is not None and offset + self._settings.last + SWITCH_AFTER > last:
                    self._tell(
                        f"--zero-bubble-profile-iters {self._settings.first}:{self._settings.last} "
                        f"will not be reached: this start trains iterations {iteration} to {last}; "
                        "it keeps its first schedule",
                        logging.WARNING,
                    )
            else:
                self._plan_drift(iteration)
        elif sizes != self._sizes:
            self._forget(iteration, sizes)
        if self._profiled and microbatches not in self._asked:
            self._ask(microbatches)
        # One before: the first may run ahead.
        if self._next_drift is not None and iteration + 1 >= self._next_drift:
            if self._sampler is None:
                self._measure(iteration + 1, iteration + _DRIFT_BATCHES, whole=False)
            self._next_drift = None

    def _measure(self, first: int, last: int, *, whole: bool = True) -> None:
        self._sampler = Sampler(self._rank, self._device, Round(self._rounds, first, last, whole))
        self._rounds += 1

    def _forget(self, iteration: int, sizes: tuple[int, int]) -> None:
        """The size of microbatches has changed: nothing that was measured holds."""
        before, self._sizes = self._sizes, sizes
        self._tell(
            f"microbatches are of {sizes[1]} x {sizes[0]} tokens now, not of "
            f"{before[1] if before else 0} x {before[0] if before else 0}: measuring again"
        )
        self._known.clear()
        self._asked.clear()
        self._coming.clear()
        self._epoch += 1
        self._profiled, self._next_drift = False, None
        if self._coordinator is not None:
            self._coordinator.forget()
        length = self._settings.last - self._settings.first
        self._measure(iteration + 1, iteration + 1 + length)
        self._session.reschedule(self.schedule)

    def _report(self, sampler: Sampler) -> None:
        """Leave the report; the coordinator goes on from there."""
        number, drifting = sampler.round.number, not sampler.round.whole
        self._sampler = None
        self._board.post(f"report/{number}/{self._rank}", sampler.report().to_json())
        microbatches = sampler.microbatches
        if not drifting:
            self._tell(
                f"measuring keeps {sampler.bytes_a_pass:.0f} bytes a pass until its batch has ended"
            )
        self._profiled = True
        self._asked.add(microbatches)
        self._plan_drift(sampler.round.last)
        if self._coordinator is not None:
            threshold = self._settings.drift_threshold if drifting else 0.0
            self._coordinator.expect_reports(number, self._wanted(microbatches, threshold))

    def _ask(self, microbatches: int) -> None:
        """There are costs, but no schedule for batches of this size yet."""
        self._asked.add(microbatches)
        if self._coordinator is not None:
            self._coordinator.search_for(self._wanted(microbatches))

    def _wanted(self, microbatches: int, least_gain: float = 0.0) -> Wanted:
        stages = self._session.placement.num_stages
        return Wanted(microbatches, lambda: self.schedule(stages, microbatches), least_gain)

    def _plan_drift(self, iteration: int) -> None:
        interval = self._settings.drift_interval
        self._next_drift = iteration + interval if interval else None

    def _read_announcements(self) -> None:
        while (text := self._board.look(f"announcement/{self._read}")) is not None:
            self._read += 1
            one = Announcement.from_json(text)
            if one.epoch >= self._epoch:
                self._coming.append(one)

    def _follow(self, one: Announcement) -> None:
        if one.error:
            raise ConfigurationError(one.error)
        if one.stop:
            self._tell("the profile is written: the job ends here, as asked for")
            dist.barrier()  # the store lives on one of the ranks
            raise SystemExit(0)
        self._known[one.microbatches] = parse_file(json.loads(one.schedule)).schedule
        self._session.reschedule(self.schedule)
        if self._coordinator is None or one.microbatches != self._microbatches:
            return
        if len(self._starts) < 2:
            return
        periods = [after - before for before, after in pairwise(self._starts)]
        before = statistics.median(periods)
        self._gain = _Gain(
            before,
            one.saved_ms / before,
            self._known[one.microbatches].name,
        )

    def _note_start(self) -> None:
        """Keep the times of the last iterations, and say what a switch has gained."""
        now = time.perf_counter() * 1e3
        self._starts = [*self._starts[-_COMPARED:], now]
        gain = self._gain
        if gain is None:
            return
        gain.starts.append(now)
        if len(gain.starts) <= _COMPARED:
            return
        periods = [after - before for before, after in pairwise(gain.starts)]
        after = statistics.median(periods)
        least, _, most = statistics.quantiles(periods, n=4)
        self._tell(
            f"{gain.name}: an iteration takes {after:.1f} ms instead of {gain.before:.1f} (medians "
            f"of {_COMPARED}; half of the later ones took {least:.1f} to {most:.1f}): measured "
            f"gain {100 * (1 - after / gain.before):.1f}%, predicted {100 * gain.predicted:.1f}%"
        )
        self._gain = None

    def _tell(self, text: str, level: int = logging.INFO) -> None:
        if self._rank == 0:
            logger.log(level, text)
