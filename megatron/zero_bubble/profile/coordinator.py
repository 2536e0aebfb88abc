"""The one rank that merges reports, lets a search run, and announces what it found.

A switch is announced before the rank begins an iteration i, for iteration i + 2. No rank can end
the optimizer's step of i without what this rank says of its gradients in i (the norm, or whether
they are finite), and asks for it on the host. So all of them find the announcement in step i + 1,
where they decide whether to run ahead into i + 2, and no rank has to wait for another. For i + 1 it
would be too early: a rank that has run ahead into i needs nothing of this rank's batch i for its
own.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from megatron.zero_bubble.profile.board import Board
from megatron.zero_bubble.profile.search import Search, SearchFailed
from zero_bubble.amount import in_bytes
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import ScheduleFile
from zero_bubble.placement import Placement
from zero_bubble.profile.merge import change, merge, outlier_line
from zero_bubble.profile.profile import Profile, Scalar, save_profile
from zero_bubble.profile.report import RankReport
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import Timeline, simulate

__all__ = ["Announcement", "Coordinator", "Wanted", "limit_text", "takes_longer"]

logger = logging.getLogger(__name__)

_AHEAD = 2
_SAME = 1e-3
"""Gains below it are no reason to change anything."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What all ranks will do."""

    microbatches: int
    """Of the batches it is for."""
    at: int
    """From which iteration on, counted from 1."""
    epoch: int = 0
    """How often the sizes of microbatches had changed: it is for these sizes alone."""
    schedule: str = ""
    """A schedule file's text."""
    saved_ms: float = 0.0
    """By how much an iteration is predicted to get shorter."""
    stop: bool = False
    """Whether the job ends at that iteration."""
    error: str = ""
    """Why it ends with an error, if it does."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be searched for, and what for."""

    microbatches: int
    running: Callable[[], Schedule]
    """What runs at the time it is asked for."""
    least_gain: float = 0.0
    """Of the predicted cost, below which nothing changes."""


class Coordinator:
    """Asked once an iteration (`tick`); nothing in it takes long.

    Args:
        board: where reports come from and announcements go to.
        ranks: of the job.
        placement: of the schedules.
        job: what the profile's costs depend on.
        limit: the memory limit, as the flag gives it.
        effort: of the search.
        cache: directory for profile.json and schedule.json, if they are to be kept.
        stop: whether the job ends with the first profile.
        barrier: whether the optimizer's step waits for all stages.
        patient: whether to wait for reports and searches, and let the job wait.
    """

    def __init__(
        self,
        board: Board,
        ranks: int,
        placement: Placement,
        job: Mapping[str, Scalar],
        *,
        limit: str,
        effort: str,
        cache: Path | None,
        stop: bool = False,
        barrier: bool = True,
        patient: bool = False,
    ) -> None:
        self._board, self._ranks = board, ranks
        self._placement, self._job = placement, job
        self._limit, self._effort, self._cache = limit, effort, cache
        self._stop, self._barrier, self._patient = stop, barrier, patient
        self.profile: Profile | None = None
        self._chosen_by: dict[int, Costs] = {}
        """What was last searched with, by number of microbatches."""
        self._round: int | None = None
        self._wanted: list[Wanted] = []
        self._search: tuple[Wanted, Search] | None = None
        self._announced = self._epoch = 0
        atexit.register(self._end_search)

    def expect_reports(self, round_number: int, wanted: Wanted) -> None:
        """All ranks report on a round; then search."""
        if self.profile is not None:  # one of an earlier start, if nothing was searched for yet
            self._chosen_by.setdefault(wanted.microbatches, self.profile.costs)
        self._round = round_number
        self._wanted.append(wanted)

    def search_for(self, wanted: Wanted) -> None:
        """Search with the profile there is."""
        self._wanted.append(wanted)

    def forget(self) -> None:
        """What was measured holds no longer."""
        self._epoch += 1
        self.profile, self._round = None, None
        self._chosen_by.clear()
        self._wanted.clear()
        self._end_search()

    def tick(self, iteration: int) -> None:
        """Go on with what can go on, at the start of an iteration."""
        if self._round is not None:
            names = [f"report/{self._round}/{rank}" for rank in range(self._ranks)]
            if not (self._patient or self._board.has_all(names)):
                return
            texts = [self._board.wait(name) for name in names]
            for name in names:
                self._board.remove(name)
            self._round = None
            error = self._merge([RankReport.from_json(text) for text in texts])
            if self._stop:
                self._wanted.clear()
                self._announce(
                    Announcement(0, iteration + _AHEAD, self._epoch, stop=True, error=error)
                )
                return
        if self._search is None and self._wanted and self.profile is not None:
            wanted = self._wanted.pop(0)
            moved = self._moved(wanted, self.profile)
            if wanted.least_gain:
                logger.info(
                    "drift: a pass has moved by %.1f%% at most since the last search: %s",
                    100 * moved,
                    "searching again"
                    if moved >= wanted.least_gain
                    else f"{wanted.running().name} goes on",
                )
            if not wanted.least_gain or moved >= wanted.least_gain:
                self._begin_search(self.profile, wanted)
        if self._search is not None:
            self._look_at_search(*self._search, iteration)

    def starting_schedule(self, microbatches: int) -> str:
        """A schedule file for passes that all take the same time: nothing is measured yet.

        Waits for the search. SearchFailed if there is none within the limit.
        """
        chunks = self._placement.num_chunks(0)
        costs = Costs.uniform(self._placement, 1.0, 1.0, 1.0, m_b=1 / chunks)
        profile = Profile(placement=self._placement, costs=costs)
        search = Search(profile, microbatches, self._limit, "quick")
        try:
            search.result(wait=True)
            return search.text()
        finally:
            search.stop()

    def _merge(self, reports: list[RankReport]) -> str:
        """Make the profile, and keep it; why that failed."""
        before = self.profile
        profile = merge(self._placement, reports, self._job, before=before)
        self.profile, costs = profile, profile.costs
        if (line := outlier_line(reports)) is not None:
            logger.warning("%s", line)
        logger.info(
            "%sprofile of %s: F %s, B %s, W %s%s ms; messages %s ms; a microbatch keeps %s%s",
            "" if before is None else "drift: ",
            "1 batch" if reports[0].batches == 1 else f"{reports[0].batches} batches",
            _span(costs.t_f),
            _span(costs.t_b),
            _span(costs.t_w),
            "" if costs.t_r is None else f", R {_span(costs.t_r)}",
            _span([[ms for _, _, ms in costs.t_edges]], ".3g"),
            _bytes_span(costs.m_b),
            "" if costs.m_r is None else f", {_bytes_span(costs.m_r)} of it before R",
        )
        if before is None:  # what lies there was found for another profile
            self._keep("schedule.json", lambda path: path.unlink(missing_ok=True))
        return self._keep("profile.json", lambda path: save_profile(profile, path))

    def _moved(self, wanted: Wanted, profile: Profile) -> float:
        """How far times are from those that the running schedule was chosen by."""
        before = self._chosen_by.get(wanted.microbatches)
        return math.inf if before is None else change(before, profile.costs)

    def _begin_search(self, profile: Profile, wanted: Wanted) -> None:
        self._chosen_by[wanted.microbatches] = profile.costs
        try:
            search = Search(
                profile,
                wanted.microbatches,
                limit_text(self._limit, profile, wanted.microbatches),
                self._effort,
            )
        except (OSError, ValueError) as error:
            logger.warning("no schedule is searched for: %s", error)
            return
        kept = self._cache is not None and (self._cache / "profile.json").is_file()
        costs = str(self._cache / "profile.json") if self._cache and kept else "PROFILE.json"
        logger.info("searching: %s", search.command(costs))
        self._search = wanted, search

    def _look_at_search(self, wanted: Wanted, search: Search, iteration: int) -> None:
        try:
            found = search.result(wait=self._patient)
        except SearchFailed as error:
            reason = str(error).removeprefix("zero-bubble: ")
            reason = reason.replace("--memory-limit", "--zero-bubble-memory-limit")
            logger.warning(
                "%s goes on, whatever memory it takes: the search failed: %s",
                wanted.running().name,
                reason,
            )
            self._end_search()
            return
        if found is None:
            return
        choice = self._choice(wanted, search, found, iteration)
        self._end_search()
        if choice is not None:
            self._announce(choice)

    def _choice(
        self, wanted: Wanted, search: Search, found: ScheduleFile, iteration: int
    ) -> Announcement | None:
        costs = search.profile.costs
        running = wanted.running()
        before, after = simulate(running, costs), simulate(found.schedule, costs)
        limits = found.memory_limit or (math.inf,) * len(before.peak_memory)
        fits = all(
            held <= limit * (1 + 1e-9)
            for held, limit in zip(before.peak_memory, limits, strict=True)
        )
        gain = 1 - after.cost / before.cost if before.cost else 0.0
        longer = self._barrier and takes_longer(after, before)
        if fits and found.schedule.passes == running.passes:
            logger.info("%s goes on: nothing better was found", running.name)
            return None
        if fits and (longer or gain < max(_SAME, wanted.least_gain)):
            why = (
                ", but with steps that wait for all stages an iteration would take longer: see "
                "--optimizer-post-validation"
                if longer and gain > _SAME
                else ""
            )
            logger.info(
                "%s goes on: the best that was found, %s, would cost %.2f ms instead of %.2f "
                "(%.1f%% less)%s",
                running.name,
                found.schedule.name,
                after.cost,
                before.cost,
                100 * max(0.0, gain),
                why,
            )
            return None
        text = search.text()
        self._keep("schedule.json", lambda path: path.write_text(text, encoding="utf-8"))
        logger.info(
            "iteration %d switches to %s: predicted cost %.2f ms instead of %.2f with %s (%.1f%% "
            "less), bubble rate %.1f%% instead of %.1f%%%s",
            iteration + _AHEAD,
            found.schedule.name,
            after.cost,
            before.cost,
            running.name,
            100 * gain,
            100 * after.bubble_rate,
            100 * before.bubble_rate,
            "" if fits else "; what runs now does not keep the memory limit",
        )
        return Announcement(
            wanted.microbatches,
            iteration + _AHEAD,
            self._epoch,
            text,
            saved_ms=self._period(before) - self._period(after),
        )

    def _period(self, timeline: Timeline) -> float:
        """ms that a schedule adds to an iteration."""
        return _length(timeline) if self._barrier else timeline.cost

    def _keep(self, name: str, write: Callable[[Path], object]) -> str:
        """In the cache, if there is one; why not. Training does not end for want of it."""
        if self._cache is None:
            return ""
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            write(self._cache / name)
        except OSError as error:
            logger.warning("%s is not kept: %s", name, error)
            return f"{name} cannot be written to --zero-bubble-cache {self._cache}: {error}"
        return ""

    def _announce(self, announcement: Announcement) -> None:
        self._board.post(f"announcement/{self._announced}", announcement.to_json())
        self._announced += 1

    def _end_search(self) -> None:
        if self._search is not None:
            self._search[1].stop()
            self._search = None


def limit_text(limit: str, profile: Profile, microbatches: int) -> str:
    """What ``--memory-limit`` takes for what ``--zero-bubble-memory-limit`` says.

    ``auto`` is each stage's room; where that is enough for all microbatches at once, no limit.
    ValueError if it is not known.
    """
    if limit != "auto":
        return limit
    if not profile.room or any(one is None for one in profile.room):
        raise ValueError(
            "--zero-bubble-memory-limit auto: nothing says how much memory is free (on a CPU the "
            "package psutil does); give a limit such as 1p or 12GiB"
        )
    texts = []
    for row, room in zip(profile.costs.m_b, profile.room, strict=True):
        enough = room is None or room >= microbatches * sum(row)
        texts.append("inf" if enough else f"{room:.0f}")
    logger.info(
        "--zero-bubble-memory-limit auto: room for %s%s",
        _bytes_span([[room or 0.0] for room in profile.room]),
        f", enough for all {microbatches} microbatches: no limit" if set(texts) == {"inf"} else "",
    )
    return "inf" if set(texts) == {"inf"} else ",".join(texts)


def takes_longer(one: Timeline, other: Timeline) -> bool:
    """Whether it does where stages start together, and step when all have ended."""
    return _length(one) > _length(other) * (1 + _SAME)


def _length(timeline: Timeline) -> float:
    """ms from the start of the first stage to the end of the last."""
    return max((row[-1].end for row in timeline.spans if row), default=0.0)


def _span(table: Iterable[Iterable[float]], form: str = ".2f") -> str:
    """``1.50 to 2.25``, or one number where all are equal."""
    values = [value for row in table for value in row]
    if not values:
        return "unknown"
    least, most = (format(value, form) for value in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def _bytes_span(table: Iterable[Iterable[float]]) -> str:
    sums = [sum(row) for row in table]
    least, most = in_bytes(min(sums)), in_bytes(max(sums))
    return least if least == most else f"{least} to {most}"
