"""The command line: what it prints, what it writes, and with which code it ends."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from zero_bubble.builders import BUILDERS, build
from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import load_schedule_and_costs, save_costs, save_schedule
from zero_bubble.placement import linear

ROOT = Path(__file__).parents[2]
SIZE = ["--stages", "4", "--microbatches", "8"]
Capture = pytest.CaptureFixture[str]


def test_compare_shows_the_paper_s_figures(capsys: Capture) -> None:
    assert main(["compare", *SIZE, "--t-f", "1", "--t-b", "1", "--t-w", "1"]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in table] == list(BUILDERS)
    for row in [
        ["gpipe", "33.00", "27.27%", "27.27%", "8", "0"],
        ["1f1b", "33.00", "27.27%", "27.27%", "4", "0"],
        ["zb-h1", "27.00", "11.11%", "11.11%", "4", "4"],
        ["zb-h2", "24.00", "0.00%", "0.00%", "7", "7"],
    ]:
        assert row in table


def test_compare_with_other_times(capsys: Capture) -> None:
    assert main(["compare", *SIZE, "--t-f", "3", "--t-b", "4", "--t-w", "2"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}
    # 8 * 9 = 72 of work; 3 * (3 + 4 + 2), 3 * (3 + 4 - 2) and 3 * (3 + 4 - 4) of bubble.
    assert rows["1f1b"][1:4] == ["99.00", f"{27 / 99:.2%}", f"{27 / 99:.2%}"]
    assert rows["zb-h1"][1:4] == ["87.00", f"{15 / 87:.2%}", f"{15 / 87:.2%}"]
    assert rows["zb-h2"][3] == f"{9 / 81:.2%}"


def test_compare_has_no_formula_with_messages_that_take_time(capsys: Capture) -> None:
    assert main(["compare", *SIZE, "--t-comm", "0.1"]) == 0
    assert {line.split()[3] for line in capsys.readouterr().out.splitlines()[1:]} == {"-"}


def test_schedule_prints_and_saves(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    flags = ["--t-f", "2", "--m-b", "10", "--m-w", "5", "--output", str(path)]
    assert main(["schedule", "zb-h1", "--stages", "2", "--microbatches", "2", *flags]) == 0
    printed = capsys.readouterr().out
    assert "stage 0  0F0 0F1 0I0 0W0 0I1 0W1\n" in printed
    assert "zb-h1: cost 14 ms, bubble rate 14.29%, peak memory 20, 15" in printed
    costs = Costs.uniform(linear(2), 2, 2, 2, m_b=10, m_w=5)
    assert load_schedule_and_costs(path) == (build("zb-h1", 2, 2), costs)


def test_chunks_for_those_that_have_a_choice(capsys: Capture) -> None:
    """Three chunks cut the bubble (p-1)(T_F+T_B+T_W) = 9 of 1F1B to a third: 24 + 3."""
    assert main(["compare", *SIZE, "--chunks", "3"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert rows["interleaved"][1] == "27.00"
    assert rows["zb-interleaved"][1] == "24.00"
    assert rows["1f1b"][1] == "33.00"
    for name in ("interleaved", "zb-interleaved"):
        assert main(["schedule", name, *SIZE, "--chunks", "3"]) == 0
        assert "2F7" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(BUILDERS))
def test_check_accepts_what_the_builders_make(name: str, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    save_schedule(build(name, 3, 6), path)
    assert main(["check", str(path)]) == 0
    chunks = {1: "1 chunk", 2: "2 chunks"}[BUILDERS[name].placement(3).num_chunks(0)]
    size = f"3 stages, {chunks} a stage, 6 microbatches"
    assert capsys.readouterr().out == f"{path}: legal: {size}\n{path}: bit-identical to 1F1B\n"


def test_check_refuses_with_1(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    save_schedule(build("zb-h1", 2, 2), path)
    path.write_text(path.read_text().replace("0F0 0F1 0I0", "0F0 0I0 0F1", 1))
    assert main(["check", str(path)]) == 0
    path.write_text(path.read_text().replace("0F0 0I0 0F1", "0I0 0F0 0F1", 1))
    assert main(["check", str(path)]) == 1
    assert f"{path}: stage 0, 0I0: order: runs before 0F0\n" in capsys.readouterr().out


def test_check_looks_at_memory(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    save_schedule(build("zb-h2", 4, 8), path)
    assert main(["check", str(path), "--memory-limit", "7"]) == 0
    assert main(["check", str(path), "--memory-limit", "4"]) == 1
    assert "stage 0, 0F4: memory: holds 5, limit 4" in capsys.readouterr().out
    assert main(["check", str(path), "--memory-limit", "2p"]) == 0
    assert main(["check", str(path), "--memory-limit", "1.5p"]) == 1
    assert "holds 7, limit 6" in capsys.readouterr().out
    assert main(["check", str(path), "--memory-limit", "7,7,7,1"]) == 1
    assert capsys.readouterr().out.startswith(f"{path}: stage 3, 0F1: memory: holds 2, limit 1\n")
    in_bytes = ["--m-b", str(2**30), "--m-w", "0"]
    assert main(["check", str(path), *in_bytes, "--memory-limit", "7GiB"]) == 0
    assert main(["check", str(path), *in_bytes, "--memory-limit", "7GB"]) == 1
    capsys.readouterr()


def test_check_keeps_to_the_limit_in_the_file(capsys: Capture, tmp_path: Path) -> None:
    path, costs = tmp_path / "one.json", Costs.uniform(linear(4), 1, 1, 1, m_b=10)
    save_schedule(build("zb-h2", 4, 8), path, costs, memory_limit=[70, 70, 70, 9])
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: stage 3, 0F0: memory: holds 10, limit 9\n")
    assert main(["check", str(path), "--memory-limit", "inf"]) == 0


def test_check_notes_another_order_of_accumulation(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    save_schedule(build("zb-h1", 1, 2), path)
    text = path.read_text()
    assert "0F0 0I0 0W0 0F1 0I1 0W1" in text
    path.write_text(text.replace("0F0 0I0 0W0 0F1 0I1 0W1", "0F0 0I0 0F1 0I1 0W1 0W0"))
    assert main(["check", str(path)]) == 0
    assert "note: stage 0, 0W0: not bit-identical" in capsys.readouterr().out


def test_draw_names_and_files(capsys: Capture, tmp_path: Path) -> None:
    path, picture = tmp_path / "one.json", tmp_path / "one.svg"
    save_schedule(build("zb-h2", 4, 8), path, Costs.uniform(linear(4), 5, 5, 5))
    assert main(["draw", "1f1b", str(path), *SIZE]) == 0
    printed = capsys.readouterr().out
    assert "1f1b: cost 165 ms" in printed  # with the file's costs
    assert "zb-h2: cost 120 ms" in printed
    assert main(["draw", "1f1b", str(path), *SIZE, "--t-f", "1", "--svg", str(picture)]) == 0
    assert "cost 24 ms" in picture.read_text()  # those on the command line


def test_costs_from_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(Costs.uniform(linear(4), 10, 10, 10), path)
    assert main(["compare", *SIZE, "--costs", str(path)]) == 0
    captured = capsys.readouterr()
    assert "330.00" in captured.out
    # They are for one chunk a stage, which is said once.
    left_out = "zero-bubble: left out: interleaved, zb-interleaved, zb-v, v-half, v-min (--costs "
    assert captured.err.startswith(left_out)
    assert captured.err.count("\n") == 1


def test_costs_of_another_number_of_stages(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    save_costs(Costs.uniform(linear(4), 1, 1, 1), path)
    for command in (["compare"], ["schedule", "zb-h1"], ["schedule", "auto"], ["bound"]):
        flags = ["--stages", "8", "--microbatches", "8", "--costs", str(path)]
        assert main([*command, *flags]) == 2
        assert capsys.readouterr().err == (
            f"zero-bubble: --costs {path}: the file has costs for 4 stages, --stages is 8\n"
        )


def test_costs_of_one_chunk_a_stage_may_be_flat(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    times = '"t_f": [10, 10], "t_b": [10, 10], "t_w": [10, 10]'
    path.write_text(f'{{{times}, "m_b": [1, 1], "m_w": [1, 1]}}')
    flags = ["--stages", "2", "--microbatches", "3", "--costs", str(path)]
    assert main(["schedule", "zb-h1", *flags]) == 0
    assert "zb-h1: cost 100 ms" in capsys.readouterr().out


def test_the_help_s_costs_file_can_be_read(capsys: Capture, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["schedule", "--help"])
    out = capsys.readouterr().out
    path = tmp_path / "costs.json"
    path.write_text(out[out.index('{"t_f"') :].partition("}")[0] + "}")
    flags = ["--stages", "2", "--microbatches", "4", "--costs", str(path)]
    assert main(["schedule", "zb-h1", *flags]) == 0
    assert "GiB" in capsys.readouterr().out


def test_known_names_contain_the_search(capsys: Capture) -> None:
    assert main(["schedule", "foo", *SIZE]) == 2
    known = f"no schedule is called 'foo'; known: auto, {', '.join(BUILDERS)}\n"
    assert capsys.readouterr().err.endswith(known)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 60, 500])
def test_a_drawing_is_no_wider_than_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["schedule", "zb-h1", *SIZE, "--colour", "never"]) == 0
    drawn = terminal.getvalue().split("\n\n")[1].splitlines()
    widest = max(map(len, drawn))
    # Its own width is 9 columns for the names and 3 a pass: 27 ms at 3 columns each.
    assert widest == min(columns, 9 + 27 * 3)


def test_python_m_and_a_reader_that_goes_away() -> None:
    command = f"{sys.executable} -m zero_bubble schedule zb-h1 --stages 8 --microbatches 2000"
    command += " --print-order"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} | head -c 7"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "stage 0", "")
