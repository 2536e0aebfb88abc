"""Drawings, as text and as SVG, show every pass where it runs."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export import svg, text
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


def labels(picture: ElementTree.Element, kind: str) -> list[str]:
    """Microbatch numbers on the passes of a kind."""
    found = []
    for group in picture.iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        assert box is not None
        if box.get("class") == kind:
            found += [one.text or "" for one in group.iter(f"{SVG}text")]
    return found


def test_svg_labels_all_passes_of_a_kind_or_none() -> None:
    """One stage's W's are too short for their numbers: those of the other stages go, too."""
    schedule = build("zb-h1", 3, 4)
    costs = Costs.uniform(linear(3), 10, 10, 10)
    even = ElementTree.fromstring(svg.draw(simulate(schedule, costs)))
    uneven = ElementTree.fromstring(
        svg.draw(simulate(schedule, replace(costs, t_w=((10,), (0.1,), (10,)))))
    )
    numbers = sorted("0123" * 3)
    assert [sorted(labels(even, kind)) for kind in "FBW"] == [numbers] * 3
    assert [sorted(labels(uneven, kind)) for kind in "FBW"] == [numbers, numbers, []]


def test_svg_leaves_out_nothing_for_passes_that_take_no_time() -> None:
    schedule = build("zb-h1", 2, 3)
    costs = Costs.uniform(linear(2), 1, 1, 1)
    picture = ElementTree.fromstring(svg.draw(simulate(schedule, replace(costs, t_w=((1,), (0,))))))
    assert sorted(labels(picture, "W")) == ["0", "1", "2"]


def test_svg_writes_memory_as_it_is_told() -> None:
    timeline = simulate(build("1f1b", 2, 4), Costs.uniform(linear(2), 1, 1, 1, m_b=2**30))
    picture = svg.draw(timeline, amount=lambda memory: f"{memory / 2**30:g} GiB")
    assert ">2 GiB</text>" in picture
    assert ">1 GiB</text>" in picture


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
