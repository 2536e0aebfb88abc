"""Curves over memory limits: more memory never costs more time."""

from __future__ import annotations

import pytest

from zero_bubble.builders import build
from zero_bubble.check import check
from zero_bubble.cli import main
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.search import curve
from zero_bubble.search.auto import auto
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.curve import memory_curve
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution
from zero_bubble.simulate import simulate

Capture = pytest.CaptureFixture[str]


def costs_of(placement: Placement) -> Costs:
    return Costs.uniform(placement, 10, 11, 7, 1.5, m_b=1 / placement.num_chunks(0))


@pytest.mark.parametrize("placement", [linear(3), v_shape(3)])
def test_costs_never_rise_and_never_fall_below_the_bound(placement: Placement) -> None:
    costs, limits = costs_of(placement), [1, 2, 2.5, 3, 6]
    found = memory_curve(placement, costs, 7, limits, effort="quick")
    assert len(found) == len(limits)
    for limit, one, before in zip(limits, found, [found[0], *found], strict=False):
        assert check(one.schedule, costs=costs, memory_limit=limit) == []
        assert one.cost == pytest.approx(simulate(one.schedule, costs).cost)
        assert one.cost <= before.cost
        problem = Problem.of(placement, costs, 7, limit)
        assert one.bound <= one.cost
        assert one.cost >= lower_bound(problem).cost * (1 - 1e-9)
        assert one.cost <= auto(problem, effort="quick").cost


def test_a_search_that_finds_worse_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    placement, costs = linear(4), costs_of(linear(4))
    good = build("zb-h1", 4, 8)
    found = iter([good, build("gpipe", 4, 8)])

    def stub(problem: Problem, *, effort: str) -> Solution:
        schedule = next(found)
        return Solution(schedule, simulate(schedule, costs).cost, problem.ideal, "stub")

    monkeypatch.setattr(curve, "auto", stub)
    assert [one.schedule for one in memory_curve(placement, costs, 8, [4, 5])] == [good, good]


def test_no_search_where_the_bound_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZB-H2 has no bubble at 7 M_B, so that nothing is left to find at 8."""
    costs = Costs.uniform(linear(4), 1, 1, 1)
    searched: list[float] = []

    def stub(problem: Problem, *, effort: str) -> Solution:
        searched.append(problem.memory_limit[0])
        return Solution(build("zb-h2", 4, 8), 24, 24, "stub")

    monkeypatch.setattr(curve, "auto", stub)
    assert [one.cost for one in memory_curve(linear(4), costs, 8, [7, 8, 9])] == [24, 24, 24]
    assert searched == [7]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([3, 2], "limits must not fall, but that of stage 0 goes from 3 to 2"),
        ([2, [2, 2, 1.5]], "that of stage 2 goes from 2 to 1.5"),
        ([0.5, 2], "memory limit 0.5 of stage 0 cannot be met"),
        ([[2, 2]], "2 memory limits for 3 stages"),
    ],
)
def test_limits_that_are_no_curve(limits: list[float | list[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_curve(linear(3), costs_of(linear(3)), 4, limits)


def test_the_command_shows_both_placements(capsys: Capture) -> None:
    """Paper: 1F1B's memory has a bubble of 3 with one chunk (ZB-H1), none with the V."""
    flags = ["--from", "1p", "--to", "2p", "--steps", "2"]
    assert main(["curve", "--stages", "4", "--microbatches", "8", *flags]) == 0
    _, _, header, first, last, _, appendix = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "limit",
        *["linear", "found", "bound", "found", "above", "bound"],
        *["v", "found", "bound", "found", "above", "bound"],
    ]
    assert first.split() == ["1p", "11.11%", "11.11%", "0.00%", "0.00%", "0.00%", "0.00%"]
    assert last.split() == ["2p", *["0.00%"] * 6]
    # ((p-1) T_B + p T_F) / T_F and ((p-1) T_B + (2p-1) T_F) / T_F, for p = 4.
    assert "linearly up to 7 (1.75p), the last bubbles go at 10 (2.5p)" in appendix


def test_the_command_starts_where_one_microbatch_fits(capsys: Capture) -> None:
    size = ["--stages", "2", "--microbatches", "3"]
    assert main(["curve", *size, "--placement", "v", "--steps", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[3].split()[0] == "0.5p"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "0.1p"], "--from 0.1p: one microbatch takes 0.25p, the least that works"),
        (["--from", "2p", "--to", "1p"], "--to 1p is below --from 2p"),
        (["--to", "much"], "--to much: expected a multiple of p M_B, such as 0.5p"),
        (["--steps", "0"], "--steps 0: at least 1 limit"),
        (["--microbatches", "0"], "--microbatches 0: at least 1"),
        (["--stages", "0"], "--stages 0: at least 1"),
        (["--chunks", "3", "--placement", "v"], "--chunks 3 needs --placement interleaved"),
    ],
)
def test_the_command_says_what_is_wrong(flags: list[str], message: str, capsys: Capture) -> None:
    assert main(["curve", "--stages", "4", "--microbatches", "8", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
