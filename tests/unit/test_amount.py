"""Memory as people read it."""

from __future__ import annotations

import argparse
import math
from decimal import ROUND_CEILING, ROUND_FLOOR

import pytest

from zero_bubble.amount import amount, in_bytes, is_bytes
from zero_bubble.cli.amount import parse_amount


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


def test_an_amount_is_rounded_so_that_it_works_as_it_is_read() -> None:
    """2,045,950 bytes are 1.95117 MiB; a stage that needs them cannot do with 1.951."""
    assert in_bytes(2_045_950) == "1.951 MiB"
    least = in_bytes(2_045_950, rounding=ROUND_CEILING)
    assert least == "1.952 MiB"
    assert parse_amount(least) >= 2_045_950
    assert in_bytes(2_045_950, rounding=ROUND_FLOOR) == "1.951 MiB"
    for rounding in (ROUND_CEILING, ROUND_FLOOR):  # what floats cannot hold is not rounded
        assert in_bytes(0.7 * 2**30, rounding=rounding) == "716.8 MiB"
        assert in_bytes(1.1 * 2**30 * 3 / 3, rounding=rounding) == "1.1 GiB"
    assert (in_bytes(102_400), in_bytes(300), in_bytes(0)) == ("100 KiB", "300 B", "0 B")


def test_one_large_amount_says_that_the_others_are_bytes_too() -> None:
    assert is_bytes(102_400, 2_045_950)
    assert not is_bytes(0.5, 8, math.inf)


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
