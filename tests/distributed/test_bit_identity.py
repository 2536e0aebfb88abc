"""Each schedule trains to the bits of Megatron's own 1F1B, through Megatron's own loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.distributed.configs import Case, Config, cases
from tests.distributed.harness import Result, assert_identical
from tests.distributed.observations import check_runtime


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
    check_runtime(actual, case.schedule)
