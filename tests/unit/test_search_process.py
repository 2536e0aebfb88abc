"""A search in a process of its own: its result, its errors, its end, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
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
ROOT = Path(__file__).parents[2]


def profile_of(placement: Placement) -> Profile:
    return Profile(placement=placement, costs=Costs.uniform(placement, 3.0, 3.0, 2.0, m_b=GB))


def long_search() -> Search:
    """One that takes half a minute at least: stages are uneven, and memory is short."""
    even = profile_of(v_shape(8))
    uneven = replace(even.costs, t_f=tuple((3.0 + stage % 3,) * 2 for stage in range(8)))
    return Search(replace(even, costs=uneven), 64, "1p", "thorough")


def words_of(search: Search) -> list[str]:
    """The command line that it names, without the command."""
    name, *words = shlex.split(search.command(str(search._output.with_name("profile.json"))))
    assert name == "zero-bubble"
    return words


@pytest.mark.parametrize("left", ["", "{}", "not JSON", None])
def test_a_result_that_cannot_be_read_is_a_failed_search(left: str | None) -> None:
    """Training does not end for want of a schedule, whatever became of its file."""
    search = Search(profile_of(linear(2)), 3, "1p", "quick")
    try:
        search._process.wait()
        if left is None:
            search._output.unlink()
        else:
            search._output.write_text(left)
        with pytest.raises(SearchFailed):
            search.result()
    finally:
        search.stop()


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
        assert main([*words_of(search), "--output", again]) == 0
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
            [sys.executable, "-m", "zero_bubble", *words_of(search)],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert ended.returncode == 2
        assert str(caught.value) == ended.stderr.strip().splitlines()[-1]
        assert "1MB" in str(caught.value)
        assert "--placement v" in " ".join(words_of(search))
    finally:
        search.stop()


def test_one_that_is_stopped_leaves_neither_process_nor_files() -> None:
    search = long_search()
    assert search.result() is None
    process, directory = search._process, search._output.parent
    search.stop()
    assert process.poll() is not None
    assert not directory.exists()
    search.stop()


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process of its parent's end"
)
def test_it_ends_with_the_process_that_has_started_it() -> None:
    """Even with one that is killed, and can end nothing itself."""
    begin = (
        "from tests.unit.test_search_process import *\n"
        "search = long_search()\n"
        "print(search._process.pid, search._output.parent, flush=True)\n"
        "search.result(wait=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", begin], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        try:
            # It searches, or is about to.
            assert _comes_true(lambda: "numpy" in Path(f"/proc/{pid}/maps").read_text())
            assert _is_alive(pid)
            parent.kill()
            assert _comes_true(lambda: not _is_alive(pid))
        finally:
            parent.kill()
            if _is_alive(pid):
                os.kill(int(pid), signal.SIGKILL)
            shutil.rmtree(directory)


def _is_alive(pid: str) -> bool:
    """Whether it runs; one that nobody has asked about since it ended does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def _comes_true(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not (true := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return true
