"""JSON files bring back what was saved, and wrong ones are answered with file, field and remedy."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export import json_io
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.simulate import simulate

PLACEMENTS = [linear(3), v_shape(3), interleaved(2, 3), Placement(((2, 0), (1,)))]


@given(seed=st.integers(0, 10**6), placement=st.sampled_from(PLACEMENTS), with_costs=st.booleans())
def test_json_brings_everything_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, placement: Placement, with_costs: bool
) -> None:
    schedule, costs = random_order(placement, 3, seed), random_costs(placement, seed)
    spans = simulate(schedule, costs).spans
    limits = tuple(
        math.inf if stage == seed % 3 else 0.1 * (seed + stage)
        for stage in range(placement.num_stages)
    )
    path = tmp_path_factory.getbasetemp() / "one.json"
    json_io.save_schedule(
        schedule, path, costs if with_costs else None, memory_limit=limits, spans=spans
    )
    expected = json_io.ScheduleFile(schedule, costs if with_costs else None, limits, spans)
    assert json_io.load_file(path) == expected
    json.loads(path.read_text(), parse_constant=pytest.fail)  # no Infinity: it is not JSON


def test_what_is_not_asked_for_is_not_written(tmp_path: Path) -> None:
    json_io.save_schedule(build("zb-h1", 2, 2), tmp_path / "one.json")
    assert set(json.loads((tmp_path / "one.json").read_text())) == {
        "format",
        "version",
        "name",
        "placement",
        "num_microbatches",
        "passes",
    }


def test_a_file_as_version_1_wrote_it_first(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(
        """{
          "format": "zero-bubble schedule", "version": 1, "name": "zb-h1", "placement": [[0], [1]],
          "num_microbatches": 2,
          "passes": ["0F0 0F1 0I0 0W0 0I1 0W1", "0F0 0I0 0F1 0I1 0W0 0W1"]
        }"""
    )
    assert json_io.load_file(path) == json_io.ScheduleFile(build("zb-h1", 2, 2))


def test_limits_and_times_of_another_schedule_are_not_saved(tmp_path: Path) -> None:
    schedule = build("zb-h1", 2, 2)
    spans = simulate(build("zb-h1", 2, 3), Costs.uniform(linear(2), 1, 1, 1)).spans
    with pytest.raises(ValueError, match="the times are not those of the passes"):
        json_io.save_schedule(schedule, tmp_path / "one.json", spans=spans)
    with pytest.raises(ValueError, match="field 'memory_limit': expected a number"):
        json_io.save_schedule(schedule, tmp_path / "one.json", memory_limit=[1, 2, 3])
    assert not (tmp_path / "one.json").exists()


@pytest.mark.parametrize("placement", [linear(3), v_shape(3), interleaved(2, 3)])
def test_json_brings_the_same_schedule_back(tmp_path: Path, placement: Any) -> None:
    schedule, costs = random_order(placement, 4, seed=5), random_costs(placement, 7)
    path = tmp_path / "one.json"
    json_io.save_schedule(schedule, path)
    assert json_io.load_schedule_and_costs(path) == (schedule, None)
    json_io.save_schedule(schedule, path, costs)
    assert json_io.load_schedule(path) == schedule
    assert json_io.load_costs(path) == costs
    json_io.save_costs(costs, path)
    assert json_io.load_costs(path) == costs


def test_json_keeps_the_name(tmp_path: Path) -> None:
    json_io.save_schedule(build("zb-h1", 2, 2), tmp_path / "one.json")
    assert json_io.load_schedule(tmp_path / "one.json").name == "zb-h1"


def test_costs_of_another_placement_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the costs are for stages"):
        json_io.save_schedule(
            build("zb-h1", 2, 2), tmp_path / "one.json", Costs.uniform(linear(3), 1, 1, 1)
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, "field 'format': expected 'zero-bubble schedule', not 'x'"),
        ({"version": 9}, "field 'version': expected 1, not 9"),
        ({"name": 3}, "field 'name': expected a string, not 3"),
        ({"stages": 3}, "unknown field 'stages'; known: "),
        ({"num_microbatches": 0}, "field 'num_microbatches': expected a number >= 1, not 0"),
        ({"num_microbatches": True}, "field 'num_microbatches': expected a number >= 1, not True"),
        ({"num_microbatches": "2"}, "field 'num_microbatches': expected a number >= 1, not '2'"),
        ({"placement": [0, 1]}, "field 'placement': expected the model positions of each stage's"),
        ({"placement": [[0], [2]]}, "field 'placement': a placement holds each position"),
        ({"placement": None}, "field 'placement': expected the model positions"),
        ({"passes": ["0F0"]}, "field 'passes': expected a string for each of 2 stages, not 1"),
        ({"passes": [["0F0"], []]}, "field 'passes': expected a string for each stage"),
        ({"passes": ["0F0", "0X0"]}, "field 'passes', stage 1: '0X0' is not a pass: expected"),
        ({"costs": {}}, "costs: field 't_f' is missing"),
        ({"costs": [1]}, "costs: expected an object"),
        ({"memory_limit": 3}, "field 'memory_limit': expected a number at least 0, or null, for 2"),
        ({"memory_limit": [3]}, "field 'memory_limit': expected a number at least 0, or null"),
        ({"memory_limit": [3, -1]}, "field 'memory_limit': expected a number at least 0, or null"),
        ({"memory_limit": [3, math.nan]}, "field 'memory_limit': expected a number at least 0"),
        ({"memory_limit": [3, "4"]}, "field 'memory_limit': expected a number at least 0, or null"),
        ({"times": [[]]}, "field 'times': expected [[[start, end], ...], ...]"),
        ({"times": [[], []]}, "field 'times', stage 0: expected [[[start, end], ...], ...]"),
        ({"times": [[[0, 1]] * 6, [[1, 0]] * 6]}, "field 'times', stage 1: expected"),
        ({"times": [[[0, 1]] * 6, [0] * 6]}, "field 'times', stage 1: expected"),
    ],
)
def test_a_wrong_file_is_answered_with_file_field_and_what_is_expected(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "one.json"
    json_io.save_schedule(build("zb-h1", 2, 2), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        json_io.load_schedule(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON: "),
        (b"[]", "expected a JSON object, not list"),
        (b"\xff\xfe", "not a text file in UTF-8: "),
        (b'{"traceEvents": []}', "a Chrome trace, which is only to look at"),
        (b'{"t_f": [[1]]}', "costs alone, without a schedule: they are what --costs reads"),
    ],
)
def test_what_is_no_schedule_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        json_io.load_schedule(path)


def test_a_schedule_without_costs_has_none_to_load(tmp_path: Path) -> None:
    json_io.save_schedule(build("zb-h1", 2, 2), tmp_path / "one.json")
    with pytest.raises(ValueError, match=r"one\.json: field 'costs' is missing"):
        json_io.load_costs(tmp_path / "one.json")
