"""The file a rank writes: what is saved is loaded, and what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass
from zero_bubble.trace.rank_file import (
    Phase,
    RankTrace,
    TracedIteration,
    TracedPass,
    load_rank,
    save_rank,
)

TRACE = RankTrace(
    rank=5,
    stage=1,
    pipeline=(1, 5),
    placement=linear(2),
    clock_offset_ms=-0.125,
    edges=((0, 1, 0.25),),
    iterations=(
        TracedIteration(
            10,
            "zb-h1",
            1,
            (
                TracedPass(Pass(Kind.F, 0), 1.5, 2.0, 7.25, 300),
                TracedPass(Pass(Kind.B, 0), 7.25, 7.25, 12.0, 100),
                TracedPass(Pass(Kind.W, 0), 12.5, 12.5, 16.0, None),
            ),
            (Phase("finalize", 16.0, 17.0),),
        ),
    ),
)
"""Binary fractions: what is written with four digits is exact."""


def test_a_saved_trace_loads_and_has_the_documented_form(tmp_path: Path) -> None:
    path = save_rank(TRACE, tmp_path / "new")
    assert path == tmp_path / "new" / "trace-rank00005.json"
    assert [*path.parent.iterdir()] == [path]
    assert load_rank(path) == TRACE
    data = json.loads(path.read_text())
    assert (data["format"], data["version"]) == ("zero-bubble trace", 1)
    assert data["iterations"][0]["passes"][1] == {
        "what": "0I0",
        "begin": 7.25,
        "ready": 7.25,
        "end": 12.0,
        "held": 100,
    }


def first_pass(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["iterations"][0]["passes"][0]
    return found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data.update(format="other"), "field 'format': expected 'zero-bubble trace'"),
        (lambda data: data.update(version=2), "field 'version': expected 1, not 2"),
        (lambda data: data.update(extra=1), "unknown field 'extra'"),
        (lambda data: data.update(rank=True), "field 'rank': expected a whole number"),
        (lambda data: data.update(stage=0), "field 'stage': 0 is not the place of rank 5"),
        (lambda data: data.update(pipeline=[1, 1]), "field 'pipeline': expected 2 different"),
        (lambda data: data.update(placement=[[0], [2]]), "field 'placement': a placement holds"),
        (lambda data: data.update(placement="v"), "field 'placement': expected the model pos"),
        (lambda data: data.update(clock_offset_ms="1"), "field 'clock_offset_ms': expected"),
        (lambda data: data.update(edges=[[0, 1]]), "field 'edges': expected"),
        (lambda data: data.update(edges=[[0, 2, 1]]), "field 'edges': 0 -> 2 is not"),
        (lambda data: data.update(iterations={}), "field 'iterations': expected a list"),
        (lambda data: data["iterations"].append(data["iterations"][0]), "one is there twice"),
        (
            lambda data: data["iterations"][0].update(schedule=None),
            "field 'iterations', entry 0: field 'schedule': expected a name",
        ),
        (
            lambda data: first_pass(data).update(what="F0"),
            "entry 0: field 'passes', entry 0: 'F0' is not a pass",
        ),
        (lambda data: first_pass(data).update(what="1F0"), "1F0 is not of 1 chunks and 1 micr"),
        (lambda data: first_pass(data).update(ready=1.0), "begin 1.5, ready 1.0 and end 7.25"),
        (lambda data: first_pass(data).update(end=7.5), "entry 1: field 'begin': 0I0 begins at"),
        (lambda data: first_pass(data).update(held=-1), "field 'held': expected bytes or null"),
        (
            lambda data: data["iterations"][0]["phases"][0].update(end=1.0),
            "field 'phases', entry 0: finalize begins at 16.0 and ends at 1.0",
        ),
    ],
)
def test_what_is_wrong_is_named(
    change: Callable[[dict[str, Any]], object], expected: str, tmp_path: Path
) -> None:
    path = save_rank(TRACE, tmp_path)
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"trace-rank00005\.json: ") as error:
        load_rank(path)
    assert expected in str(error.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"{", "not JSON"), (b"\xff", "not a text file"), (b"[]", "expected a JSON object, not list")],
)
def test_other_files(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "trace-rank00000.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        load_rank(path)


def test_clocks_may_be_a_little_coarse(tmp_path: Path) -> None:
    path = save_rank(TRACE, tmp_path)
    data = json.loads(path.read_text())
    first_pass(data)["end"] = 7.29
    path.write_text(json.dumps(data))
    assert load_rank(path).iterations[0].passes[0].end == 7.29


def test_a_time_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    bad = TracedIteration(1, "", 1, (TracedPass(Pass(Kind.F, 0), 0.0, float("nan"), 1.0),))
    trace = RankTrace(0, 0, (0,), linear(1), 0.0, (), (bad,))
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_rank(trace, tmp_path)
    assert not [*tmp_path.iterdir()]
