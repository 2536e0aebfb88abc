"""A search in a process of its own: its result, its errors, its end, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zero_bubble.profile.search import Search, SearchFailed
from zero_bubble.check import check
from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import load_schedule_and_costs, parse_file
from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.profile.profile import Profile
from zero_bubble.simulate import simulate

GB = 1e9


def profile_of(placement: Placement) -> Profile:
    return Profile(placement=placement, costs=Costs.uniform(placement, 3.0, 3.0, 2.0, m_b=GB))


def test_what_it_finds_is_for_the_profile_and_keeps_the_limit() -> None:
    """With two stages and 1p nothing is shorter than ZB-H1: (p-1)(T_F + T_B - T_W) of bubble."""
    profile = profile_of(linear(2))
    search = Search(profile, 3, "1p", "quick")
    try:
        if os.name == "posix":
            assert os.getpriority(os.PRIO_PROCESS, search._process.pid) == 19
        found = search.result(wait=True)
        assert found is not None
        assert found.costs == profile.costs
        assert found.memory_limit == (2 * GB, 2 * GB)
        timeline = simulate(found.schedule, profile.costs)
        assert timeline.cost == 3 * (3 + 3 + 2) + (3 + 3 - 2)
        assert max(timeline.peak_memory) <= 2 * GB
        assert check(found.schedule) == []
        assert parse_file(json.loads(search.text())) == found
        # Whoever wants to know more runs the same line.
        again = str(search._output.with_name("again.json"))
        assert main([*search.command[:-1], again]) == 0
        assert load_schedule_and_costs(again) == (found.schedule, found.costs)
        directory = search._output.parent
        assert directory.is_dir()
    finally:
        search.stop()
    assert not directory.exists()


def test_a_limit_that_nothing_keeps_fails_in_the_words_of_the_command() -> None:
    search = Search(profile_of(v_shape(2)), 2, "1MB", "quick")
    try:
        with pytest.raises(SearchFailed) as caught:
            search.result(wait=True)
        ended = subprocess.run(
            [sys.executable, "-m", "zero_bubble", *search.command],
            capture_output=True,
            text=True,
            check=False,
            cwd=Path(__file__).parents[2],
        )
        assert ended.returncode == 2
        assert str(caught.value) == ended.stderr.strip().splitlines()[-1]
        assert "1MB" in str(caught.value)
        assert "--placement v" in " ".join(search.command)
    finally:
        search.stop()


def test_one_that_is_stopped_leaves_neither_process_nor_files() -> None:
    search = Search(profile_of(linear(8)), 64, "2p", "thorough")
    assert search.result() is None
    process, directory = search._process, search._output.parent
    search.stop()
    assert process.poll() is not None
    assert not directory.exists()
    search.stop()
