"""Which weights are in which share, and what the store computes of a share.

The checks themselves are in shares_checks.py, which runs in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.shares_checks")


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1, 1], 4, [0, 1, 2, 3]),
        # The middle of the large one is the middle of all.
        ([2, 8, 2], 3, [0, 1, 2]),
        ([6, 1, 1], 2, [0, 1, 1]),
        ([1], 3, [1]),
    ],
)
def test_weights_are_dealt_by_size(sizes: list[int], parts: int, expected: list[int]) -> None:
    assert check("dealt", sizes=sizes, parts=parts) == expected


def test_a_share_computes_its_weights_and_leaves_the_others() -> None:
    check("a_share")


def test_bundles_with_shares_done_count_less() -> None:
    check("peak")
