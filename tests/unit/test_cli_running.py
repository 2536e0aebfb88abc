"""What a user meets while a command runs: outputs that cannot be, Ctrl-C, compiling."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from zero_bubble.cli import main
from zero_bubble.cli.compiling import COMPILING, announce_compiling

ROOT = Path(__file__).parents[2]
SIZE = ["--stages", "4", "--microbatches", "8"]
LONG = ["--stages", "16", "--microbatches", "64", "--memory-limit", "0.5p", "--t-comm", "0.3"]
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("name", ["auto", "zb-h1"])
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none/one.json", "there is no directory"),
        ("one.csv", "schedules are saved as FILE.json; zero-bubble export then makes other"),
        ("one.trace.json", "schedules are saved as FILE.json; zero-bubble export"),
        ("one", "schedules are saved as FILE.json; zero-bubble export"),
        ("folder.json", "this is a directory"),
    ],
)
def test_an_output_that_cannot_be_is_refused_before_the_search(
    name: str, path: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "folder.json").mkdir()
    # A search of this size would take minutes.
    size = ["--stages", "64", "--microbatches", "2000", "--memory-limit", "0.7p"]
    output = str(tmp_path / path)
    assert main(["schedule", name, *size, "--output", output]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"zero-bubble: --output {output}: {message}")
    assert [one.name for one in tmp_path.iterdir()] == ["folder.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_file_that_may_not_be_written(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "one.json"
    path.touch(mode=0o400)
    assert main(["schedule", "zb-h1", *SIZE, "--output", str(path)]) == 2
    assert "no permission to write there" in capsys.readouterr().err


@pytest.mark.parametrize(
    "method",
    ["auto", *(pytest.param(solver, marks=pytest.mark.slow) for solver in ("cp-sat", "highs"))],
)
def test_ctrl_c_ends_a_search_with_one_line(method: str) -> None:
    flags = [] if method == "auto" else ["--time-limit", "100"]
    effort = "thorough" if method == "auto" else "quick"
    command = ["schedule", "auto", *LONG, "--method", method, "--effort", effort, *flags]
    if method != "auto":
        command[3:6:2] = ["8", "24"]
    process = subprocess.Popen(
        [sys.executable, "-m", "zero_bubble", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # The tests themselves may run in the background, where a shell ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    lines = [line for line in error.splitlines() if line != COMPILING]
    assert (process.returncode, out, lines) == (130, "", ["zero-bubble: stopped"])


def test_ctrl_c_within_a_process_that_is_not_the_command_s(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zero_bubble.cli.schedule.search", interrupted)
    assert main(["schedule", "auto", *SIZE]) == 130
    assert capsys.readouterr().err == "zero-bubble: stopped\n"


def test_compiling_is_announced_once(capsys: Capture) -> None:
    one, other = numba.njit(lambda x: x + 1), numba.njit(lambda x: x + 2)
    announce_compiling()
    assert (one(1), other(1)) == (2, 3)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"{COMPILING}\n")
    announce_compiling()
    assert (one(2), other(2)) == (3, 4)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_machine_code_from_the_disk_is_not_announced() -> None:
    command = ["schedule", "auto", *SIZE, "--effort", "quick", "--memory-limit", "0.75p"]
    for _ in range(2):  # whether the first one compiles depends on what ran before
        done = subprocess.run(
            [sys.executable, "-m", "zero_bubble", *command],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stderr == ""


@pytest.mark.slow
def test_a_search_on_a_fresh_machine_says_that_it_compiles(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "zero_bubble", "schedule", "auto", *SIZE, "--effort", "quick"],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"{COMPILING}\n"
