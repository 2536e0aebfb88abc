"""A profile's file: written and read back, wrong fields named, taken by the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.placement import linear, v_shape
from zero_bubble.profile.profile import Profile, listed, load_profile, save_profile

Capture = pytest.CaptureFixture[str]

PROFILE = Profile(
    placement=v_shape(2),
    costs=Costs(
        t_f=((1.5, 2.0), (3.0, 0.1)),
        t_b=((1.0, 2.5), (3.5, 0.2)),
        t_w=((0.5, 1.0), (1.25, 0.3)),
        m_b=((2e9, 1e9), (3e9, 1e9)),
        m_w=((1e9, 5e8), (3e9, 0.0)),
        t_edges=((0, 1, 0.25), (1, 0, 0.75)),
    ),
    job={"hidden_size": 512, "micro_batch_size": 2, "bf16": True, "device": "cpu", "swiglu": None},
    room=(6e10, None),
    iteration_ms=74.5,
)


def test_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    save_profile(PROFILE, path)
    assert load_profile(path) == PROFILE
    assert [one.name for one in path.parent.iterdir()] == ["profile.json"]
    bare = Profile(placement=linear(2), costs=Costs.uniform(linear(2), 1, 1, 1))
    save_profile(bare, path)
    assert load_profile(path) == bare


def test_a_field_a_line(tmp_path: Path) -> None:
    """Two profiles can be compared by eye, or by diff."""
    path = tmp_path / "profile.json"
    save_profile(PROFILE, path)
    lines = path.read_text().splitlines()
    assert lines[3].startswith('  "job": {"hidden_size": 512')
    assert lines[4:] == [
        '  "placement": [[0, 3], [1, 2]],',
        f'  "costs": {json.dumps(PROFILE.costs.to_dict())},',
        '  "room": [60000000000.0, null],',
        '  "iteration_ms": 74.5',
        "}",
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "zero-bubble schedule", "field 'format': expected 'zero-bubble profile'"),
        ("format", None, "field 'format': expected 'zero-bubble profile', not None"),
        ("version", 2, "field 'version': expected 1, not 2"),
        ("job", [1], r"field 'job': expected an object, not \[1\]"),
        ("job", {"hidden_size": [1]}, "field 'job': hidden_size: expected text or a number"),
        ("placement", 5, "field 'placement': "),
        ("placement", [[0, 1], [3, 4]], "field 'placement': a placement holds each position"),
        ("placement", [["a", 1], [2, 3]], "field 'placement': "),
        ("placement", [[0], [1]], r"the costs are for stages of \(2, 2\) chunks"),
        ("costs", [1], "costs: expected an object"),
        ("room", [1.0], r"field 'room': expected bytes or null for 2 stages, not \[1.0\]"),
        ("room", 7, "field 'room': expected bytes or null for 2 stages, not 7"),
        ("room", [1.0, -1.0], "field 'room': expected bytes or null, not"),
        ("room", [1.0, "12GiB"], "field 'room': expected bytes or null, not"),
        ("room", [float("inf"), 1.0], "field 'room': expected bytes or null, not"),
        ("iteration_ms", -1, "field 'iteration_ms': expected milliseconds, not -1"),
        ("iteration_ms", True, "field 'iteration_ms': expected milliseconds, not True"),
        ("iteration_ms", "7", "field 'iteration_ms': expected milliseconds, not '7'"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, message: str, tmp_path: Path) -> None:
    path = _written(tmp_path, {**PROFILE.to_dict(), field: value})
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        load_profile(path)


@pytest.mark.parametrize("field", ["t_f", "t_b", "t_w", "m_b", "m_w"])
@pytest.mark.parametrize("value", [None, "x", [[1], [2]], [[1.0, -1.0], [1.0, 1.0]]])
def test_a_wrong_table_is_named(field: str, value: object, tmp_path: Path) -> None:
    data = PROFILE.to_dict()
    data["costs"][field] = value
    with pytest.raises(ValueError, match=rf"profile\.json: .*\b{field}\b"):
        load_profile(_written(tmp_path, data))


@pytest.mark.parametrize("field", ["format", "version", "job", "placement", "costs"])
def test_a_missing_field_is_named(field: str, tmp_path: Path) -> None:
    data = PROFILE.to_dict()
    del data[field]
    with pytest.raises(ValueError, match=f"field '{field}'"):
        load_profile(_written(tmp_path, data))


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"text"'])
def test_what_is_no_profile(text: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: "):
        load_profile(path)


def test_what_differs_between_jobs() -> None:
    job = {**PROFILE.job, "hidden_size": 1024, "seq_length": 8}
    hidden_size, seq_length = PROFILE.differences(job)
    for word in ("hidden_size", "512", "1024"):
        assert word in hidden_size
    for word in ("seq_length", "not given", "8"):
        assert word in seq_length
    assert PROFILE.differences(dict(PROFILE.job)) == []


def test_what_people_set_themselves_comes_first() -> None:
    job = {**PROFILE.job, "a_detail": 1, "device": "another", "bf16": False, "hidden_size": 8}
    names = [one.split()[0] for one in PROFILE.differences(job)]
    assert names == ["device", "hidden_size", "a_detail", "bf16"]


def test_of_many_differences_four_are_told() -> None:
    assert listed(["a 1", "b 2"]) == "a 1; b 2"
    assert "more" not in listed(["one"] * 4)
    shown = listed(["a", "b", "c", "d", "e", "f"])
    assert shown.startswith("a; b; c; d")
    assert "2 more" in shown


def test_costs_do_not_depend_on_the_global_batch_size() -> None:
    """It is kept for those who read the file."""
    profile = replace(PROFILE, job={**PROFILE.job, "global_batch_size": 16})
    assert profile.to_dict()["job"]["global_batch_size"] == 16
    assert profile.differences({**PROFILE.job, "global_batch_size": 32}) == []
    assert profile.differences(dict(PROFILE.job)) == []
    other = {**PROFILE.job, "global_batch_size": 32, "micro_batch_size": 4}
    assert len(profile.differences(other)) == 1


def test_commands_take_its_costs(tmp_path: Path, capsys: Capture) -> None:
    """1F1B with a whole stage of 2, 3 and 1 ms: (m+p-1) 6 ms; ZB-H1 saves a W (p-1) times two."""
    path = str(tmp_path / "profile.json")
    costs = Costs.uniform(linear(2), 2, 3, 1, m_b=2**30, m_w=2**29)
    save_profile(Profile(placement=linear(2), costs=costs, room=(9e9, 9e9)), path)
    size = ["--stages", "2", "--microbatches", "4", "--costs", path]
    assert main(["compare", *size]) == 0
    captured = capsys.readouterr()
    rows = {line.split()[0]: line.split() for line in captured.out.splitlines()[1:]}
    assert rows["1f1b"][1] == "30.00"
    assert rows["zb-h1"][1] == "28.00"
    assert main(["schedule", "auto", *size, "--effort", "quick"]) == 0
    # At 1p no order costs less than ZB-H1: trying all of them says so.
    assert "cost 28 ms" in capsys.readouterr().out


def _written(folder: Path, data: dict[str, Any]) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(data))
    return path
