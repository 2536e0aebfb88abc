"""Whatever happens while a stage runs ahead, the job is as one that never did."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import Config
from tests.distributed.happenings import MESSAGE
from tests.distributed.harness import Result, Zygote, assert_identical
from tests.distributed.validated import FLAG

type Train = Callable[..., Result]

CANONICAL = "--canonical-grad-norm"
STEP = 4
"""The iteration in whose run-ahead things happen; an ordinary one (3 evaluates after its step)."""


def config(what: str, stage: int, **fields: Any) -> Config:
    return Config(
        dropout=0.1, clip_grad=0.0, iterations=8, happening=f"{what}:{stage}:{STEP}", **fields
    )


@pytest.mark.parametrize(
    ("schedule", "pp"),
    [
        ("zb-h2", 3),
        *(pytest.param(s, 4, marks=pytest.mark.slow) for s in ("1f1b", "zb-h1", "zb-v")),
    ],
)
def test_nobody_waits_for_a_late_last_stage_with_post_validation(
    schedule: str, pp: int, train: Train
) -> None:
    """Its last W of an iteration begins only when all others have run into the next one.

    If one of them needed something of the last stage for that, none of them would end.
    """
    late = config("late", pp - 1, pp=pp, layers=2 * pp if schedule == "zb-v" else pp)
    result = train(late, schedule, FLAG)
    for rank in result.ranks:
        step = rank["steps"][STEP]
        if step["stage"] == pp - 1:
            assert "run ahead" not in step["events"]
            continue
        order = [step["events"].index(one) for one in ("run ahead", "wait for later stages")]
        assert order == sorted(order)
        # What ran ahead is the beginning of the next batch's log: planned F's, nothing before them.
        executed = [one for one in rank["runtime"][STEP + 1]["executed"] if "F" in one]
        assert executed
    assert (result.directory / f"ahead-{STEP}-0").exists()


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_forward_that_raises_leaves_the_step_complete_with_post_validation(
    stage: int, precision: Any, zygote: Zygote, tmp_path: Path
) -> None:
    """The exception comes out where a synchronous run has it: with the step done and logged."""
    failing = config("raise", stage, pp=3, layers=3, precision=precision)
    runs = {}
    for name, flags in (("expected", (CANONICAL,)), ("actual", (FLAG,))):
        directory = tmp_path / name
        always = ("--pipeline-schedule", "zb-h2", "--zero-bubble-wait-limit", "20")
        runs[name] = zygote.fail(failing, directory, (*always, *flags))
    expected, actual = runs["expected"], runs["actual"]
    assert len(expected.ranks[0]["iterations"]) == STEP + 1
    assert_identical(expected, actual)
    # The others have begun the next iteration in both runs, each as far as it came.
    positions = [run.ranks[stage]["position"] for run in (expected, actual)]
    for name, value in positions[0].items():
        other = positions[1][name]
        assert value.equal(other) if hasattr(value, "equal") else value == other, name
    for run in (expected, actual):
        log = run.logs[stage]
        assert f"ArithmeticError: {MESSAGE}" in log
        assert f"raised on stage {stage}, pass 0F0" in log


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_signal_in_run_ahead_ends_the_job_where_a_synchronous_one_ends(
    stage: int, train: Train, tmp_path: Path
) -> None:
    """With a checkpoint from which both go on alike: under post-validation too."""
    results = []
    for name, flags in (("expected", (CANONICAL,)), ("actual", (FLAG,))):
        saving = ("--save", str(tmp_path / name), "--save-interval", "100", *flags)
        first = train(config("terminate", stage), "zb-h1", "--exit-signal-handler", *saving)
        assert "exiting program after receiving SIGTERM" in first.logs[0]
        second = train(
            Config(dropout=0.1, clip_grad=0.0, iterations=8),
            "zb-h1",
            *("--load", str(tmp_path / name)),
            *flags,
        )
        results.append((first, second))
    (expected, resumed), (actual, again) = results
    # The signal comes in the forwards of the next iteration, after which the job ends.
    assert len(expected.ranks[0]["iterations"]) == STEP + 2
    assert_identical(expected, actual)
    assert_identical(resumed, again)


@pytest.mark.parametrize("schedule", ["zb-h2", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_a_checkpoint_nobody_planned_with_post_validation(schedule: str, train: Train) -> None:
    """Forwards that have run ahead are thrown away and repeated; nothing of them is saved."""
    both = []
    for flag in (CANONICAL, FLAG):
        saved = train(config("save", 0, pp=2), schedule, flag)
        directory = saved.directory / "checkpoint"
        assert (directory / f"iter_{STEP + 1:07d}").is_dir()
        resumed = train(
            Config(dropout=0.1, clip_grad=0.0, iterations=8),
            schedule,
            *("--load", str(directory)),
            flag,
        )
        both.append((saved, resumed))
    assert_identical(both[0][0], both[1][0])
    assert_identical(both[0][1], both[1][1])
    # A run that was interrupted so is one that never was.
    assert_identical(
        both[0][0], train(Config(dropout=0.1, clip_grad=0.0, iterations=8), schedule, CANONICAL)
    )
