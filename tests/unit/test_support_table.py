"""The support table says what the tests' registry says; no processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.configs import Config
from tests.distributed.feature import SCHEDULES, typed
from tests.distributed.features import DEFAULT, FEATURES, cases
from tools import support_table


def rows() -> dict[tuple[str, str], list[str]]:
    """The committed file's rows: (group, title) -> cells, flags first."""
    found: dict[tuple[str, str], list[str]] = {}
    group = ""
    for line in support_table.FILE.read_text(encoding="utf-8").splitlines():
        group = line.removeprefix("## ") if line.startswith("## ") else group
        if line.startswith("| ") and not line.startswith(("| | ", "| ---")):
            title, *cells = line.replace("\\|", "\0").strip("| ").split(" | ")
            found[group, title] = cells
    return found


def test_the_committed_table_is_what_the_command_makes() -> None:
    assert support_table.main(["--check"]) == 0, f"run `{support_table.COMMAND}`"


def test_another_table_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "support.md"
    monkeypatch.setattr(support_table, "FILE", file)
    monkeypatch.setattr(support_table, "ROOT", tmp_path)
    assert support_table.main(["--check"]) == 1
    assert support_table.main([]) == 0
    assert support_table.main(["--check"]) == 0
    file.write_text(file.read_text().replace("rejected", "bit-identical", 1))
    capsys.readouterr()
    assert support_table.main(["--check"]) == 1
    assert "run `make support-table`" in capsys.readouterr().out


def test_every_feature_is_a_row_with_a_cell_for_each_schedule() -> None:
    table = rows()
    assert len(table) == len(FEATURES)
    for feature in FEATURES.values():
        cells = next(
            cells
            for (group, title), cells in table.items()
            if group == feature.group and title.partition(". ")[0] == feature.title
        )
        assert len(cells) == 1 + len(SCHEDULES), feature.title
        for schedule, cell in zip(SCHEDULES, cells[1:], strict=True):
            begins = {
                "identical": "bit-identical",
                "tolerance": "to 1e-06",
                "rejected": "rejected: ",
                "untested": "not run here",
            }
            assert cell.startswith(begins[feature.promise(schedule).kind]), (feature.title, cell)


def test_flags_are_shown_as_users_type_them() -> None:
    assert typed(Config()) == ""
    many = Config(tp=2, precision="bf16", dp=2, extra=("--overlap-grad-reduce",), dropout=0.1)
    assert typed(many) == "--tensor-model-parallel-size 2 --bf16 --overlap-grad-reduce"
    assert typed(Config(model=("--mtp-num-layers", "1"))) == "--mtp-num-layers 1"


def test_the_default_tier_is_a_part_of_what_is_tested() -> None:
    assert set(DEFAULT) <= set(cases())
    assert {schedule for _, schedule in DEFAULT} >= {"zb-h1", "zb-h2"}
