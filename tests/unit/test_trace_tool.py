"""tools/profile/trace.py: what it writes and prints, and what it says of a user's mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.trace_runs import made_run
from tools.profile.trace import main
from zero_bubble.builders import build
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.schedule import Kind
from zero_bubble.trace.merge import load_traces
from zero_bubble.trace.rank_file import save_rank


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for one in made_run(build("zb-h1", 3, 5), iterations=(10, 11, 12)):
        save_rank(one, tmp_path / "traces")
    return tmp_path / "traces"


def test_both_files_and_a_table_of_each_iteration(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(directory)]) == 0
    printed = capsys.readouterr().out
    for one in load_traces(directory).measured:
        assert f"iteration {one.iteration}, zb-h1, 5 microbatches" in printed
        assert f"{100 * one.bubble_rate:.2f} %" in printed
        assert f"{100 * one.predict().bubble_rate:.2f} %" in printed
    assert printed.count("predicted: the same order with the median times measured") == 1
    assert len(json.loads((directory / "trace.json").read_text())["traceEvents"]) > 3 * 3 * 15
    assert "<!doctype html>" in (directory / "page.html").read_text()


def test_recomputation_is_told_apart_from_other_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = with_recomputation(build("zb-h1", 2, 3))
    for one in made_run(schedule):
        save_rank(one, tmp_path)
    assert main([str(tmp_path)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[2:5]
    assert header.split()[:4] == ["work", "of", "it", "R"]
    (measured,) = load_traces(tmp_path).measured
    for stage, row in enumerate(measured.rows):
        again = sum(one.end - one.ready for one in row if one.what.kind is Kind.R)
        assert 0 < again < measured.work[stage]
        work = f"{measured.work[stage]:.2f}"
        assert rows[stage].split()[:4] == ["stage", str(stage), work, f"{again:.2f}"]


def test_chosen_iterations_and_files(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = tmp_path / "a.json", tmp_path / "b.html"
    flags = ["--iterations", "11:12", "--output", str(trace), "--page", str(page)]
    assert main([str(directory), *flags]) == 0
    assert trace.exists()
    assert page.exists()
    printed = capsys.readouterr().out
    assert "iteration 10," not in printed
    assert "iteration 12," in printed


def test_what_is_missing_is_said(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_rank(made_run(build("zb-h1", 2, 5), first_rank=7)[0], directory)
    assert main([str(directory)]) == 0
    assert "trace.py: Pipeline 7-8 is left out: rank 8 left no file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["none"], "none: no such directory: give the one of the job's --zero-bubble-trace"),
        (["traces", "--iterations", "12:10"], "'12:10' is no window"),
        (["traces", "--iterations", "3"], "recorded iterations 10, 11, 12, none of those wanted"),
        (["traces", "--page", "no/page.html"], "--page no/page.html: there is no directory no"),
        ([], "the following arguments are required: DIR"),
    ],
)
def test_mistakes_are_named(
    flags: list[str],
    expected: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(directory.parent)
    assert main(flags) == 2
    assert expected in capsys.readouterr().err


def test_a_bad_file_is_named(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "trace-rank00001.json").write_text("{}")
    assert main([str(directory)]) == 2
    assert "trace-rank00001.json: field 'format'" in capsys.readouterr().err
