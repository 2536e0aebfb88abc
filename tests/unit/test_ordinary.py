"""Which iterations run into the next one, and which ranks want to stop.

The checks are in loop_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cpu_mode import checks_of
from tests.versions import since

check = checks_of("tests.unit.loop_checks")

# The iteration is the fifth of 100; True: it runs into the sixth.
CASES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"train_iters": 5}, False),
    ({"train_iters": 6}, True),
    ({"eval_interval": 5}, False),
    ({"eval_interval": 6}, True),
    ({"eval_interval": 0}, True),
    ({"eval_interval": 1}, False),
    ({"eval_interval": 5, "do_valid": False}, True),
    ({"eval_interval": 5, "start_eval_at_iter": 6}, True),
    ({"eval_interval": 5, "start_eval_at_iter": 5}, False),
    ({"save": "x", "save_interval": 5}, False),
    ({"save": "x", "save_interval": 4}, True),
    ({"save": "x"}, True),
    ({"save_interval": 5}, True),
    ({"save": "x", "non_persistent_save_interval": 5}, False),
    ({"save": "x", "save_interval": 4, "non_persistent_save_interval": 5}, False),
    ({"non_persistent_save_interval": 5}, True),
    ({"exit_interval": 5}, False),
    ({"exit_interval": 6}, True),
    ({"phase_transition_iterations": [5]}, False),
    ({"phase_transition_iterations": [4, 6]}, True),
    ({"check_weight_hash_across_dp_replicas_interval": 5}, False),
    ({"check_weight_hash_across_dp_replicas_interval": 6}, True),
    ({"adlr_autoresume": True, "adlr_autoresume_interval": 5}, False),
    ({"adlr_autoresume": True}, True),
    ({"adlr_autoresume_interval": 5}, True),
    ({"gpu_sniff_test_interval": 5}, False),
    ({"gpu_sniff_test_interval": 6}, True),
    ({"timing_log_level": 1, "log_interval": 5}, False),
    ({"timing_log_level": 2, "log_interval": 1}, False),
    ({"timing_log_level": 1, "log_interval": 6}, True),
    # The sixth is left out, which reads its data by itself.
    ({"iterations_to_skip": [6]}, False),
    ({"iterations_to_skip": [4, 5, 7]}, True),
    ({"iterations_to_skip": None}, True),
    # What is saved of the sixth is seen by hooks that are set when it begins.
    ({"save_activations_interval": 6}, False),
    ({"save_tokens_per_expert_interval": 3}, False),
    ({"save_dgrads_interval": 2}, False),
    ({"save_wgrads_interval": 6}, False),
    ({"save_params_interval": 1}, False),
    ({"save_activations_interval": 5, "save_wgrads_interval": 5}, True),
    # These are asked of all ranks by the step itself.
    ({"exit_signal_handler": True, "exit_duration_in_mins": 1}, True),
]


@pytest.mark.parametrize(("changes", "expected"), CASES, ids=lambda one: str(one)[:60])
def test_nothing_may_come_between(changes: dict[str, Any], expected: bool) -> None:
    assert check("runs", changes=changes) is expected


def test_an_older_megatron_has_fewer_reasons() -> None:
    assert check("runs_without_newer_arguments") is True


# A microbatch is 6 samples over all ranks.
@since("0.18", "--step-batch-size-schedule")
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("0:12 36:24 60:24 100:48", [2, 5]),
        ("0:6 6:12 18:18", [0, 1]),
        # Reached within an iteration, it counts from the next one on.
        ("0:24 25:48 73:96", [1, 2]),
        ("0:12", []),
    ],
)
def test_another_number_of_microbatches_is_seen_an_iteration_before(
    schedule: str, expected: list[int]
) -> None:
    ours, megatrons = check(
        "iterations_before_another_batch_size", schedule=schedule, iterations=12
    )
    assert ours == megatrons == expected


def test_a_signal_is_seen_without_asking_other_ranks() -> None:
    assert check("signals") == [False, False, True]


@pytest.mark.parametrize(
    ("minutes", "limit", "expected"),
    [(10, 11, False), (10, 9, True), (10, None, False), (10, 0, False), (10, 9.99, True)],
)
def test_the_time_limit_is_that_of_the_loop(
    minutes: float, limit: float | None, expected: bool
) -> None:
    assert check("time_used_up", minutes=minutes, limit=limit) is expected
