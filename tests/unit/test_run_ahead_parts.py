"""A stage's program in two parts, and what becomes of the first one.

The checks are in run_ahead_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of
from zero_bubble.builders import BUILDERS

check = checks_of("tests.unit.run_ahead_checks")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_receive_is_left_for_later_if_no_run_ahead_sends_its_message(name: str) -> None:
    found = check("of_builders", name=name)
    assert found["forwards ahead"] > 0


def test_the_same_of_any_order_of_passes() -> None:
    found = check("of_any_order")
    assert found["forwards ahead"] > 0
    assert found["receives left"] > 0


def test_the_batch_that_is_asked_for_goes_on() -> None:
    check("the_batch_that_was_asked_for")


def test_a_batch_that_nobody_asked_for_is_thrown_away() -> None:
    check("another_batch")


def test_a_batch_of_other_data_is_an_error() -> None:
    check("other_data")


def test_stages_that_have_not_run_have_sent_nothing() -> None:
    check("of_some_stages")


def test_a_pass_that_raises_leaves_nobody_waiting() -> None:
    check("a_pass_that_raises")


def test_a_stage_that_is_gone_ends_it_at_once() -> None:
    check("a_stage_that_is_gone")


def test_forwards_record_gradients_within_the_step() -> None:
    check("gradients_are_recorded")
