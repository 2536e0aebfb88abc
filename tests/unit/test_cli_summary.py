"""What is said of a search's result: bound, distance, who found it; and its name."""

from __future__ import annotations

import argparse
from dataclasses import replace

import pytest

from zero_bubble.builders import build
from zero_bubble.cli import main
from zero_bubble.cli.searching import Found, name_of
from zero_bubble.cli.summary import bound_line, gap_text, verdict
from zero_bubble.costs import Costs
from zero_bubble.placement import linear
from zero_bubble.search.bounds import Bound, Reason
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

PROBLEM = Problem.of(linear(2), Costs.uniform(linear(2), 10, 10, 10), 2, 2.0)
"""60 ms of work."""
START = Solution(build("zb-h1", 2, 2), 80.0, 70.0, "wave")
BOUND = Bound(70.0, 1, Reason.COOL_DOWN)
Capture = pytest.CaptureFixture[str]


def found(cost: float, bound: float, method: str = "cp-sat") -> Found:
    solution = Solution(START.schedule, cost, bound, method)
    return Found(PROBLEM, solution, BOUND, method, start=START)


@pytest.mark.parametrize(
    ("result", "bound", "distance"),
    [
        (
            Found(PROBLEM, START, BOUND, "auto"),
            "bound: 70 ms, bubble rate 14.29% (cool-down of stage 1)",
            "within 12% of the bound (found by wave)",
        ),
        (
            found(80.0, 70.0),
            "bound: 70 ms, bubble rate 14.29% (cool-down of stage 1)",
            "within 12% of the bound (found by wave; cp-sat found nothing better)",
        ),
        (
            found(80.0, 75.0),
            "bound: 75 ms, bubble rate 20.00% (proven by cp-sat, microbatches in order)",
            "within 6.2% of the bound (found by wave; cp-sat found nothing better)",
        ),
        (
            found(80.0, 80.0),
            "bound: 80 ms, bubble rate 25.00% (proven by cp-sat, microbatches in order)",
            "optimal: no schedule with microbatches in order within these limits costs less (found "
            "by wave, proved optimal by cp-sat)",
        ),
        (
            found(76.0, 76.0, "highs"),
            "bound: 76 ms, bubble rate 21.05% (proven by highs, microbatches in order)",
            "optimal: no schedule with microbatches in order within these limits costs less (found "
            "and proved optimal by highs, starting from wave)",
        ),
        (
            found(70.0, 70.0, "windows"),
            "bound: 70 ms, bubble rate 14.29% (cool-down of stage 1)",
            "optimal: no schedule within these limits costs less (found by windows, starting from "
            "wave)",
        ),
    ],
)
def test_the_best_bound_and_who_found_what(result: Found, bound: str, distance: str) -> None:
    assert bound_line(PROBLEM, BOUND, result) == bound
    assert verdict(result) == distance


def test_a_solver_that_had_nothing_to_do() -> None:
    start = replace(START, cost=70.0)
    result = Found(PROBLEM, replace(start, how="cp-sat"), BOUND, "cp-sat", start=start)
    assert verdict(result).endswith("(found by wave; nothing was left for cp-sat)")


@pytest.mark.parametrize(
    ("gap", "text"), [(0.12, "12%"), (0.034, "3.4%"), (0.0004, "0.04%"), (0.0000123, "0.0012%")]
)
def test_a_gap_has_two_digits(gap: float, text: str) -> None:
    assert gap_text(gap) == text


def test_a_solver_s_bound_is_the_one_that_is_printed(capsys: Capture) -> None:
    """For three stages and a limit that only CP-SAT proves to be met."""
    flags = ["--memory-limit", "0.7p", "--t-comm", "0.3", "--effort", "quick"]
    size = ["--stages", "3", "--microbatches", "6"]
    solved = ["--method", "cp-sat", "--time-limit", "20"]
    assert main(["schedule", "auto", *size, *flags, *solved]) == 0
    out = capsys.readouterr().out
    assert "auto-linear-0.7p-cp-sat: cost 28 ms, bubble rate 35.71%" in out
    assert "bound: 28 ms, bubble rate 35.71% (proven by cp-sat, microbatches in order)\n" in out
    assert "proved optimal by cp-sat" in out
    # Those rates would start from the other bound.
    assert "more memory" not in out
    assert main(["bound", *size, *flags[:4]]) == 0
    assert "bound: 28 ms" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "auto-linear-1p"),
        ({"placement": "v", "memory_limit": "1.25p"}, "auto-v-1.25p"),
        ({"placement": "interleaved", "chunks": 3}, "auto-interleaved3-1p"),
        ({"method": "cp-sat", "memory_limit": "12 GiB"}, "auto-linear-12GiB-cp-sat"),
        ({"robust": 0.05}, "auto-linear-1p-robust"),
        ({"recompute": "in-backward"}, "auto-linear-1p-recompute-in-backward"),
        ({"memory_limit": "6,6,4,4"}, "auto-linear-6,6,4,4"),
        ({"memory_limit": ",".join(["12"] * 16)}, "auto-linear-own-limits"),
    ],
)
def test_what_was_asked_for_is_in_the_name(given: dict[str, object], name: str) -> None:
    flags = {"placement": "linear", "chunks": None, "memory_limit": None, "method": None}
    flags |= {"robust": None, "recompute": None}
    assert name_of(argparse.Namespace(**{**flags, **given})) == name
