"""The flags that commands share: placements, costs, memory limits; and the progress bar."""

from __future__ import annotations

import argparse
import io
import math

import pytest

from zero_bubble.cli.common import (
    Parser,
    ProgressBar,
    add_costs,
    add_memory_limit,
    add_placement,
    add_size,
    costs_of,
    memory_limits,
    placement_of,
)
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape

STAGES = 4


def parsed(*flags: str) -> argparse.Namespace:
    parser = Parser()
    add_size(parser)
    add_placement(parser)
    add_costs(parser)
    add_memory_limit(parser)
    return parser.parse_args(["--stages", str(STAGES), "--microbatches", "8", *flags])


@pytest.mark.parametrize(
    ("flags", "placement"),
    [
        ([], linear(STAGES)),
        (["--placement", "v"], v_shape(STAGES)),
        (["--placement", "interleaved"], interleaved(STAGES, 2)),
        (["--placement", "interleaved", "--chunks", "3"], interleaved(STAGES, 3)),
    ],
)
def test_placements(flags: list[str], placement: Placement) -> None:
    assert placement_of(parsed(*flags)) == placement


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--placement", "v", "--chunks", "2"],
            "--chunks 2 needs --placement interleaved: v has 2",
        ),
        (["--chunks", "3"], "linear has 1 chunk a stage"),
        (["--placement", "interleaved", "--chunks", "0"], "--chunks 0: at least 1 chunk"),
        (["--stages", "0"], "--stages 0: at least 1 stage"),
        (["--placement", "u"], "invalid choice: 'u'"),
    ],
)
def test_placements_that_are_none(flags: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placement_of(parsed(*flags))


def test_a_stage_s_costs_are_divided_among_its_chunks() -> None:
    flags = ["--t-f", "6", "--t-b", "4", "--t-comm", "1", "--m-b", "10", "--m-w", "5"]
    assert costs_of(parsed(*flags), interleaved(STAGES, 2)) == Costs.uniform(
        interleaved(STAGES, 2), 3, 2, 2, 1, m_b=5, m_w=2.5
    )
    uneven = Placement(((0, 3), (1,), (2,)))
    assert costs_of(parsed(*flags), uneven).t_f == ((3, 3), (6,), (6,))


UNEQUAL = Costs(
    t_f=((1, 1), (1, 1)),
    t_b=((1, 1), (1, 1)),
    t_w=((1, 1), (1, 1)),
    m_b=((10, 20), (30, 50)),
    m_w=((0, 0), (0, 0)),
)
"""M_B is 30 on stage 0 and 80 on stage 1."""


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("1p", (60, 160)),
        ("1.5p", (90, 240)),
        ("0.5P, 2p", (30, 320)),
        ("7.5", (7.5, 7.5)),
        ("1e3", (1000, 1000)),
        ("inf", (math.inf, math.inf)),
        ("inf,1p", (math.inf, 160)),
        ("2GiB", (2 * 2**30, 2 * 2**30)),
        ("80gb", (80e9, 80e9)),
        ("1 MiB,3KiB", (2**20, 3 * 2**10)),
        ("5MB,100B", (5e6, 100)),
        ("0", (0, 0)),
    ],
)
def test_memory_limits(text: str, limits: tuple[float, ...]) -> None:
    assert memory_limits(text, v_shape(2), UNEQUAL) == limits
    assert parsed("--memory-limit", text).memory_limit == text


@pytest.mark.parametrize(
    "text", ["", "-1", "-inf", "nan", "nanp", "p", "GiB", "1,2,3", "1,", "1.5q", "1.2.3", "0x10"]
)
def test_memory_limits_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--memory-limit"):
        memory_limits(text, v_shape(2), UNEQUAL)


def test_bytes_need_costs_in_bytes() -> None:
    costs = Costs.uniform(linear(2), 1, 1, 1)
    with pytest.raises(ValueError, match="12GiB is in bytes, but the costs are not"):
        memory_limits("12GiB", linear(2), costs)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_redraws_one_line_and_takes_it_away() -> None:
    terminal = Terminal()
    with ProgressBar(stream=terminal) as bar:
        bar.update(bubble=0.0543, bound=0.0498, gap=0.005)
        for _ in range(1000):
            bar.update(bubble=0.05)  # too soon to be drawn
    first, line, blank, rest = terminal.getvalue().split("\r")
    assert (first, rest) == ("", "")
    assert line == "search  0.0 s  bubble 5.43%  bound 4.98%  gap 0.5%"
    assert blank == " " * len(line)


def test_no_bar_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with ProgressBar(stream=stream) as bar:
        bar.update(bubble=0.0543)
    assert stream.getvalue() == ""
