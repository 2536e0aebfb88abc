"""When ranks measure, and that they all switch in the same iteration.

The checks are in rescheduler_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.rescheduler_checks")


def test_all_ranks_switch_in_the_same_iteration_however_their_steps_interleave() -> None:
    switches, early = check("all_switch_in_the_same_iteration", cases=120)
    assert switches > 3
    assert early > 120  # in some of 20 iterations


def test_another_length_with_ranks_out_of_step() -> None:
    check("another_length_with_ranks_out_of_step", cases=80)


@pytest.mark.parametrize(
    "what",
    [
        "one_that_waits_switches_where_it_always_does",
        "training_goes_on_while_it_searches",
        "a_resumed_job_measures_from_its_start",
        "another_number_of_microbatches",
        "another_number_of_microbatches_before_the_profile",
        "another_length",
        "another_length_while_it_searches",
        "another_length_where_a_switch_was_announced",
        "a_search_that_fails",
        "what_is_no_better_is_not_switched_to",
        "a_job_that_ends_with_the_profile",
        "the_profile_it_ends_with_is_kept",
        "announcements_are_text",
    ],
)
def test_rescheduler(what: str) -> None:
    check(what)


@pytest.mark.parametrize("stop", [False, True])
def test_a_profile_that_cannot_be_written(stop: bool) -> None:
    check("a_profile_that_cannot_be_written", stop=stop)


def test_a_start_that_ends_before_it_has_measured_is_told() -> None:
    assert check("a_start_that_ends_before_it_has_measured", total=104)
    assert not check("a_start_that_ends_before_it_has_measured", total=200)


def test_what_a_switch_has_gained_is_told_after_ten_iterations() -> None:
    line = check("what_a_switch_has_gained", sizes={})
    assert line is not None
    assert line.startswith("found-0")
    for figure in ("80.0 ms instead of 100.0", "medians of 10", "measured gain 20.0%"):
        assert figure in line


@pytest.mark.parametrize("size", [(8, 32), (6, 64)])
def test_iterations_of_other_sizes_are_not_compared(size: tuple[int, int]) -> None:
    """Six microbatches of 32 tokens until iteration 12, and of others afterwards."""
    line = check("what_a_switch_has_gained", sizes={12: size})
    assert line is None or not line.startswith("found-0")


def test_times_that_stay_are_measured_now_and_then() -> None:
    """Six iterations after one round ends comes the next, of three."""
    measured, searches, lines = check("drift", factors={})
    assert measured[:9] == [3, 4, 5, 11, 12, 13, 19, 20, 21]
    assert searches == 1
    assert any("found-0 goes on" in line and "0.0%" in line for line in lines)


@pytest.mark.parametrize(("factor", "searches"), [(1.01, 1), (1.05, 2), (0.9, 2)])
def test_times_that_move_are_searched_for_again(factor: float, searches: int) -> None:
    """From iteration 15 on; the threshold is 2 %."""
    assert check("drift", factors={15: factor})[1] == searches


def test_times_that_creep_are_searched_for_again() -> None:
    """1.5 % from round to round, which is less than the threshold, and 6 % in all."""
    factors = {iteration: 1.015**n for n, iteration in enumerate(range(15, 50, 8), 1)}
    assert check("drift", factors=factors, iterations=55)[1] > 1


def test_an_iteration_that_is_left_out_is_measured_later() -> None:
    """Iterations 3 to 5 were to be measured; five later it is clear that one will not come."""
    again = [12, 13, 14]
    assert check("an_iteration_that_is_left_out", skipped=4) == [3, 5, *again]
    assert check("an_iteration_that_is_left_out", skipped=3) == [4, 5, *again]
    assert check("an_iteration_that_is_left_out", skipped=8) == [3, 4, 5]
