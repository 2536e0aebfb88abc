"""Who gets which batches measured, and when.

The checks are in monitor_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.monitor_checks")


@pytest.mark.parametrize(
    "what",
    [
        "each_gets_what_it_wants",
        "what_nobody_wants_is_not_recorded",
        "memory_is_counted_for_who_wants_it",
        "evaluations_are_none",
        "nothing_is_handed_on_before_it_is_past",
        "who_waits_gets_all",
        "the_clock_is_made_anew_where_memory_is_wanted",
        "an_iteration_without_a_step",
        "a_batch_that_never_ended_is_dropped",
        "a_run_ahead_belongs_to_the_next_iteration",
        "what_has_run_ahead_in_vain_is_recorded_anew",
        "what_has_run_ahead_in_vain_may_not_be_wanted_any_more",
        "phases_of_post_validation",
        "phases_before_the_first_pass_are_not_of_the_batch",
        "all_must_let_it_run_ahead",
    ],
)
def test_monitor(what: str) -> None:
    check(what)


@pytest.mark.parametrize("waits", [False, True])
def test_one_that_waits_hands_on_before_the_next_batch(waits: bool) -> None:
    check("one_that_waits_hands_on_before_the_next_batch", waits=waits)
