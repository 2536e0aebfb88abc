"""What the command line refuses: one line that says what was wrong, and code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zero_bubble.builders import build
from zero_bubble.cli import main
from zero_bubble.export.json_io import save_schedule

SIZE = ["--stages", "4", "--microbatches", "8"]
Capture = pytest.CaptureFixture[str]


def refusal(arguments: list[str], capsys: Capture) -> str:
    """What the command says when it refuses: one line, and nothing else."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zero-bubble: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND (see zero-bubble --help)"),
        (["schedule", "zb-h3", *SIZE], "no schedule is called 'zb-h3'; known: auto, gpipe"),
        (["schedule", "zb-h1", "--stages", "2"], "arguments are required: --microbatches"),
        (["compare", "--stages", "four", "--microbatches", "8"], "invalid int value: 'four'"),
        (["compare", "--stages", "0", "--microbatches", "8"], "at least 1 stage"),
        (["schedule", "1f1b", "--stages", "0", "--microbatches", "8"], "at least 1 stage"),
        (["compare", "--stages", "4", "--microbatches", "0"], "at least 1"),
        (["schedule", "zb-h1", "--stages", "4", "--microbatches", "0"], "at least 1"),
        (["compare", *SIZE, "--t-f", "-1"], "t_f of stage 0, chunk 0, must be a finite number"),
        (["schedule", "zb-h1", *SIZE, "--t-w", "nan"], "t_w of stage 0, chunk 0, must be a finite"),
        (["draw", "zb-h1", *SIZE, "--t-comm", "inf"], "t_comm must be a finite number"),
        (["compare", *SIZE, "--m-w", "2"], "m_w of stage 0, chunk 0, is 2, more than its m_b 1"),
        (["schedule", "zb-h1", *SIZE, "--chunks", "2"], "--chunks 2: zb-h1 has a fixed number"),
        (["schedule", "interleaved", *SIZE, "--chunks", "0"], "at least 1 stage and 1 chunk"),
        (["draw", "1f1b", *SIZE, "--width", "0"], "width must be at least 1 column, not 0"),
        (["compare", *SIZE, "--costs", "x", "--t-f", "1"], "--t-f and --costs exclude each other"),
        (["compare", *SIZE, "--costs", "/no/file"], "/no/file: No such file or directory"),
        (["check", "/no/file"], "/no/file: No such file or directory"),
        (["draw", "1f1b"], "1f1b needs --stages and --microbatches"),
        (["draw", "1f1b", *SIZE, "--svg", "/no/a.svg", "--width", "9"], "at least 400 pixels"),
        (["draw", "1f1b", *SIZE, "--svg", "/no/a.svg"], "/no/a.svg: No such file or directory"),
        (["export", "1f1b", *SIZE, "--output", "x.txt"], "its ending is none of .trace.json,"),
        (["export", "1f1b", *SIZE, "--output", "x.csv", "--times"], "--times is for --to json"),
        (["export", "1f1b", *SIZE, "--to", "png", "--output", "x"], "invalid choice: 'png'"),
        (["export", "nothing", "--output", "x.csv"], "'nothing' is neither a file nor one of"),
        (["draw", "nothing"], "'nothing' is neither a file nor one of gpipe, 1f1b"),
        (["draw", "auto"], "zero-bubble schedule auto --stages P --microbatches M --output FILE"),
        (["simulate", "1f1b", "auto", *SIZE], "auto is a search: save what it finds with zero-bu"),
        (["export", "auto", "--output", "x.csv"], "--output FILE.json, and give FILE.json here"),
        (["check", "auto"], "auto is no file: save the schedule with zero-bubble schedule auto"),
        (["check", "zb-h1"], "zb-h1 is no file: save the schedule with zero-bubble schedule zb-h1"),
    ],
)
def test_a_user_s_error_ends_with_2(arguments: list[str], message: str, capsys: Capture) -> None:
    assert message in refusal(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule", "zb-h1", *SIZE, "--t-f", "1e308"], "t_f of stage 0, chunk 0, must be 0 or"),
        (["compare", *SIZE, "--t-f", "1e308"], "t_f of stage 0, chunk 0, must be 0 or from"),
        (["schedule", "zb-h1", *SIZE, "--t-f", "1e-320"], "t_f of stage 0, chunk 0, must be 0 or"),
    ],
)
def test_absurd_numbers_end_without_a_traceback(
    arguments: list[str], message: str, capsys: Capture
) -> None:
    assert message in refusal(arguments, capsys)


def test_a_pass_far_shorter_than_the_others_does_not_widen_the_drawing(capsys: Capture) -> None:
    assert main(["schedule", "zb-h1", *SIZE, "--t-f", "1e-9", "--t-b", "1"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 110_000


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("nan", "--memory-limit nan: must be a number"),
        ("-1p", "--memory-limit -1p: must be a number, at least 0"),
        ("much", "--memory-limit 'much': expected a limit such as 1.5p, 12GiB"),
        ("3x", "--memory-limit 3x: unknown unit 'x'; known: p, B, KiB"),
        ("1,2,3", "--memory-limit 1,2,3: 3 limits for 4 stages: give one, or one each"),
        ("12GiB", "--memory-limit 12GiB is in bytes, but the costs are not"),
    ],
)
def test_a_memory_limit_that_is_none(
    limit: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    file = str(tmp_path / "one.json")
    save_schedule(build("zb-h1", 4, 8), file)
    assert message in refusal(["check", file, f"--memory-limit={limit}"], capsys)


def test_a_limit_below_what_one_microbatch_needs_is_a_violation(
    tmp_path: Path, capsys: Capture
) -> None:
    file = str(tmp_path / "one.json")
    save_schedule(build("zb-h1", 4, 8), file)
    assert main(["check", file, "--memory-limit", "0.2p"]) == 1
    assert "stage 0, 0F0: memory: holds 1, limit 0.8\n" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["check"], ["draw"], ["export", "--output", "x.svg"]])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("one.csv", "0F0,0B0\n1F0,1Q0\n", "row 2 (rank 1), column 2: unknown cell '1Q0'"),
        ("one.csv", "0F0,0B0\n0F1,0B1\n", "row 2 (rank 1) has 0F1, but stage 0 also runs"),
        ("one.json", "[1, 2]", "expected a JSON object, not list"),
        ("one.json", '{"passes": 3}', "field 'format': expected 'zero-bubble schedule', not None"),
        ("one.json", "0F0,0B0\n", "not JSON: "),
        ("one.svg", "<svg/>", "only .json and .csv schedules can be read"),
        ("one.trace.json", '{"traceEvents": []}', "a Chrome trace, which is only to look at"),
    ],
)
def test_files_of_the_wrong_shape(
    command: list[str], name: str, content: str, message: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / name
    file.write_text(content)
    assert f"{file}: {message}" in refusal([command[0], str(file), *command[1:]], capsys)


@pytest.mark.parametrize("flag", ["stages", "microbatches", "chunks"])
@pytest.mark.parametrize("command", [["draw"], ["simulate"], ["export", "--output", "x.csv"]])
def test_a_file_has_its_own_size(
    command: list[str], flag: str, tmp_path: Path, capsys: Capture
) -> None:
    file = str(tmp_path / "one.json")
    save_schedule(build("zb-h1", 4, 8), file)
    error = refusal([command[0], file, *command[1:], f"--{flag}", "2"], capsys)
    assert f"--{flag} 2 is for names such as 1f1b: a file has its own number of {flag}" in error


@pytest.mark.parametrize("command", ["schedule", "compare", "check", "draw", "export"])
def test_every_command_s_help_has_examples_that_parse(
    command: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They fail, if at all, only since the files they name are not there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([command, "--help"])
    help_text = capsys.readouterr().out
    lines = help_text.partition("examples:\n")[2].splitlines()
    assert len(lines) >= 3
    for line in lines:
        program, *arguments = line.split()
        assert program == "zero-bubble"
        assert arguments[0] == command
        code = main(arguments)
        error = capsys.readouterr().err
        missing = "neither a file" in error or "No such file" in error
        assert (code, missing) in {(0, False), (2, True)}, error


def test_a_file_for_more_microbatches_than_it_has_passes(tmp_path: Path, capsys: Capture) -> None:
    """Nobody counts to a billion to find that out."""
    file = tmp_path / "one.json"
    assert main(["schedule", "zb-h1", *SIZE, "--output", str(file)]) == 0
    text = file.read_text().replace('"num_microbatches": 8', '"num_microbatches": 1000000000')
    assert "1000000000" in text
    file.write_text(text)
    capsys.readouterr()
    assert "need 2 passes each" in refusal(["check", str(file)], capsys)


@pytest.mark.parametrize("command", ["bound", "compare", "curve", "partition", "schedule auto"])
@pytest.mark.parametrize("sizes", [(10**20, 3), (3, 10**20), (1001, 1001)])
def test_what_no_memory_could_hold_is_refused_at_once(
    command: str, sizes: tuple[int, int], capsys: Capture
) -> None:
    flags = ["--stages", str(sizes[0]), "--microbatches", str(sizes[1])]
    message = refusal([*command.split(), *flags], capsys)
    assert "more than the 1,000,000 that can be handled" in message


@pytest.mark.parametrize(("target", "code"), [("&-", 0), ("/dev/full", 2)])
def test_a_standard_output_that_takes_nothing(target: str, code: int) -> None:
    command = f"{sys.executable} -m zero_bubble compare --stages 2 --microbatches 2 >{target}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("standard output: No space left on device" in done.stderr) == (code == 2)
