"""Gradients that explode: post-validation undoes what came before, and nothing of them remains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import Config, Spike
from tests.distributed.harness import Result, Zygote, assert_identical
from tests.distributed.validated import FLAG, STEP, assert_validated, rolled_back

type Synchronous = Callable[..., Result]
type Train = Callable[..., Result]

STAGES = 3
FIRST, MIDDLE, LAST = range(STAGES)
SIZES = (1e3, 1e4, 1e8)
SCALED = ("--initial-loss-scale", str(2**14), "--hysteresis", "1")
ALWAYS = ("--post-validation-window", "0")


def layer_of(stage: int, schedule: str) -> int:
    """A layer that the stage holds, of as many as there are chunks."""
    return {FIRST: 0, MIDDLE: 4, LAST: 2}[stage] if schedule == "zb-v" else stage


def spike(stage: int, schedule: str, iteration: int, factor: float) -> Spike:
    name = f"decoder.layers.{layer_of(stage, schedule)}.mlp.linear_fc1.weight"
    return Spike(name, iteration, factor)


# (iteration, stage, factor): each size on each stage; alone, and several in a row. Iteration 7 is
# followed by an evaluation, 15 is the last one: both step synchronously.
FINITE = (
    (1, LAST, 1e3), (2, FIRST, 1e4), (3, MIDDLE, 1e8), (5, LAST, 1e8), (7, MIDDLE, 1e4),
    (8, FIRST, 1e3), (9, LAST, 1e4), (10, LAST, 1e4), (12, FIRST, 1e8), (14, MIDDLE, 1e3),
)  # fmt: skip
SKIPPED = (
    (1, LAST, math.inf), (2, FIRST, math.nan), (3, MIDDLE, math.inf), (5, LAST, math.nan),
    (7, MIDDLE, math.nan), (8, FIRST, math.inf), (9, LAST, 1e4), (10, LAST, -math.inf),
    (12, FIRST, 1e8), (14, MIDDLE, 1e3),
)  # fmt: skip
SYNCHRONOUS = (0, 7, 15)


def spiked(schedule: str, precision: Any, distributed_optimizer: bool) -> Config:
    which = SKIPPED if precision == "fp16" else FINITE
    return Config(
        precision=precision,
        distributed_optimizer=distributed_optimizer,
        pp=STAGES,
        layers=2 * STAGES if schedule == "zb-v" else STAGES,
        microbatches=4,
        iterations=16,
        clip_grad=10.0,  # above every norm but those of the spikes
        spikes=tuple(spike(stage, schedule, when, factor) for when, stage, factor in which),
        extra=SCALED if precision == "fp16" else (),
    )


DEFAULT = {
    ("zb-h2", "bf16", True, "deferred"),
    ("zb-v", "fp16", False, "deferred"),
}
"""The default tier; the others are slow."""


@pytest.mark.parametrize(
    ("schedule", "precision", "distributed_optimizer", "rollback"),
    [
        pytest.param(
            *(row := (schedule, precision, distributed_optimizer, rollback)),
            marks=() if row in DEFAULT else pytest.mark.slow,
        )
        for schedule in ("zb-h1", "zb-h2", "zb-v")
        for precision in ("fp32", "bf16", "fp16")
        for distributed_optimizer in (False, True)
        for rollback in ("deferred", "snapshot")
    ],
)
def test_spikes_under_post_validation(
    schedule: str,
    precision: str,
    distributed_optimizer: bool,
    rollback: str,
    synchronous: Synchronous,
    train: Train,
) -> None:
    config = spiked(schedule, precision, distributed_optimizer)
    expected = synchronous(config, schedule)
    actual = train(config, schedule, FLAG, "--rollback", rollback, *ALWAYS)
    assert_validated(expected, actual)
    which = SKIPPED if precision == "fp16" else FINITE
    assert_undone_before(actual, which)


def assert_undone_before(actual: Result, which: Sequence[tuple[int, int, float]]) -> None:
    """Stages before the spike have stepped and take it back; it and those after it know better."""
    steps = [one["verdict"] for one in actual.ranks[0]["steps"]]
    assert {index for index, verdict in enumerate(steps) if verdict != STEP} == {
        when for when, _, _ in which
    }
    assert rolled_back(actual) == {
        stage: [when for when, at, _ in which if at > stage and when not in SYNCHRONOUS]
        for stage in range(STAGES)
    }


@pytest.mark.parametrize("rollback", ["deferred", pytest.param("snapshot", marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", ["zb-h2", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_a_spike_in_one_replicas_shard_under_post_validation(
    schedule: str, rollback: str, synchronous: Synchronous, train: Train
) -> None:
    """A distributed optimizer has the first value of a gradient on one data-parallel rank only."""
    names = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 1, 2, 3)]
    config = Config(
        precision="fp16",
        distributed_optimizer=True,
        dp=2,
        iterations=10,
        clip_grad=10.0,
        spikes=(
            Spike(names[3], 1, math.inf),
            Spike(names[2], 3, math.nan),
            Spike(names[1], 5, math.inf),
            Spike(names[0], 6, math.nan),
        ),
        extra=(*SCALED, "--overlap-grad-reduce", "--overlap-param-gather"),
    )
    expected = synchronous(config, schedule)
    assert [i for i, skip in enumerate(expected.iterations("skipped")) if skip] == [1, 3, 5, 6]
    actual = train(config, schedule, FLAG, "--rollback", rollback, *ALWAYS)
    assert_validated(expected, actual)
    assert rolled_back(actual)[0]


# Without a loss scale there is no way to go on.
ENDS = {
    "nan_last": (LAST, math.nan, 2),
    "inf_first": (FIRST, math.inf, 2),
    "nan_middle": (MIDDLE, math.nan, 4),
    "inf_last": (LAST, math.inf, 6),
    "nan_first_synchronous": (FIRST, math.nan, 5),
    "inf_last_synchronous": (LAST, math.inf, 5),
}
ENDS_DEFAULT = {
    ("nan_last", "zb-h1", "fp32", False, "deferred"),
    ("inf_first", "zb-v", "bf16", True, "snapshot"),
}


@pytest.mark.parametrize(
    ("name", "schedule", "precision", "distributed_optimizer", "rollback"),
    [
        pytest.param(
            *(end := (name, schedule, precision, distributed_optimizer, rollback)),
            marks=() if end in ENDS_DEFAULT else pytest.mark.slow,
        )
        for name in ENDS
        for schedule, precision, distributed_optimizer, rollback in (
            ("zb-h1", "fp32", False, "deferred"),
            ("zb-h1", "fp32", True, "snapshot"),
            ("zb-h2", "bf16", False, "deferred"),
            ("zb-v", "bf16", True, "snapshot"),
            ("zb-v", "bf16", True, "deferred"),
        )
    ],
)
def test_without_a_loss_scale_every_rank_ends_under_post_validation(
    name: str,
    schedule: str,
    precision: Any,
    distributed_optimizer: bool,
    rollback: str,
    train: Train,
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    """With the same error, and with parameters and optimizer as they were before the step."""
    stage, value, iteration = ENDS[name]
    config = Config(
        precision=precision,
        distributed_optimizer=distributed_optimizer,
        pp=STAGES,
        layers=2 * STAGES if schedule == "zb-v" else STAGES,
        microbatches=4,
    )
    flags = ("--pipeline-schedule", schedule, FLAG, "--rollback", rollback)
    broken = replace(config, spikes=(spike(stage, schedule, iteration, value),))
    failed = zygote.fail(broken, tmp_path / "failed", flags)
    before = train(config, schedule, "--canonical-grad-norm", "--exit-interval", str(iteration))
    assert_identical(before, failed)
    where = [rank["steps"][0]["stage"] for rank in failed.ranks].index(stage)
    for rank, log in enumerate(failed.logs):
        error = log.rstrip().splitlines()[-1]
        assert error.startswith(f"RuntimeError: iteration {iteration + 1}: Unexpected"), rank
        assert f"the norm of the gradients of ranks {where} is not finite" in error, (rank, error)


def test_a_first_step_that_is_not_finite_under_post_validation(
    zygote: Zygote, tmp_path: Path
) -> None:
    """Which is a synchronous step."""
    config = Config(spikes=(Spike("decoder.layers.3.mlp.linear_fc1.weight", 0, math.nan),))
    failed = zygote.fail(config, tmp_path, ("--pipeline-schedule", "zb-h1", FLAG))
    for rank, record in zip(failed.logs, failed.ranks, strict=True):
        assert "is not finite" in rank.rstrip().splitlines()[-1]
        values = [value for name, value in record["state"].items() if name.startswith("model")]
        assert values
        assert all(bool(value.isfinite().all()) for value in values)
