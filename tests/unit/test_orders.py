"""The compiled evaluator agrees with the simulator, which shares no code with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import parse, random_costs
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.placement import linear
from zero_bubble.search.orders import decode, encode, evaluate
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate


@given(
    name=st.sampled_from(["zb-h1", "zb-h2"]),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_compiled_and_simulated_times_agree(
    name: str, stages: int, microbatches: int, seed: int
) -> None:
    schedule = build(name, stages, microbatches)
    costs = random_costs(schedule.placement, seed)
    problem = Problem.of(schedule.placement, costs, microbatches)
    rows = encode(schedule)
    found, expected = evaluate(problem.arrays(), microbatches, rows), simulate(schedule, costs)
    assert found.cost == pytest.approx(expected.cost)
    assert list(found.peak) == pytest.approx(expected.peak_memory)
    for row, spans in zip(rows, expected.spans, strict=True):
        assert [found.start[code] for code in row] == pytest.approx([one.start for one in spans])
        assert [found.end[code] for code in row] == pytest.approx([one.end for one in spans])
    assert decode(problem, rows, name) == schedule


def test_a_deadlock_costs_minus_one() -> None:
    second = "0F1 0I1 0W1 0F0 0I0 0W0"
    late, crossed = (
        parse(linear(2), 2, f"{first}\n{second}")
        for first in ("0F0 0F1 0I0 0W0 0I1 0W1", "0F0 0I0 0W0 0F1 0I1 0W1")
    )
    problem = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2)
    assert evaluate(problem.arrays(), 2, encode(late)).cost == 11
    assert evaluate(problem.arrays(), 2, encode(crossed)).cost == -1


def test_fused_backwards_have_no_code() -> None:
    with pytest.raises(ValueError, match="stage 0 has the fused backward 0B0"):
        encode(build("1f1b", 2, 2))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ([1.0], "1 memory limits for 2 stages: give one each"),
        ([1.0, 0.5], "memory limit 0.5 of stage 1 cannot be met: .* takes 1 there, the least"),
        (float("nan"), "memory limit nan of stage 0 cannot be met"),
    ],
)
def test_a_limit_that_cannot_be_met_is_refused(limits: float | list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2, limits)
