"""``zero-bubble export``, and PyTorch's CSV files given to the other commands."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.unit.orders import all_forwards_first
from zero_bubble.builders import build
from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import ScheduleFile, load_file, save_schedule
from zero_bubble.export.pytorch_csv import load_csv, save_csv
from zero_bubble.placement import linear, v_shape
from zero_bubble.simulate import simulate

SIZE = ["--stages", "4", "--microbatches", "8"]
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("form", ["csv", "csv-comms"])
def test_to_csv_and_back_to_json(form: str, tmp_path: Path) -> None:
    table, file = tmp_path / "one.csv", tmp_path / "two.json"
    assert main(["export", "zb-h1", *SIZE, "--to", form, "--output", str(table)]) == 0
    assert ("SEND_F" in table.read_text()) == (form == "csv-comms")
    assert main(["export", str(table), "--output", str(file)]) == 0
    # Nobody gave costs, so none are written.
    assert load_file(file) == ScheduleFile(build("zb-h1", 4, 8))


def test_to_json_with_all_that_the_file_has(tmp_path: Path) -> None:
    first, second = tmp_path / "one.json", tmp_path / "two.json"
    schedule, costs = build("zb-h2", 4, 8), Costs.uniform(linear(4), 3, 4, 2)
    save_schedule(schedule, first, costs, memory_limit=[7, 7, 7, 7])
    assert main(["export", str(first), "--times", "--output", str(second)]) == 0
    spans = simulate(schedule, costs).spans
    assert load_file(second) == ScheduleFile(schedule, costs, (7, 7, 7, 7), spans)


def test_other_costs_leave_the_file_s_limit_behind(tmp_path: Path) -> None:
    """It is in the unit of the file's costs."""
    first, second = tmp_path / "one.json", tmp_path / "two.json"
    costs = Costs.uniform(linear(4), 3, 4, 2)
    save_schedule(build("zb-h2", 4, 8), first, costs, memory_limit=[7, 7, 7, 7])
    assert main(["export", str(first), "--t-f", "2", "--output", str(second)]) == 0
    assert load_file(second) == ScheduleFile(
        build("zb-h2", 4, 8), Costs.uniform(linear(4), 2, 2, 2)
    )


def test_to_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "one.trace.json"
    assert main(["export", "1f1b", *SIZE, "--t-f", "2", "--output", str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(one["ph"] == "X" for one in events) == 4 * 8 * 2
    # 8 * 6 ms of work and 3 * 6 ms of bubble.
    assert max(one["ts"] + one["dur"] for one in events if one["ph"] == "X") == 66_000


def test_to_svg_of_a_given_width(tmp_path: Path) -> None:
    path = tmp_path / "one.svg"
    for command in (["export", "1f1b", "--output"], ["draw", "1f1b", "--svg"]):
        for width, flags in (("1100", []), ("1600", ["--width", "1600"])):
            assert main([*command, str(path), *SIZE, *flags]) == 0
            assert ElementTree.parse(path).getroot().get("width") == width


def test_check_and_draw_read_csv(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "from-pytorch.csv"
    schedule = all_forwards_first(v_shape(2), 3, split=True)
    save_csv(schedule, path)
    assert main(["check", str(path)]) == 0
    assert f"{path}: legal: 2 stages, 2 chunks a stage, 3 microbatches\n" in capsys.readouterr().out
    # Two chunks with 3 microbatches each; flags are of a whole stage.
    assert main(["check", str(path), "--m-b", "1", "--memory-limit", "3"]) == 0
    assert main(["check", str(path), "--m-b", "1", "--memory-limit", "1p"]) == 1
    assert "limit 2" in capsys.readouterr().out
    assert main(["draw", str(path), "--t-f", "4", "--width", "80"]) == 0
    assert capsys.readouterr().out.startswith("from-pytorch: cost ")


def test_an_illegal_csv_is_refused_with_1(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "one.csv"
    path.write_text("0F0,0I0,0W0\n1I0,1F0,1W0\n")
    assert main(["check", str(path)]) == 1
    assert capsys.readouterr().out == (
        f"{path}: stage 1, 0I0: order: runs before 0F0\n{path}: illegal, 1 violation\n"
    )


def test_a_note_where_pytorch_would_mix_up_its_losses(tmp_path: Path, capsys: Capture) -> None:
    first, second = tmp_path / "one.csv", tmp_path / "two.csv"
    first.write_text("0F1,0B1,0F0,0B0\n")
    assert main(["export", str(first), "--output", str(second)]) == 0
    assert "forwards out of microbatch order" in capsys.readouterr().err
    assert load_csv(second) == load_csv(first)
    capsys.readouterr()
    assert main(["export", "1f1b", *SIZE, "--output", str(second)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["x.json", "x.csv", "x.trace.json", "x.svg"])
def test_export_says_what_it_wrote(name: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / name
    assert main(["export", "1f1b", *SIZE, "--output", str(path)]) == 0
    assert capsys.readouterr() == (f"wrote {path}\n", "")
    assert path.stat().st_size > 0


def test_memory_in_bytes_reads_as_such(tmp_path: Path, capsys: Capture) -> None:
    """1F1B keeps 4, 3, 2, 1 microbatches on 4 stages; each takes half a GiB."""
    file, picture = tmp_path / "one.json", tmp_path / "one.svg"
    costs = Costs.uniform(linear(4), 1, 1, 1, m_b=2**29)
    save_schedule(build("1f1b", 4, 8), file, costs)
    assert main(["export", str(file), "--output", str(picture)]) == 0
    texts = [one.text for one in ElementTree.parse(picture).iter() if one.text]
    assert {"2 GiB", "1.5 GiB", "1 GiB", "512 MiB"} <= set(texts)
    capsys.readouterr()
    assert main(["check", str(file), "--memory-limit", "2GiB"]) == 0
    out = capsys.readouterr().out
    assert f"{file}: peak memory 2 GiB, 1.5 GiB, 1 GiB, 512 MiB; limit 2 GiB\n" in out
    assert "without costs" not in out


def test_check_says_what_a_limit_counts_without_costs(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "one.csv"
    save_csv(build("1f1b", 2, 3), path)
    assert main(["check", str(path), "--memory-limit", "1"]) == 1
    out = capsys.readouterr().out
    assert f"{path}: peak memory 2, 1; limit 1\n" in out
    assert f"{path}: note: without costs a chunk counts 1 for each microbatch\n" in out
    assert main(["check", str(path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: legal: 2 stages, 1 chunk a stage, 3 microbatches\n")


def test_an_illegal_file_is_drawn_with_a_warning(tmp_path: Path, capsys: Capture) -> None:
    """Microbatch 1 has no W."""
    path = tmp_path / "one.csv"
    path.write_text("0F0,0I0,0W0,0F1,0I1\n")
    assert main(["draw", str(path)]) == 0
    captured = capsys.readouterr()
    assert "F0 B0 W0 F1 B1" in captured.out
    assert f"warning: {path} is illegal, 1 violation, first: stage 0, 0" in captured.err
    path.write_text("0I0,0F0,0W0\n")
    assert main(["draw", str(path)]) == 2
    assert f"zero-bubble: {path}: the schedule deadlocks: " in capsys.readouterr().err
