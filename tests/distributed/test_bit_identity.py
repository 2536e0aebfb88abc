"""Each schedule trains to the bits of Megatron's own 1F1B, through Megatron's own loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.configs import Case, Config, cases
from tests.distributed.harness import Result, assert_identical
from tests.distributed.observations import check_runtime
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.problem import Problem


def _parameters() -> list[object]:
    return [
        pytest.param(case, id=str(case), marks=() if default else pytest.mark.slow)
        for case, default in cases()
    ]


@pytest.mark.parametrize("case", _parameters())
def test_bit_identity(
    case: Case,
    reference: Callable[[Config], Result],
    train: Callable[..., Result],
) -> None:
    expected = reference(case.config)
    actual = train(case.config, case.schedule)
    assert_identical(expected, actual)
    check_runtime(actual, build(case.schedule, case.config.pp, case.config.num_microbatches))


ORDERS = {"ascending": False, "reversed": True}


@pytest.mark.parametrize("order", ORDERS)
def test_bit_identity_from_a_file_and_only_with_w_in_order(
    order: str,
    reference: Callable[[Config], Result],
    train: Callable[..., Result],
    tmp_path: Path,
) -> None:
    """All W's at the end, from a schedule file: Megatron's bits in ascending order of microbatches.

    Reversed, the schedule is legal and runs, but adds the same gradients in another order: the
    comparison must notice.
    """
    config = Config()
    schedule = with_w_at_the_end(build("zb-h1", config.pp, config.num_microbatches), ORDERS[order])
    file = tmp_path / "schedule.json"
    save_schedule(schedule, file)
    expected, actual = reference(config), train(config, str(file))
    check_runtime(actual, schedule)
    if order == "ascending":
        assert_identical(expected, actual)
    else:
        with pytest.raises(AssertionError):
            assert_identical(expected, actual)


def test_a_searched_schedule_trains_bit_identically(
    reference: Callable[[Config], Result], train: Callable[..., Result], tmp_path: Path
) -> None:
    """What the search finds for odd times and limits runs in Megatron, with Megatron's bits."""
    config = Config(pp=4, microbatches=6)
    placement = linear(config.pp)
    costs = Costs.uniform(placement, 1.0, 1.3, 0.7, t_comm=0.1, m_w=0.6)
    problem = Problem.of(placement, costs, config.num_microbatches, [3, 4, 5, 3.5])
    found = auto(problem, effort="quick")
    file = tmp_path / "schedule.json"
    save_schedule(found.schedule, file, costs)
    actual = train(config, str(file))
    check_runtime(actual, found.schedule)
    assert_identical(reference(config), actual)


def with_w_at_the_end(schedule: Schedule, reverse: bool) -> Schedule:
    """The same F's and B's, then every W."""
    rows = []
    for row in schedule.passes:
        weights = sorted((one for one in row if one.kind is Kind.W), reverse=reverse)
        rows.append((*(one for one in row if one.kind is not Kind.W), *weights))
    return replace(schedule, passes=tuple(rows))
