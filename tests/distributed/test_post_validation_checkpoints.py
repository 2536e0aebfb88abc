"""Post-validated runs that save, stop and resume go on as synchronous ones that never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.configs import LOSS_SCALE, Config, Spike
from tests.distributed.harness import Result, Zygote, assert_identical
from tests.distributed.validated import FLAG, assert_validated

type Synchronous = Callable[..., Result]

SAVE_AT = 6
LAYERS = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(4)]
CLIPPED = (
    # Two before the checkpoint, of which the first is undone, and one right after it.
    Spike(LAYERS[3], SAVE_AT - 2, 1e4),
    Spike(LAYERS[0], SAVE_AT - 1, 1e8),
    Spike(LAYERS[2], SAVE_AT, 1e3),
    Spike(LAYERS[2], SAVE_AT + 2, 1e4),
)
SKIPPED = tuple(replace(one, factor=math.nan) for one in CLIPPED)
CONFIGS = {
    "fp32": Config(clip_grad=10.0, spikes=CLIPPED, dropout=0.1),
    "bf16-distopt": Config(
        precision="bf16", distributed_optimizer=True, clip_grad=10.0, spikes=CLIPPED, dropout=0.1
    ),
    "fp16": Config(precision="fp16", clip_grad=10.0, spikes=SKIPPED, dropout=0.1, extra=LOSS_SCALE),
}
ROLLBACKS = ("deferred", "snapshot")
DEFAULT = {
    ("zb-h1", "bf16-distopt", "deferred"),
    ("zb-v", "fp16", "deferred"),
}
"""The default tier; the others are slow."""


@pytest.mark.parametrize(
    ("schedule", "name", "rollback"),
    [
        pytest.param(*row, marks=() if row in DEFAULT else pytest.mark.slow)
        for row in (
            (schedule, name, rollback)
            for schedule in ("zb-h1", "zb-h2", "zb-v")
            for name in CONFIGS
            for rollback in ROLLBACKS
        )
    ],
)
def test_resume_of_post_validation(
    schedule: str,
    name: str,
    rollback: str,
    synchronous: Synchronous,
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    config = CONFIGS[name]
    at, checkpoint = str(SAVE_AT), str(tmp_path / "checkpoint")
    flags = ("--pipeline-schedule", schedule, FLAG, "--rollback", rollback)

    def run(part: str, *more: str) -> Result:
        return zygote.train(config, tmp_path / part, (*flags, *more))

    expected = synchronous(config, schedule)
    whole = run("saved", "--save", checkpoint, "--save-interval", at)
    assert_validated(expected, whole)
    # As if it had been stopped at the first checkpoint.
    (Path(checkpoint) / "latest_checkpointed_iteration.txt").write_text(at)
    resumed = run("resumed", "--load", checkpoint)
    assert len(resumed.iterations("lr")) == config.iterations - SAVE_AT
    assert_identical(expected, cut(whole, SAVE_AT).continued(resumed))


def cut(result: Result, iterations: int) -> Result:
    """The run as far as a checkpoint; evaluations are those before it."""
    evaluations = iterations // max(1, result.config.iterations // 2)
    ranks = [
        rank
        | {part: rank[part][:iterations] for part in ("iterations", "finite", "steps")}
        | {"evaluations": rank["evaluations"][:evaluations]}
        for rank in result.ranks
    ]
    return replace(result, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("validated_first", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_post_validation_may_begin_and_end_at_a_checkpoint(
    name: str, validated_first: bool, synchronous: Synchronous, zygote: Zygote, tmp_path: Path
) -> None:
    config, schedule = CONFIGS[name], "zb-h1"
    at, checkpoint = str(SAVE_AT), str(tmp_path / "checkpoint")

    def run(part: str, validated: bool, *more: str) -> Result:
        how = FLAG if validated else "--canonical-grad-norm"
        return zygote.train(config, tmp_path / part, ("--pipeline-schedule", schedule, how, *more))

    saving = ("--save", checkpoint, "--save-interval", at, "--exit-interval", at)
    saved = run("saved", validated_first, *saving)
    resumed = run("resumed", not validated_first, "--load", checkpoint)
    assert_identical(synchronous(config, schedule), saved.continued(resumed))
