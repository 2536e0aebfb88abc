"""What ``zero-bubble simulate --t-reduce`` prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_bubble.builders import build
from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.placement import linear

SIZE = ["--stages", "8", "--microbatches", "32", "--repeats", "1"]
Capture = pytest.CaptureFixture[str]


def exposed(flags: list[str], capsys: Capture) -> list[str]:
    """The last table's last row."""
    assert main(["simulate", *flags]) == 0
    return capsys.readouterr().out.splitlines()[-1].split()


def test_exposed_reduction_of_zb_h2(capsys: Capture) -> None:
    """Stage i ends with 2i + 1 W's: 8 + 1/8 - (2i + 1) W's are exposed, at least one bucket."""
    mean = (7.125 + 5.125 + 3.125 + 1.125 + 4 * 1) / 8
    row = ["zb-h2", "7.125", "1", "7.125", f"{mean:g}"]
    assert exposed(["zb-h2", *SIZE, "--t-reduce", "8W"], capsys) == row
    assert exposed(["zb-h2", *SIZE, "--t-reduce", "8"], capsys) == row
    twice = [row[0], *(f"{2 * float(one):g}" for one in row[1:])]
    assert exposed(["zb-h2", *SIZE, "--t-f", "2", "--t-reduce", "8W"], capsys) == twice


def test_one_bucket_leaves_nothing_to_reorder(capsys: Capture) -> None:
    flags = ["zb-h2", *SIZE, "--t-reduce", "3W", "--buckets", "1"]
    assert exposed(flags, capsys) == ["zb-h2", "3", "3", "3", "3"]


def test_a_file_may_say_how_long_reductions_take(capsys: Capture, tmp_path: Path) -> None:
    costs = Costs.uniform(linear(8), 1, 1, 1, t_reduce=8)
    path = tmp_path / "known.json"
    save_schedule(build("zb-h2", 8, 32), str(path), costs=costs)
    assert exposed([str(path), "--repeats", "1"], capsys)[:3] == ["known", "7.125", "1"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--t-reduce", "8X"], "--t-reduce 8X: expected milliseconds, or W's such as 8W"),
        (["--buckets", "3"], "--buckets 3 needs --t-reduce"),
        (["--t-reduce", "8W", "--buckets", "0"], "--buckets 0: at least 1 bucket"),
    ],
)
def test_what_is_wrong_is_said(flags: list[str], message: str, capsys: Capture) -> None:
    assert main(["simulate", "zb-h2", *SIZE, *flags]) == 2
    assert message in capsys.readouterr().err
