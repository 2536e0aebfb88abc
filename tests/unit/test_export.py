"""Drawings show every pass where it runs; JSON files come back the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export import json_io, svg, text
from zero_bubble.placement import interleaved, linear, v_shape
from zero_bubble.simulate import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def unit_timeline(name: str, stages: int, microbatches: int) -> Timeline:
    return simulate(
        build(name, stages, microbatches), Costs.uniform(linear(stages), 1, 1, 1, m_w=0.5)
    )


def test_text_to_scale() -> None:
    assert text.draw(unit_timeline("1f1b", 2, 3)).splitlines() == [
        "stage 0  F0 F1 ......BW0   F2 BW1   ...BW2   ",
        "stage 1  ...F0 BW0   F1 BW1   F2 BW2   ......",
    ]
    assert text.draw(unit_timeline("zb-h2", 2, 3)).splitlines() == [
        "stage 0  F0 F1 F2 B0 W0 B1 W1 B2 W2 ...",
        "stage 1  ...F0 B0 F1 B1 F2 B2 W0 W1 W2 ",
    ]


def test_text_in_a_given_width() -> None:
    rows = text.draw(unit_timeline("1f1b", 12, 30), width=60).splitlines()
    assert [len(row) for row in rows] == [len("stage 00  ") + 60] * 12
    with pytest.raises(ValueError, match="width must be at least 1"):
        text.draw(unit_timeline("1f1b", 2, 3), width=0)


def test_colour_changes_nothing_else() -> None:
    timeline = unit_timeline("1f1b", 3, 5)
    coloured = text.draw(timeline, colour=True)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text.draw(timeline)


def test_chunks_are_named_where_there_are_several() -> None:
    schedule = all_forwards_first(v_shape(1), 1, split=True)
    timeline = simulate(schedule, Costs.uniform(v_shape(1), 1, 1, 1))
    assert text.draw(timeline) == "stage 0  0F0 1F0 1B0 1W0 0B0 0W0 "


def test_plain_order() -> None:
    assert text.order(build("zb-h1", 2, 2)) == (
        "stage 0  0F0 0F1 0I0 0W0 0I1 0W1\nstage 1  0F0 0I0 0F1 0I1 0W0 0W1"
    )


def rectangles(picture: ElementTree.Element, shade: str) -> list[ElementTree.Element]:
    return [
        one
        for group in picture.iter(f"{SVG}g")
        for one in group.iter(f"{SVG}rect")
        if one.get("class") == shade
    ]


def test_svg_shows_each_pass_to_scale() -> None:
    """1F1B has 4 x 8 forwards of one length, and fused backwards of two parts of that length."""
    timeline = unit_timeline("1f1b", 4, 8)
    picture = ElementTree.fromstring(svg.draw(timeline, title="1F1B & more"))
    assert "1F1B & more" in [one.text for one in picture.iter(f"{SVG}text")]
    for shade in "FBW":
        assert len(rectangles(picture, shade)) == 32
    first, second = rectangles(picture, "F")[:2]
    step = float(second.get("x", 0)) - float(first.get("x", 0))
    assert step == pytest.approx((1100 - 78 - 96) / 33, abs=0.01)
    assert float(first.get("width", 0)) == pytest.approx(step - 0.8, abs=0.01)


def test_svg_has_the_figures() -> None:
    texts = [
        one.text
        for one in ElementTree.fromstring(
            svg.draw_all([unit_timeline("1f1b", 4, 8), unit_timeline("zb-h2", 4, 8)])
        ).iter(f"{SVG}text")
    ]
    assert "bubble 27.27 % · cost 33 ms" in texts
    assert "bubble 0.00 % · cost 24 ms" in texts
    assert {"1f1b", "zb-h2", "fused backward", "idle", "ms"} <= set(texts)


@given(seed=st.integers(0, 10**6), stages=st.integers(1, 3), chunks=st.integers(1, 3))
def test_svg_and_text_of_any_order(seed: int, stages: int, chunks: int) -> None:
    placement = interleaved(stages, chunks)
    timeline = simulate(random_order(placement, 2, seed), random_costs(placement, seed))
    ElementTree.fromstring(svg.draw(timeline))
    assert len(text.draw(timeline, width=80).splitlines()) == stages


def test_svg_works_on_its_own_on_light_and_dark_pages() -> None:
    picture = svg.draw(unit_timeline("zb-h1", 2, 2))
    assert "prefers-color-scheme: dark" in picture
    assert "href" not in picture
    assert "url(" not in picture


def test_what_svg_refuses() -> None:
    with pytest.raises(ValueError, match="at least one timeline"):
        svg.draw_all([])
    with pytest.raises(ValueError, match="2 titles for 1 timelines"):
        svg.draw_all([unit_timeline("1f1b", 2, 2)], titles=["a", "b"])
    with pytest.raises(ValueError, match="at least 400 pixels, not 10"):
        svg.draw(unit_timeline("1f1b", 2, 2), width=10)


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
    ("content", "message"), [("{", "not JSON: "), ("[]", "expected a JSON object, not list")]
)
def test_what_is_no_json_object(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "one.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        json_io.load_schedule(path)


def test_a_schedule_without_costs_has_none_to_load(tmp_path: Path) -> None:
    json_io.save_schedule(build("zb-h1", 2, 2), tmp_path / "one.json")
    with pytest.raises(ValueError, match=r"one\.json: field 'costs' is missing"):
        json_io.load_costs(tmp_path / "one.json")
