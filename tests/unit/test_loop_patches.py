"""What the training loop does after a step that was validated, and that it is untouched without.

The checks are in loop_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.loop_checks")


def test_success_is_not_asked_for_after_a_validated_step() -> None:
    check("without_asking")


def test_a_statistic_has_the_rounding_of_the_reduction_that_is_spared() -> None:
    check("without_reducing")


def test_a_timer_waits_for_nobody_after_a_validated_step() -> None:
    check("without_barrier")


def test_signals_and_the_time_limit_are_decided_with_the_step() -> None:
    check("decided_with_the_step")


def test_to_save_and_to_exit_by_number_is_decided_as_ever() -> None:
    check("other_reasons_stay")


def test_an_error_leaves_the_flags_as_they_were() -> None:
    check("an_error_leaves_the_flags")


def test_a_checkpoint_is_saved_after_the_run_ahead_is_thrown_away() -> None:
    check("saving_discards_first")


def test_tied_gradients_are_added_after_megatrons_own_reduction() -> None:
    check("tied_gradients_are_added_after")


def test_the_log_tells_how_steps_were_validated() -> None:
    names = ["committed", "rolled-back", "clipped", "skipped", "synchronous", "mode-changes"]
    numbers = [7, 0, 2, 0, 0, 0]
    line = (
        " optimizer steps so far: committed: 7 | rolled back: 0 | clipped: 2 | skipped: 0 | "
        "synchronous: 0 | mode changes: 0"
    )
    written = [
        (f"post-validation/{name}", number, 3) for name, number in zip(names, numbers, strict=True)
    ]
    assert check("counts_in_the_log") == [line, 2, *written, 3, line, 4]


def test_without_post_validation_step_and_norm_are_megatrons() -> None:
    check("steps_are_megatrons_own_without_it")


def test_a_validated_step_records_no_gradients() -> None:
    check("validated_steps_record_no_gradients")
