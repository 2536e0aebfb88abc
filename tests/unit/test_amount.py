"""Memory as people read it."""

from __future__ import annotations

import argparse
import math

import pytest

from zero_bubble.cli.amount import amount, parse_amount


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


@pytest.mark.parametrize(
    ("text", "memory"),
    [("7.5", 7.5), ("1e3", 1000), ("3GiB", 3 * 2**30), ("80 gb", 80e9), (".5KiB", 512), ("-1", -1)],
)
def test_bytes_are_read_with_or_without_a_unit(text: str, memory: float) -> None:
    assert parse_amount(text) == memory


@pytest.mark.parametrize("text", ["3p", "much", "3 x GiB", ""])
def test_what_is_no_amount_says_what_would_be(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"a number such as 1\.5, or bytes"):
        parse_amount(text)
