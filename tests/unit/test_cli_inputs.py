"""Names and files side by side: what is compared has the same costs, or a line says that not."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_bubble.builders import build
from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.export.pytorch_csv import save_csv
from zero_bubble.placement import linear, v_shape
from zero_bubble.simulate import simulate

Capture = pytest.CaptureFixture[str]
COSTS = Costs.uniform(linear(3), 4, 5, 6, 0.5)
NO_NOISE = ["--jitter", "0", "--repeats", "1"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def save(
    path: str, name: str = "zb-h1", costs: Costs | None = COSTS, microbatches: int = 5
) -> None:
    stages = 3 if costs is None else len(costs.t_f)
    schedule = build(name, stages, microbatches)
    Path(path).parent.mkdir(exist_ok=True)
    if path.endswith(".csv"):
        save_csv(schedule, path)
    else:
        save_schedule(schedule, path, costs)


def simulated(arguments: list[str], capsys: Capture) -> tuple[dict[str, float], str]:
    """Cost in ms of each row of the table, and what stderr says."""
    assert main(["simulate", *arguments, *NO_NOISE]) == 0
    captured = capsys.readouterr()
    lines = [line for line in captured.out.splitlines()[1:] if " beats " not in line]
    rows = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert len(rows) == len(lines)
    return rows, captured.err


def cost(name: str, costs: Costs = COSTS, microbatches: int = 5) -> float:
    return simulate(build(name, len(costs.t_f), microbatches, costs=costs), costs).cost


def test_names_take_sizes_and_costs_from_the_file(capsys: Capture) -> None:
    save("one.json")
    for order in (["one.json", "1f1b"], ["1f1b", "one.json"]):
        rows, error = simulated(order, capsys)
        assert rows == pytest.approx({"one": cost("zb-h1"), "1f1b": cost("1f1b")}, rel=1e-5)
        assert error == (
            "zero-bubble: note: 1f1b: 3 stages, 5 microbatches, costs as in one.json\n"
        )


def test_a_builder_whose_order_depends_on_costs_gets_those_of_the_file(capsys: Capture) -> None:
    costs = Costs.uniform(v_shape(3), 4, 9, 1, 0.5)
    save("v.json", "v-half", costs)
    rows, _ = simulated(["v.json", "zb-v"], capsys)
    assert rows["zb-v"] == pytest.approx(cost("zb-v", costs), rel=1e-5)


def test_flags_come_before_what_a_file_has(capsys: Capture) -> None:
    save("one.json")
    flags = ["--microbatches", "7", "--t-f", "2"]
    rows, error = simulated(["one.json", "1f1b", *flags], capsys)
    costs = Costs.uniform(linear(3), 2, 2, 2)
    expected = {"one": cost("zb-h1", costs), "1f1b": cost("1f1b", costs, 7)}
    assert rows == pytest.approx(expected, rel=1e-5)
    assert error == (
        "zero-bubble: note: 1f1b: 3 stages as in one.json\n"
        "zero-bubble: warning: not comparable with one: 1f1b (7 microbatches)\n"
    )


def test_files_that_do_not_compare_are_named_in_one_line(capsys: Capture) -> None:
    save("one.json")
    save("same.json", "1f1b")
    save("slow.json", costs=Costs.uniform(linear(3), 40, 50, 60))
    save("large.json", costs=Costs.uniform(linear(4), 4, 5, 6, 0.5), microbatches=9)
    _, error = simulated(["one.json", "same.json", "slow.json", "large.json"], capsys)
    assert error.count("\n") == 1
    assert error.startswith("zero-bubble: warning: not comparable with one: slow (other costs), ")
    assert "large (4 stages, 9 microbatches" in error
    assert "same" not in error


def test_the_same_model_in_another_placement_compares(capsys: Capture) -> None:
    save("one.json")
    save("v.json", "zb-v", Costs.uniform(v_shape(3), 2, 2.5, 3, 0.5))
    assert simulated(["one.json", "v.json"], capsys)[1] == ""
    save("v.json", "zb-v", COSTS_OF_ANOTHER_MODEL)
    assert (
        "not comparable with one: v (other costs)" in simulated(["one.json", "v.json"], capsys)[1]
    )


COSTS_OF_ANOTHER_MODEL = Costs.uniform(v_shape(3), 2, 2.5, 4, 0.5)


def test_a_csv_takes_the_costs_of_the_file_beside_it(capsys: Capture) -> None:
    save("plain.csv", "1f1b", None)
    save("one.json")
    rows, error = simulated(["plain.csv", "one.json", "gpipe"], capsys)
    expected = {name: cost(of) for name, of in (("plain", "1f1b"), ("one", "zb-h1"))}
    assert rows == pytest.approx(expected | {"gpipe": cost("gpipe")}, rel=1e-5)
    assert error == (
        "zero-bubble: note: no costs in plain.csv: those of one.json\n"
        "zero-bubble: note: gpipe: 3 stages, 5 microbatches as in plain.csv\n"
        "zero-bubble: note: gpipe: costs as in one.json\n"
    )


@pytest.mark.parametrize("command", ["simulate", "draw"])
def test_a_csv_alone_counts_a_millisecond_a_pass(command: str, capsys: Capture) -> None:
    save("plain.csv", "1f1b", None)
    assert main([command, "plain.csv"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "zero-bubble: note: no costs in plain.csv: 1 ms a pass\n"
    assert f"{cost('1f1b', Costs.uniform(linear(3), 1, 1, 1)):g}" in captured.out.split()


def test_costs_of_another_placement_are_not_taken(capsys: Capture) -> None:
    save("v.json", "zb-v", Costs.uniform(v_shape(3), 2, 2, 2))
    save("plain.csv", "1f1b", None)
    rows, error = simulated(["v.json", "zb-h1", "plain.csv"], capsys)
    assert rows["zb-h1"] == pytest.approx(cost("zb-h1", Costs.uniform(linear(3), 1, 1, 1)))
    assert "zb-h1: the costs of v.json are for another placement: 1 ms a pass\n" in error
    assert "no costs in plain.csv, and those of v.json are for another placement: 1 ms" in error
    assert "not comparable with v: zb-h1 (other costs), plain (other costs)\n" in error


def test_files_of_one_name_are_told_apart(capsys: Capture) -> None:
    """By what the files are called, or where that is the same by their paths."""
    save("one.json")
    save("zb-h1.json")
    save("a/two.json")
    save("b/two.json")
    files = ["one.json", "zb-h1.json", "zb-h1", "a/two.json", "b/two.json"]
    assert main(["simulate", *files, *NO_NOISE]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = ["one", "zb-h1.json", "zb-h1", "a/two.json", "b/two.json"]
    assert [line.split()[0] for line in lines[1:6]] == labels
    assert [line.split(" in ")[0] for line in lines[6:]] == [
        f"one beats {label}" for label in labels[1:]
    ]


def test_drawings_are_called_after_the_files_where_the_names_are_one(capsys: Capture) -> None:
    save("one.json")
    save("two.json")
    save("three.json", "1f1b")
    assert main(["draw", "one.json", "two.json", "three.json"]) == 0
    out = capsys.readouterr().out
    assert [line.split(":")[0] for line in out.splitlines() if "cost" in line] == [
        "one",
        "two",
        "1f1b",
    ]
    assert main(["draw", "one.json", "two.json", "--svg", "both.svg"]) == 0
    assert capsys.readouterr().out == "wrote both.svg\n"
    picture = Path("both.svg").read_text(encoding="utf-8")
    assert ">one</text>" in picture
    assert ">two</text>" in picture
