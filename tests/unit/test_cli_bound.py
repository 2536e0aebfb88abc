"""``zero-bubble bound``: its figures beside the paper's, and what it refuses."""

from __future__ import annotations

import pytest

from zero_bubble.cli import main
from zero_bubble.cli.compiling import COMPILING

SIZE = ["--stages", "4", "--microbatches", "8"]
Capture = pytest.CaptureFixture[str]


def printed(flags: list[str], capsys: Capture) -> list[str]:
    assert main(["bound", *SIZE, *flags]) == 0
    return capsys.readouterr().out.splitlines()


def test_at_1f1b_s_memory_it_is_what_zb_h1_costs(capsys: Capture) -> None:
    """Table 2: a bubble of (p-1)(T_F + T_B - T_W); 8 * 9 + 3 * (3 + 4 - 2) = 87."""
    lines = printed(["--t-f", "3", "--t-b", "4", "--t-w", "2"], capsys)
    assert lines[0].startswith(f"bound: 87 ms, bubble rate {15 / 87:.2%} (")
    assert (
        printed(["--t-f", "3", "--t-b", "4", "--t-w", "2", "--memory-limit", "1p"], capsys) == lines
    )


def test_with_enough_memory_it_is_the_work(capsys: Capture) -> None:
    assert printed(["--memory-limit", "2p"], capsys)[0] == (
        "bound: 24 ms, bubble rate 0.00% (work of stage 0)"
    )
    assert printed(["--placement", "v"], capsys)[0].startswith("bound: 24 ms, bubble rate 0.00%")


def test_a_row_for_each_stage_with_its_parts(capsys: Capture) -> None:
    """Stage s waits (p-1-s)(T_F + T_B) for its first B, and its limit is full before that."""
    lines = printed(["--memory-limit", "2,2,2,2"], capsys)
    header = next(index for index, line in enumerate(lines) if "memory limit" in line)
    rows = [line.split() for line in lines[header + 1 : header + 5]]
    for stage, row in enumerate(rows):
        assert row[:4] == ["stage", str(stage), "2", "24"]
        work, warm_up, cool_down, bound = map(float, row[3:])
        assert warm_up >= 2 * (3 - stage) + 1 - 2
        assert bound == work + warm_up + cool_down


def test_it_says_where_more_memory_would_pay(capsys: Capture) -> None:
    lines = printed(["--placement", "v", "--memory-limit", "0.75p", "--t-comm", "0.1"], capsys)
    advice = [line for line in lines if line.startswith("more memory: ")]
    assert advice
    assert all("in total): the bound on the bubble falls from" in line for line in advice)
    assert not any("more memory" in line for line in printed(["--memory-limit", "inf"], capsys))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--memory-limit", "0.2p"],
            "--memory-limit 0.2p: memory limit 0.8 of stage 0 cannot be met: one microbatch",
        ),
        (["--memory-limit", "4,4,4,0.5"], "memory limit 0.5 of stage 3 cannot be met"),
        (["--memory-limit", "some"], "--memory-limit 'some': expected a limit such as 1.5p"),
        (["--microbatches", "0"], "--microbatches 0: at least 1 is needed"),
        (["--stages", "0"], "--stages 0: at least 1 stage"),
        (["--chunks", "2"], "--chunks 2 needs --placement interleaved"),
    ],
)
def test_what_it_refuses(flags: list[str], message: str, capsys: Capture) -> None:
    assert main(["bound", *SIZE, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], "limit: 1p = 4 M_B on every stage"),
        (["--memory-limit", "6"], "limit: 6 M_B on every stage"),
        (["--memory-limit", "inf"], "limit: none on every stage"),
        (["--memory-limit", "6,6,4,inf"], "6 M_B on stages 0 to 1, 4 M_B on stage 2, none on sta"),
        (["--memory-limit", "2p", "--m-b", "3"], "limit: 2p = 24 in units of the costs on every"),
        (["--memory-limit", "2p", "--m-b", str(2**30)], "limit: 2p = 8 GiB on every stage"),
        (["--memory-limit", "12GiB", "--m-b", str(2**30)], "limit: 12 GiB on every stage"),
    ],
)
def test_the_limit_is_told_as_an_amount(flags: list[str], line: str, capsys: Capture) -> None:
    assert line in printed(flags, capsys)[1]


def limits_of_curve(flags: list[str], capsys: Capture) -> list[str]:
    assert main(["curve", "--stages", "4", "--microbatches", "4", *flags]) == 0
    _, _, header, *rows = capsys.readouterr().out.partition("\n\nlinear, by")[0].splitlines()
    assert "found above bound" in header
    return [row.split()[0] for row in rows]


def test_a_curve_s_limits_are_round(capsys: Capture) -> None:
    one = ["--placement", "linear"]
    whole = ["1/3p", "0.5p", "0.75p", "1p", "1.25p", "1.5p", "2p", "2.5p"]
    assert limits_of_curve(one, capsys) == whole
    some = limits_of_curve([*one, "--from", "0.6p", "--to", "1.25p"], capsys)
    assert some == ["0.6p", "0.75p", "1p", "1.25p"]
    even = limits_of_curve([*one, "--from", "1p", "--to", "2p", "--steps", "3"], capsys)
    assert even == ["1p", "1.5p", "2p"]


def test_a_curve_names_its_effort(capsys: Capture) -> None:
    assert main(["curve", *SIZE, "--to", "0.4p"]) == 0
    assert "found with effort quick" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["bound", "curve"])
def test_the_help_s_examples_work(command: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(lines) >= 3
    for line in lines:
        assert main(line.split()[1:]) == 0
        assert capsys.readouterr().err in ("", f"{COMPILING}\n")
