"""``zero-bubble schedule auto`` and its flags; named schedules beside a memory limit."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from zero_bubble.check import check
from zero_bubble.cli import main
from zero_bubble.cli.compiling import COMPILING
from zero_bubble.export.json_io import load_file
from zero_bubble.jitter import jittered
from zero_bubble.simulate import simulate

SIZE = ["--stages", "4", "--microbatches", "8"]
TIMES = ["--t-f", "10", "--t-b", "11", "--t-w", "7", "--t-comm", "1"]
Capture = pytest.CaptureFixture[str]


def printed(arguments: list[str], capsys: Capture, code: int = 0) -> str:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err in ("", f"{COMPILING}\n")
    return captured.out


def test_the_default_limit_is_1f1b_s_memory(capsys: Capture) -> None:
    """There nothing beats ZB-H1: (p-1)(T_F + T_B - T_W) of bubble (Table 2)."""
    out = printed(["schedule", "auto", *SIZE], capsys)
    assert out.startswith("stage 0  0F0 0F1")
    assert "auto-linear-1p: cost 27 ms, bubble rate 11.11%, peak memory 4, " in out
    assert "\nlimit: 1p = 4 M_B on every stage\nbound: 27 ms, bubble rate 11.11% (" in out
    assert "optimal: no schedule within these limits costs less" in out
    assert out == printed(["schedule", "auto", *SIZE, "--memory-limit", "1p"], capsys)


@pytest.mark.parametrize("method", ["auto", "windows"])
def test_a_terminal_sees_how_far_it_is(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    flags = ["--memory-limit", "0.5p", "--effort", "quick", "--method", method]
    assert main(["schedule", "auto", "--stages", "4", "--microbatches", "6", *flags]) == 0
    label = "search" if method == "auto" else method
    lines = terminal.getvalue().split("\r")
    assert any(re.match(rf"{label}  .* s  bubble .*%  bound .*%  gap", line) for line in lines)
    assert lines[-1] == ""


@pytest.mark.parametrize("placement", ["linear", "interleaved", "v"])
def test_what_it_saves_keeps_its_limit_and_costs_what_it_says(
    placement: str, capsys: Capture, tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    flags = ["--placement", placement, "--effort", "quick", "--output", str(path)]
    out = printed(["schedule", "auto", *SIZE, *TIMES, *flags, "--memory-limit", "1.25p"], capsys)
    found = load_file(path)
    assert found.costs is not None
    assert found.schedule.placement.name == placement
    assert found.schedule.name == f"auto-{placement}-1.25p"
    assert found.memory_limit == (5.0,) * 4
    assert check(found.schedule, costs=found.costs, memory_limit=5.0) == []
    assert f"cost {simulate(found.schedule, found.costs).cost:.6g} ms" in out
    assert f"{path}: legal" in printed(["check", str(path)], capsys)


def test_chunks_of_the_interleaved_placement(capsys: Capture) -> None:
    flags = ["--placement", "interleaved", "--chunks", "3", "--effort", "quick"]
    assert "2F7" in printed(["schedule", "auto", *SIZE, *flags], capsys)


@pytest.mark.parametrize("method", ["paper", "cp-sat", "highs", "windows"])
def test_every_method_finds_the_optimum_of_a_small_one(method: str, capsys: Capture) -> None:
    """At 1p that is ZB-H1's bubble, (p-1)(T_F + T_B - T_W) (Table 2)."""
    size = ["--stages", "3", "--microbatches", "5", "--t-f", "10", "--t-b", "11", "--t-w", "7"]
    flags = [] if method == "paper" else ["--time-limit", "5", "--effort", "quick"]
    out = printed(["schedule", "auto", *size, "--method", method, *flags], capsys)
    assert f": cost {5 * 28 + 2 * (10 + 11 - 7)} ms" in out
    assert "optimal: " in out


def test_a_gap_is_stated_with_what_the_bound_comes_from(capsys: Capture) -> None:
    """One chunk a stage at half of 1F1B's memory: no search meets the bound there yet."""
    flags = ["--memory-limit", "0.5p", "--effort", "quick"]
    out = printed(["schedule", "auto", "--stages", "6", "--microbatches", "12", *flags], capsys)
    assert "% of the bound (found by " in out
    assert "optimal" not in out


def test_it_says_where_more_memory_would_pay(capsys: Capture) -> None:
    out = printed(["schedule", "auto", *SIZE, "--effort", "quick"], capsys)
    assert "more memory: 1 more on every stage (+25.0% in total): the bound on the bubble" in out


def test_robust_is_5_percent_if_nothing_is_said(capsys: Capture) -> None:
    out = printed(["schedule", "auto", *SIZE, "--effort", "quick", "--robust"], capsys)
    assert "robust: mean cost " in out
    assert out == printed(
        ["schedule", "auto", *SIZE, "--effort", "quick", "--robust", "0.05"], capsys
    )


def test_robust_tells_the_mean_cost_of_what_it_chose(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    flags = ["--memory-limit", "1.25p", "--effort", "quick", "--robust", "0.3"]
    out = printed(["schedule", "auto", *SIZE, *TIMES, *flags, "--output", str(path)], capsys)
    found = load_file(path)
    assert found.costs is not None
    noisy = jittered(found.schedule, found.costs, sigma=0.3)
    assert f"robust: mean cost {noisy.mean:.6g} ms when times vary by 30%; " in out
    plain = printed(["schedule", "auto", *SIZE, *TIMES, *flags[:-2]], capsys)
    cheapest = re.search(r"cost (\S+) ms", plain)
    assert cheapest
    assert cheapest[1] in out


def test_large_schedules_are_shown_as_figures(capsys: Capture) -> None:
    size = ["--stages", "5", "--microbatches"]
    out = printed(["schedule", "zb-h1", *size, "20"], capsys)
    assert "0I19" in out
    assert "--print-order" not in out
    out = printed(["schedule", "zb-h1", *size, "21"], capsys)
    assert out.startswith("--print-order prints the order and the drawing of all 315 passes\n\n")
    assert out.count("stage") == 0
    assert "zb-h1: cost" in out
    assert "0I20" in printed(["schedule", "zb-h1", *size, "21", "--print-order"], capsys)
    drawn = printed(["schedule", "zb-h1", *size, "21", "--width", "90"], capsys).splitlines()
    assert [len(line) for line in drawn[:5]] == [90 + len("stage 0  ")] * 5


def test_a_named_schedule_beside_a_limit(capsys: Capture) -> None:
    out = printed(["schedule", "zb-h1", *SIZE, "--memory-limit", "1p"], capsys)
    assert out.endswith("\n--memory-limit 1p: kept\n")
    out = printed(["schedule", "zb-h2", *SIZE, "--memory-limit", "1.5p"], capsys, code=1)
    assert "--memory-limit 1.5p: stage 0, 0F6: memory: holds 7, limit 6\n" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["auto", "--memory-limit", "0.2p"],
            "--memory-limit 0.2p: memory limit 0.8 of stage 0 cannot be met: one microbatch takes "
            "1 there, the least that works",
        ),
        (["auto", "--microbatches", "0"], "--microbatches 0: at least 1 is needed"),
        (["auto", "--placement", "w"], "invalid choice: 'w'"),
        (["auto", "--chunks", "2"], "--chunks 2 needs --placement interleaved"),
        (["auto", "--effort", "huge"], "invalid choice: 'huge'"),
        (["auto", "--time-limit", "3"], "--time-limit is for --method cp-sat, highs, windows"),
        (["auto", "--method", "cp-sat", "--time-limit", "0"], "--time-limit 0: more than 0"),
        (["auto", "--method", "cp-sat", "--robust"], "--robust is for --method auto"),
        (["auto", "--method", "paper", "--effort", "quick"], "--effort quick is not for --method"),
        (["auto", "--method", "paper", "--placement", "v"], "not for the placement v"),
        (
            ["auto", "--robust", "-1"],
            "--robust -1: expected a relative standard deviation from 0 to",
        ),
        (["auto", "--robust", "5"], "below 1: 0.05 is 5 %"),
        (["zb-h1", "--placement", "v"], "--placement is for auto: zb-h1 is one fixed schedule"),
        (["zb-v", "--time-limit", "3"], "--time-limit is for auto: zb-v is one fixed schedule"),
    ],
)
def test_what_it_refuses(flags: list[str], message: str, capsys: Capture) -> None:
    name, *rest = flags
    assert main(["schedule", name, *SIZE, *rest]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def test_compare_searches_if_asked(capsys: Capture) -> None:
    """At equal times: ZB-H1's bubble at 1p, none at 2p, and none with the V."""
    rows = {
        line.split()[0]: line.split()[1:]
        for line in printed(["compare", *SIZE, "--auto"], capsys).splitlines()[1:]
    }
    assert rows["auto-linear-1p"][:2] == ["27.00", "11.11%"]
    assert rows["auto-linear-2p"][:2] == ["24.00", "0.00%"]
    assert rows["auto-v-1p"][:2] == ["24.00", "0.00%"]
    assert not any(name.startswith("auto") for name in printed(["compare", *SIZE], capsys).split())
