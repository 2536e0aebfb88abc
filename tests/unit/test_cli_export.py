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
    assert f"{path}: legal\n" in capsys.readouterr().out
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
    assert f"{path}: stage 1, 0I0: order: runs before 0F0\n" in capsys.readouterr().out


def test_a_note_where_pytorch_would_mix_up_its_losses(tmp_path: Path, capsys: Capture) -> None:
    first, second = tmp_path / "one.csv", tmp_path / "two.csv"
    first.write_text("0F1,0B1,0F0,0B0\n")
    assert main(["export", str(first), "--output", str(second)]) == 0
    assert "forwards out of microbatch order" in capsys.readouterr().err
    assert load_csv(second) == load_csv(first)
    assert main(["export", "1f1b", *SIZE, "--output", str(second)]) == 0
    assert capsys.readouterr().err == ""
