"""Memory as people read it."""

from __future__ import annotations

import math

import pytest

from zero_bubble.cli.amount import amount


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (0, "0"),
        (7.5, "7.5"),
        (31.99999, "32"),
        (12 * 2**30, "12 GiB"),
        (80e9, "74.51 GiB"),
        (300 * 2**20, "300 MiB"),
        (1.0e6, "976.6 KiB"),
        (math.inf, "inf"),
    ],
)
def test_bytes_have_a_unit(memory: float, text: str) -> None:
    assert amount(memory) == text
