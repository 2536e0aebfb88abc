"""What test_rescheduler.py checks, in a process in CPU mode."""

from __future__ import annotations

import json
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.profile import coordinator as coordinator_module
from tests.unit.rescheduler_job import (
    FIRST,
    MICROBATCHES,
    NO_DRIFT,
    RANKS,
    Job,
    Searches,
    logged,
    searching,
)
from zero_bubble.builders import build
from zero_bubble.profile.profile import load_profile


def all_switch_in_the_same_iteration(cases: int) -> tuple[int, int]:
    """However the ranks' steps interleave.

    Returns how many different iterations it has been, and how many batches have ended before rank 0
    began that iteration.
    """
    switches, early = set(), 0
    for seed in range(cases):
        draw = random.Random(seed)
        with searching(looks=draw.randrange(4)):
            job = Job(Searches(), NO_DRIFT)
            early += job.train_out_of_step(20, draw)
            running = job.running
            switch = running.index("found-0")
            assert running == [FIRST] * switch + ["found-0"] * (20 - switch), (seed, running)
            assert job.measured == [3, 4, 5]
            assert switch >= 7  # iterations count from 1
            switches.add(switch)
            answers = [rank.lets_run_ahead for rank in job.ranks]
            assert all(one == answers[0] for one in answers), (seed, answers)
            # Neither before messages are measured, nor what will not run.
            refused = [one for one, let in answers[0].items() if not let]
            assert refused == [3, switch + 1], (seed, refused)
    return len(switches), early


def one_that_waits_switches_where_it_always_does() -> None:
    """All have reported when iteration 6 begins, and it is announced for the next but one."""
    with searching(looks=100) as searches:
        job = Job(searches, patient=True)
        job.train(9)
        assert job.running == [FIRST] * 7 + ["found-0"] * 2
        assert [rank.memory for rank in job.ranks] == [[3]] * RANKS
    (search,) = searches.begun
    assert search.stopped
    assert search.microbatches == MICROBATCHES
    costs = search.profile.costs
    assert costs.t_f == costs.t_b == costs.t_w == ((1.0,),) * RANKS
    assert (costs.m_b, costs.m_w) == (((100.0,),) * RANKS, ((40.0,),) * RANKS)


def training_goes_on_while_it_searches() -> None:
    with searching(looks=4) as searches:
        job = Job(searches)
        job.train(15)
        assert job.running == [FIRST] * 11 + ["found-0"] * 4


def a_resumed_job_measures_from_its_start() -> None:
    with searching() as searches:
        job = Job(searches)
        job.train(109, first=101)
        assert job.measured == [103, 104, 105]
        assert job.running == [FIRST] * 7 + ["found-0"] * 2


def another_number_of_microbatches() -> None:
    """It is searched for with the costs there are; each number keeps its own schedule."""
    with searching() as searches:
        job = Job(searches)
        job.sizes = {10: (8, 32), 13: (MICROBATCHES, 32), 15: (8, 32)}
        job.train(16)
        assert job.measured == [3, 4, 5]
        assert [one.microbatches for one in searches.begun] == [MICROBATCHES, 8]
        assert job.running == [
            *[FIRST] * 7, *["found-0"] * 2, *[FIRST] * 2, "found-1", *["found-0"] * 2,
            *["found-1"] * 2,
        ]  # fmt: skip


def another_number_of_microbatches_before_the_profile() -> None:
    """The batches of the round may differ in it; the last one's is searched for first."""
    with searching() as searches:
        job = Job(searches)
        job.sizes = {4: (8, 32), 7: (MICROBATCHES, 32)}
        job.train(12)
        assert [one.microbatches for one in searches.begun] == [8, MICROBATCHES]
        # The first is found when iteration 6 begins, the other one when 7 does.
        assert job.running == [FIRST] * 8 + ["found-1"] * 4


def another_length() -> None:
    """What was measured holds no longer: back to the first schedule, and measured again."""
    with searching() as searches:
        job = Job(searches)
        job.sizes = {10: (MICROBATCHES, 64)}
        with logged() as lines:
            job.train(18)
        assert job.measured == [3, 4, 5, 11, 12, 13]
        assert [rank.memory for rank in job.ranks] == [[3, 11]] * RANKS
        assert job.running == [
            *[FIRST] * 7, *["found-0"] * 2, *[FIRST] * 6, *["found-1"] * 3,
        ]  # fmt: skip
    assert "microbatches are of 1 x 64 tokens now, not of 1 x 32: measuring again" in lines


def another_length_while_it_searches() -> None:
    with searching(looks=6) as searches:
        job = Job(searches)
        job.sizes = {8: (MICROBATCHES, 64)}
        job.train(20)
        assert searches.begun[0].stopped
        running = job.running
        assert running.index("found-1") == 19
        assert "found-0" not in running


def another_length_where_a_switch_was_announced() -> None:
    """The announcement, made in iteration 6 for 8, is for microbatches that are no more."""
    for changes in (7, 8):
        with searching() as searches:
            job = Job(searches)
            job.sizes = {changes: (MICROBATCHES, 64)}
            job.train(10)
            assert len(searches.begun) == 1
            assert searches.begun[0].stopped
            assert job.running == [FIRST] * 10


def another_length_with_ranks_out_of_step(cases: int) -> None:
    for seed in range(cases):
        draw = random.Random(seed)
        with searching(looks=draw.randrange(3)) as searches:
            job = Job(searches)
            job.validates = draw.random() < 0.5
            job.sizes = {draw.randrange(2, 12): (MICROBATCHES, 64)}
            job.train_out_of_step(26, draw)
            assert job.running[-1] != FIRST, (seed, job.running)
            answers = [rank.lets_run_ahead for rank in job.ranks]
            assert all(one == answers[0] for one in answers), (seed, answers)


def a_search_that_fails() -> None:
    with searching(fails=True) as searches:
        job = Job(searches)
        with logged() as lines:
            job.train(12)
        assert job.running == [FIRST] * 12
        assert len(searches.begun) == 1
        assert searches.begun[0].stopped
    assert any("zb-h1 goes on" in line and "there is none" in line for line in lines)


def what_is_no_better_is_not_switched_to() -> None:
    with searching() as searches:
        job = Job(searches)
        for rank in job.ranks:
            rank.party._start = lambda microbatches: build("zb-h2", RANKS, microbatches)
        with logged() as lines:
            job.train(9)
        assert job.running == ["zb-h2"] * 9
        assert searches.begun[0].stopped
    assert any("zb-h2 goes on" in line for line in lines)


def drift(factors: dict[int, float], iterations: int = 40, threshold: float = 0.02) -> Any:
    """(measured iterations, number of searches, lines), where F's get slower from iterations on.

    Only F, so that another order pays.
    """
    settings = replace(NO_DRIFT, drift_interval=6, drift_threshold=threshold)

    def ms(iteration: int) -> float:
        return max((factor for begun, factor in factors.items() if begun <= iteration), default=1.0)

    with searching() as searches:
        job = Job(searches, settings, ms=ms)
        with logged() as lines:
            job.train(iterations)
        assert len(set(job.running)) <= 1 + len(searches.begun)
        return job.measured, len(searches.begun), lines


def an_iteration_that_is_left_out(skipped: int) -> list[int]:
    """What is measured instead; the switch comes all the same."""
    with searching() as searches:
        job = Job(searches)
        job.train(20, skipped=skipped)
        assert job.running[-1] == "found-0"
        return job.measured


def a_job_that_ends_with_the_profile() -> None:
    """All ranks leave in the same iteration, with success; nothing is searched for."""
    with searching() as searches, mock.patch.object(torch.distributed, "barrier") as barrier:
        job = Job(searches, stop=True)
        job.train(7)
        for rank in job.ranks:
            with pytest.raises(SystemExit) as end:
                rank.begin(8)
            assert end.value.code == 0
        assert barrier.call_count == RANKS
        assert searches.begun == []


def the_profile_it_ends_with_is_kept() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        searching() as searches,
        mock.patch.object(torch.distributed, "barrier"),
    ):
        job = Job(searches, stop=True, cache=Path(directory) / "new")
        job.train(7)
        profile = load_profile(Path(directory) / "new" / "profile.json")
        assert profile.costs.t_f == ((1.0,),) * RANKS
        for rank in job.ranks:
            with pytest.raises(SystemExit):
                rank.begin(8)


def a_profile_that_cannot_be_written(stop: bool) -> None:
    """If it was all that was asked for, all ranks say so in the same iteration."""
    with (
        tempfile.NamedTemporaryFile() as file,
        searching() as searches,
        mock.patch.object(torch.distributed, "barrier") as barrier,
        logged() as lines,
    ):
        job = Job(searches, stop=stop, cache=Path(file.name) / "below")
        if stop:
            job.train(7)
            for rank in job.ranks:
                with pytest.raises(ConfigurationError, match="--zero-bubble-cache") as caught:
                    rank.begin(8)
                assert f"{file.name}/below" in str(caught.value)
            assert barrier.call_count == 0  # nobody else may come to one
        else:
            job.train(9)
            assert job.running == [FIRST] * 7 + ["found-0"] * 2
    assert any("profile.json" in line for line in lines)


def a_start_that_ends_before_it_has_measured(total: int) -> bool:
    """Whether it is told so; it begins with iteration 101 and measures until 105."""
    with searching() as searches, logged() as lines:
        job = Job(searches, replace(NO_DRIFT, total=total))
        job.train(102, first=101)
    return any("--zero-bubble-profile-iters" in line for line in lines)


def what_a_switch_has_gained(sizes: dict[int, tuple[int, int]]) -> str | None:
    """Iterations take 100 ms, the first under the new schedule 500, five then 90, and more 70."""
    now = 0.0
    with (
        searching() as searches,
        logged() as lines,
        mock.patch.object(time, "perf_counter", side_effect=lambda: now),
    ):
        job = Job(searches)
        job.sizes = sizes
        for iteration in range(1, 25):
            job.train(iteration, first=iteration)
            now += (
                0.1 if iteration < 8 else {8: 0.5}.get(iteration, 0.09 if iteration < 14 else 0.07)
            )
        assert job.running[6:8] == [FIRST, "found-0"]
    return next((one for one in lines if "measured gain" in one), None)


def announcements_are_text() -> None:
    one = coordinator_module.Announcement(6, 7, 2, "{}", saved_ms=1.5)
    assert coordinator_module.Announcement.from_json(one.to_json()) == one
    assert json.loads(one.to_json())["at"] == 7
