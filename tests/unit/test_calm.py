"""When steps go ahead of their validation, by how many of the last ones were clipped or skipped."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.optimizer.adaptive import Calm


def modes(window: int, threshold: float, steps: str) -> str:
    """After each step (x: clipped or skipped): c where it is calm, - where it is not."""
    calm = Calm(window, threshold)
    found = ""
    before = calm.is_calm
    for step in steps:
        assert calm.see(step == "x") == (calm.is_calm != before)
        before = calm.is_calm
        found += "c" if before else "-"
    return found


@pytest.mark.parametrize(
    ("window", "threshold", "steps", "expected"),
    [
        # Nothing is said before the window is full.
        (4, 0.5, "xxx", "ccc"),
        (4, 0.5, "xxxx", "ccc-"),
        # Half of the window is the limit, and not above it, both on the way there and back.
        (4, 0.5, "xx..", "cccc"),
        (4, 0.5, "xxx.", "ccc-"),
        (4, 0.5, ".xxx..xx.", "ccc--cccc"),
        (4, 0.5, "xxxx....", "ccc--ccc"),
        # Each step outside the calm counts as well, and a single one can end it again.
        (2, 0.5, "xx.xx", "c-cc-"),
        (1, 0.5, "x.x.", "-c-c"),
        (3, 0.99, "xxx.xxx", "cc-ccc-"),
        # Not even all of them are more than all of them.
        (3, 1.0, "xxxxxx", "cccccc"),
        # Off.
        (0, 0.5, "xxxxxx", "cccccc"),
        (3, 0.0, "xxxxxx", "cccccc"),
        (0, 0.0, "xxxxxx", "cccccc"),
    ],
)
def test_known_courses(window: int, threshold: float, steps: str, expected: str) -> None:
    assert modes(window, threshold, steps) == expected


@given(
    st.integers(1, 6),
    st.sampled_from([Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1)]),
    st.text("x.", max_size=30),
)
def test_it_is_calm_unless_more_than_the_threshold_of_a_full_window(
    window: int, threshold: Fraction, steps: str
) -> None:
    expected = ""
    for end in range(1, len(steps) + 1):
        last = steps[max(0, end - window) : end]
        loud = end >= window and last.count("x") > threshold * window
        expected += "-" if loud else "c"
    assert modes(window, float(threshold), steps) == expected


def test_the_share_is_that_of_the_last_steps() -> None:
    calm = Calm(4, 0.5)
    assert calm.disturbed == 0
    shares = []
    for step in "x.xx.....":
        calm.see(step == "x")
        shares.append(calm.disturbed)
    assert shares == [1, 1 / 2, 2 / 3, 3 / 4, 2 / 4, 2 / 4, 1 / 4, 0, 0]
