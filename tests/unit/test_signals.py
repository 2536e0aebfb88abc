"""Ranks, and what else goes on by itself, are ended whatever signals come, and however often."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import local_job
from megatron.zero_bubble.signals import STOPPING, held_back, stopping_once
from tests.unit.processes import is_running

ROOT = Path(__file__).parents[2]
RANKS = 4
JOB = f"""
import sys
from pathlib import Path
from megatron.zero_bubble.local_job import run_ranks

rank = (
    "import os, sys, time; from pathlib import Path;"
    "Path(sys.argv[1], os.environ['RANK']).write_text(str(os.getpid())); time.sleep(100)"
)
where = Path(sys.argv[1])
run_ranks(["-c", rank, str(where)], {RANKS}, logs=where / "logs", time_limit=90)
"""


def wait_until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


@pytest.mark.parametrize("signals", [(one,) * 3 for one in STOPPING], ids=lambda one: one[0].name)
def test_no_rank_is_left(signals: tuple[signal.Signals, ...], tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    files = [tmp_path / str(rank) for rank in range(RANKS)]
    assert wait_until(lambda: all(one.exists() and one.read_text() for one in files))
    ranks = [int(one.read_text()) for one in files]
    for one in signals:
        job.send_signal(one)
        time.sleep(0.01)
    assert job.wait(60) != 0
    assert not [one for one in ranks if is_running(one)]


def test_the_first_signal_interrupts_and_later_ones_do_not() -> None:
    before = [signal.getsignal(one) for one in STOPPING]
    reached = []

    def clean_up() -> None:
        for one in STOPPING:
            signal.raise_signal(one)
        with stopping_once(), held_back():  # as what is called in here does
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        reached.append("the end")

    def work() -> None:
        with stopping_once():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                clean_up()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["the end"]
    assert [signal.getsignal(one) for one in STOPPING] == before


def test_a_signal_that_was_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_once():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_comes_in_between_interrupts_at_the_end_of_it() -> None:
    reached = []

    def work() -> None:
        with stopping_once():
            with held_back():
                with held_back():
                    signal.raise_signal(signal.SIGHUP)
                reached.append("inner")
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["inner"]
    with held_back():  # outside nothing changes
        pass


def test_a_signal_while_a_rank_is_started_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes when the process is there, and nobody has been told its number."""
    started: list[int] = []
    popen = subprocess.Popen

    def late(*given: Any, **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = popen(*given, **options)
        started.append(process.pid)
        signal.raise_signal(signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", late)
    with pytest.raises(KeyboardInterrupt):
        local_job.run_ranks(["-c", "import time; time.sleep(100)"], 3, logs=tmp_path, time_limit=50)
    assert len(started) == 1
    assert not is_running(started[0])


def test_a_first_signal_while_it_cleans_up_comes_after_that() -> None:
    cleaned = []

    def work() -> None:
        with stopping_once():
            try:
                raise ValueError("something else")
            finally:
                with held_back():
                    signal.raise_signal(signal.SIGINT)
                    cleaned.append("all")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == ["all"]
