"""What TensorBoard and wandb are given of the measured pipeline.

The checks are in scalars_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.scalars_checks")


@pytest.mark.parametrize(
    "what",
    [
        "the_bubble_rate_is_of_the_busiest_and_the_longest",
        "other_pipelines_say_nothing",
        "notes_are_taken_away",
        "tokens_and_steps",
        "only_every_so_many_iterations",
        "work_of_nothing",
    ],
)
def test_scalars(what: str) -> None:
    check(what)


def test_no_iteration_is_lost_where_an_earlier_stage_is_always_late() -> None:
    assert check("an_earlier_stage_that_is_late") == [1, 2, 3, 4, 5]
