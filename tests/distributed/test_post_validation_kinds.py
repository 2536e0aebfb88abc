"""Every schedule, every kind of rollback, and the norm of post-validation by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.configs import NEVER_CLIPS, Config
from tests.distributed.harness import Result, differences
from tests.distributed.validated import CLIP, FLAG, STEP, assert_validated, outcomes
from zero_bubble.builders import BUILDERS

type Synchronous = Callable[[Config, str], Result]
type Train = Callable[..., Result]

ALWAYS = ("--post-validation-window", "0")
CLIPS = 1.2
"""Above the toy model's norm in some iterations, and below it in others."""


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name == "v-half" else pytest.mark.slow)
        for name in BUILDERS
        if name not in ("zb-h1", "zb-h2", "zb-v")
    ],
)
def test_every_schedule_can_be_post_validated(
    schedule: str, synchronous: Synchronous, train: Train
) -> None:
    config = Config(clip_grad=CLIPS, dropout=0.1)
    expected = synchronous(config, schedule)
    assert set(outcomes(expected)) == {STEP, CLIP}
    assert_validated(expected, train(config, schedule, FLAG, *ALWAYS))


KINDS = {
    "snapshot_on_host": ("--rollback", "snapshot", "--rollback-snapshot-on-host"),
    "snapshot": ("--rollback", "snapshot"),
    "deferred": ("--rollback", "deferred"),
}
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
STATES = {
    "sgd": Config(precision="bf16", extra=("--optimizer", "sgd")),
    "sgd_fp32": Config(extra=("--optimizer", "sgd")),
    "sharded": Config(precision="bf16", distributed_optimizer=True, dp=2, extra=OVERLAP),
    "sharded_fp32": Config(distributed_optimizer=True, dp=2, extra=OVERLAP),
}
DEFAULT = {("snapshot_on_host", "sgd"), ("snapshot", "sharded")}


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        pytest.param(kind, state, marks=() if (kind, state) in DEFAULT else pytest.mark.slow)
        for kind in KINDS
        for state in STATES
    ],
)
def test_a_kind_of_rollback_of_post_validation(
    kind: str, state: str, synchronous: Synchronous, train: Train
) -> None:
    config = replace(STATES[state], clip_grad=CLIPS)
    expected = synchronous(config, "zb-h1")
    assert_validated(expected, train(config, "zb-h1", FLAG, *ALWAYS, *KINDS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_post_validation_in_place_is_exact_where_nothing_is_undone(
    precision: str, sharded: bool, synchronous: Synchronous, train: Train
) -> None:
    config = Config(
        precision=precision,  # type: ignore[arg-type]
        distributed_optimizer=sharded,
        dp=2 if sharded else 1,
        clip_grad=NEVER_CLIPS,
    )
    expected = synchronous(config, "zb-h1")
    actual = train(config, "zb-h1", FLAG, *ALWAYS, "--rollback", "inplace")
    assert_validated(expected, actual)


@pytest.mark.parametrize(
    ("schedule", "config"),
    [
        pytest.param("megatron", Config(pp=1, dp=2), id="no_pipeline"),
        pytest.param("megatron", Config(pp=2, tp=2), id="megatrons", marks=pytest.mark.slow),
        pytest.param("zb-h2", Config(pp=4), id="zb_h2", marks=pytest.mark.slow),
    ],
)
def test_the_norm_of_post_validation_is_megatrons_but_for_the_last_bit(
    schedule: str, config: Config, reference: Callable[[Config], Result], train: Train
) -> None:
    """Where nothing clips, nothing else is different."""
    config = replace(config, clip_grad=NEVER_CLIPS)
    expected, actual = reference(config), train(config, schedule, "--canonical-grad-norm")
    for before, after in zip(expected.ranks, actual.ranks, strict=True):
        for left, right in zip(before["iterations"], after["iterations"], strict=True):
            # The norms are no tensors: one unit in the last place of fp32 is at most 2^-23 of it.
            assert right["grad_norm"] == pytest.approx(left["grad_norm"], rel=2.0**-23, abs=0.0)
            right["grad_norm"] = left["grad_norm"]
    assert list(differences(expected, actual)) == []
