"""Where activations are recomputed: in a pass of their own, if Megatron recomputes all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.arguments import schedule_for_job, validate
from tests.unit.test_arguments import MICROBATCHES, STAGES, arguments, complaint, saved
from zero_bubble.builders import build
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.schedule import Kind

FULL = {"recompute_granularity": "full"}


def resolved(**changes: Any) -> tuple[str | None, bool]:
    """What validation makes of the flag, and whether the schedule has R's."""
    args = arguments(pipeline_schedule="zb-h1", **changes)
    validate(args)
    schedule = schedule_for_job(args, "zb-h1", STAGES, MICROBATCHES)
    return args.zero_bubble_recompute, any(schedule.chunks_with(Kind.R))


def test_defaults() -> None:
    assert resolved() == (None, False)
    assert resolved(recompute_granularity="selective") == (None, False)
    assert resolved(**FULL) == ("pass", True)
    assert resolved(**FULL, distribute_saved_activations=True) == ("in-backward", False)


def test_what_is_given_is_done() -> None:
    assert resolved(**FULL, zero_bubble_recompute="pass") == ("pass", True)
    assert resolved(**FULL, zero_bubble_recompute="in-backward") == ("in-backward", False)


@pytest.mark.parametrize("granularity", [None, "selective"])
def test_nothing_is_recomputed_in_full(granularity: str | None) -> None:
    message = complaint(
        pipeline_schedule="zb-h1", recompute_granularity=granularity, zero_bubble_recompute="pass"
    )
    assert message == (
        "--zero-bubble-recompute pass is for --recompute-granularity full, but "
        f"--recompute-granularity is {granularity}: add --recompute-granularity full "
        "--recompute-method uniform --recompute-num-layers 1, or leave --zero-bubble-recompute out"
    )


def test_megatron_recomputes_by_other_means() -> None:
    message = complaint(
        pipeline_schedule="zb-h1",
        zero_bubble_recompute="pass",
        distribute_saved_activations=True,
        **FULL,
    )
    assert message == (
        "--zero-bubble-recompute pass does not work with --distribute-saved-activations, with "
        "which Megatron recomputes by other means: use --zero-bubble-recompute in-backward"
    )


def test_megatrons_own_schedule() -> None:
    assert "needs one of this project's schedules" in complaint(
        zero_bubble_recompute="in-backward", **FULL
    )


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, "add --recompute-granularity full"),
        (FULL | {"zero_bubble_recompute": "in-backward"}, "add --zero-bubble-recompute pass"),
    ],
)
def test_a_file_with_recomputation_in_a_job_without(
    changes: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    path = saved(with_recomputation(build("zb-h1", STAGES, MICROBATCHES)), tmp_path)
    message = complaint(pipeline_schedule=path, **changes)
    assert message == (
        f"--pipeline-schedule {path} has recomputation passes (R), which this job does not: "
        f"{remedy}, or make the schedule again without them"
    )
    validate(arguments(pipeline_schedule=path, **FULL))
