"""Whatever happens while a stage runs ahead, the job is as one that never did."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import Config, Spike
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


def test_a_rank_that_fails_alone_takes_its_peers_along_with_post_validation(
    zygote: Zygote, tmp_path: Path
) -> None:
    """They wait for it within the same forward: nobody waits until the limit, and it says why."""
    alone = config("raise-alone", 0, pp=3, tp=2, layers=3)
    flags = ("--pipeline-schedule", "zb-h2", "--zero-bubble-wait-limit", "60", FLAG)
    failed = zygote.fail(alone, tmp_path, flags)
    assert f"ArithmeticError: {MESSAGE}" in failed.logs[0]
    for log in failed.logs[1:]:
        assert "waited 60 s" not in log


def test_a_constant_loss_scale_hides_nothing_with_post_validation(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Megatron's check for NaN and Inf is off under a dynamic loss scale only."""
    spike = Spike("decoder.layers.3.mlp.linear_fc1.weight", STEP, math.inf)
    scaled = Config(precision="bf16", spikes=(spike,), extra=("--loss-scale", "128"))
    failed = zygote.fail(scaled, tmp_path, ("--pipeline-schedule", "zb-h1", FLAG))
    for log in failed.logs:
        assert "gradients of ranks 1 is not finite" in log.rstrip().splitlines()[-1]


def test_all_ranks_end_by_one_error_though_one_is_slow_to_run_ahead_with_post_validation(
    zygote: Zygote, tmp_path: Path
) -> None:
    """What it sends then, nobody wants; those that are done receive it all the same."""
    spike = Spike("decoder.layers.1.mlp.linear_fc1.weight", 2, math.nan)
    slow = Config(pp=3, layers=3, spikes=(spike,), happening="slow:0:0")
    failed = zygote.fail(slow, tmp_path, ("--pipeline-schedule", "zb-h2", FLAG))
    for log in failed.logs:
        error = log.rstrip().splitlines()[-1]
        assert error.startswith("RuntimeError: iteration 3: Unexpected result"), error


PLACED = {
    "format": "zero-bubble schedule",
    "version": 1,
    "name": "crossed",
    "placement": [[0, 7], [1, 3], [2, 5], [4, 6]],
    "num_microbatches": 4,
    "passes": [
        "0F0 0F1 0F2 0F3 1F0 1I0 1F1 1I1 1W0 1W1 0I0 1F2 "
        "1I2 1F3 0I1 1I3 0W0 0W1 1W2 0I2 0W2 1W3 0I3 0W3",
        "0F0 0F1 1F0 1F1 0F2 0F3 1F2 1F3 1I0 1W0 0I0 0W0 "
        "1I1 1W1 0I1 0W1 1I2 1W2 0I2 0W2 1I3 1W3 0I3 0W3",
        "0F0 0F1 1F0 1F1 0F2 0F3 1I0 1F2 1W0 0I0 1I1 1F3 "
        "0W0 0I1 1W1 1I2 0W1 1W2 0I2 1I3 0W2 1W3 0I3 0W3",
        "0F0 0F1 1F0 1F1 1I0 0F2 0I0 1I1 0F3 1F2 0I1 1F3 "
        "1W0 1I2 0W0 0I2 1I3 1W1 0W1 0I3 1W2 0W2 1W3 0W3",
    ],
}
"""Stage 2 sends to stage 1 what is not stage 1's to run ahead with."""


def test_some_stages_undo_a_step_that_others_never_took_under_post_validation(
    train: Train, tmp_path: Path
) -> None:
    path = tmp_path / "crossed.json"
    path.write_text(json.dumps(PLACED))
    spike = Spike("decoder.layers.2.mlp.linear_fc1.weight", 4, 1e4)
    spiked = Config(pp=4, layers=8, microbatches=4, iterations=8, clip_grad=10.0, spikes=(spike,))
    expected, actual = (train(spiked, str(path), flag) for flag in (CANONICAL, FLAG))
    assert_identical(expected, actual)
    assert [rank["steps"][4]["optimistic"] for rank in actual.ranks].count(True) == 2


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
