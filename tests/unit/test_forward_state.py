"""Forwards that are taken back leave nothing, and those that go on leave all.

The checks are in forward_state_checks.py, in a process in CPU mode. They compare with a run that
was not interrupted.
"""

from __future__ import annotations

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.forward_state_checks")


def test_forwards_that_are_taken_back_leave_no_draws_and_no_buffers() -> None:
    check("taken_back")


def test_the_comparison_would_find_each_generator() -> None:
    assert check("each_generator_counts") == dict.fromkeys(
        ("python", "numpy", "torch", "cuda", "tracker"), True
    )


def test_forwards_that_go_on_are_those_of_one_run() -> None:
    check("goes_on")


def test_statistics_of_experts_come_with_their_own_batch() -> None:
    check("statistics_of_experts")


def test_a_statistic_that_was_only_reported_ahead() -> None:
    check("statistics_that_are_new")


def test_a_model_without_experts_has_no_statistics() -> None:
    check("without_experts_nothing_is_set_aside")


def test_statistics_after_a_forward_that_raised() -> None:
    check("an_exception_in_between")
