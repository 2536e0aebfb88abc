"""Runs that clip often step synchronously until they are calm again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.distributed.configs import ValidatedCase
from tests.distributed.harness import Result
from tests.distributed.validated import FLAG, STEP, assert_validated, outcomes


def agitated(verdicts: list[str], window: int, threshold: float) -> list[bool]:
    """Whether too many of the window's steps before each step, and after the last, were no plain
    ones."""
    disturbed = [verdict != STEP for verdict in verdicts]
    return [
        i >= window and sum(disturbed[i - window : i]) > threshold * window
        for i in range(len(verdicts) + 1)
    ]


@pytest.mark.parametrize(
    ("window", "threshold"),
    [
        (4, 0.5),
        pytest.param(3, 0.34, marks=pytest.mark.slow),
        pytest.param(1, 0.99, marks=pytest.mark.slow),
        pytest.param(4, 1.0, marks=pytest.mark.slow),
        pytest.param(0, 0.1, marks=pytest.mark.slow),
        pytest.param(4, 0.0, marks=pytest.mark.slow),
    ],
)
def test_post_validation_pauses_where_many_steps_clip(
    window: int,
    threshold: float,
    synchronous: Callable[..., Result],
    train: Callable[..., Result],
) -> None:
    config = ValidatedCase.of("zb-h1", "deferred", "pp2", "fp32", clip_grad=1.25).config
    expected = synchronous(config, "zb-h1")
    adaptive = f"--post-validation-window {window} --post-validation-threshold {threshold}"
    actual = train(config, "zb-h1", FLAG, *adaptive.split())
    off = window == 0 or threshold == 0
    paused = [not off and one for one in agitated(outcomes(expected), window, threshold)]
    assert_validated(
        expected,
        actual,
        also_synchronous=frozenset(i for i, one in enumerate(paused[:-1]) if one),
    )
    changes = sum(before != after for before, after in pairwise(paused))
    for record in actual.ranks:
        assert record["counts"].get("mode_changes", 0) == changes
    if (window, threshold) == (4, 0.5):
        assert changes >= 2, "it must pause and come back"
