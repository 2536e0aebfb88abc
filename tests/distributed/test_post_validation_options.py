"""What else a run may ask for together with post-validation, each like its synchronous run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.distributed import test_options
from tests.distributed.configs import NEVER_CLIPS, Config
from tests.distributed.harness import Result, assert_identical
from tests.distributed.validated import FLAG, assert_validated, outcomes
from zero_bubble.builders import BUILDERS

type Synchronous = Callable[..., Result]
type Train = Callable[..., Result]

ALWAYS = ("--post-validation-window", "0")
ON_HOST = ("--rollback", "snapshot", "--rollback-snapshot-on-host")
SNAPSHOT = ("--rollback", "snapshot")
SGD = ("--optimizer", "sgd", "--lr", "0.1")
OVERLAPPED = ("--overlap-grad-reduce", "--overlap-param-gather")

CLIPS = 1.2
"""Above the toy model's norm in some iterations, and below it in others."""
LINEAR = {
    name: config
    for name, config in test_options.OPTIONS.items()
    if name not in ("loss_scale", "one_microbatch")
} | {
    "tied": Config(tied=True),
    "tied_over_replicas": Config(tied=True, dp=2, distributed_optimizer=True, precision="bf16"),
    "sgd": Config(extra=SGD),
    "sgd_bf16": Config(precision="bf16", extra=SGD),
}
V = {
    "tied": Config(tied=True, precision="bf16"),
    "tied_overlapped": Config(tied=True, dp=2, extra=("--overlap-grad-reduce",)),
    "overlapped_distributed_optimizer": Config(
        dp=2, precision="bf16", distributed_optimizer=True, extra=OVERLAPPED
    ),
    "experts": LINEAR["experts"],
    "layers_that_chunks_do_not_divide": Config(layers=6),
}
DEFAULT = {
    ("zb-h2", "overlapped_distributed_optimizer", ()),
    ("zb-h1", "experts", SNAPSHOT),
    ("zb-h1", "tied", ()),
    ("zb-v", "overlapped_distributed_optimizer", SNAPSHOT),
    ("zb-h1", "sgd_bf16", ()),
}
"""The default tier; the others are slow."""


@pytest.mark.parametrize(
    ("schedule", "name", "flags"),
    [
        pytest.param(
            *(row := (schedule, name, flags)),
            id=f"{schedule}-{name}-{flags[1] if flags else 'deferred'}",
            marks=() if row in DEFAULT else pytest.mark.slow,
        )
        for schedule, names in (("zb-h1", LINEAR), ("zb-h2", LINEAR), ("zb-v", V))
        for name in names
        for flags in ((), SNAPSHOT)
    ],
)
def test_option_with_post_validation(
    schedule: str, name: str, flags: Sequence[str], synchronous: Synchronous, train: Train
) -> None:
    config = replace((V if schedule == "zb-v" else LINEAR)[name], clip_grad=CLIPS)
    expected = synchronous(config, schedule)
    assert_validated(expected, train(config, schedule, FLAG, *ALWAYS, *flags))


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=() if name == "1f1b" else pytest.mark.slow)
        for name in BUILDERS
        if name not in ("zb-h1", "zb-h2", "zb-v")
    ],
)
def test_every_schedule_can_be_post_validated(
    schedule: str, synchronous: Synchronous, train: Train
) -> None:
    config = Config(clip_grad=CLIPS)
    expected = synchronous(config, schedule)
    assert len(set(outcomes(expected))) == 2
    assert_validated(expected, train(config, schedule, FLAG, *ALWAYS))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_copies_on_the_host_of_post_validation(
    schedule: str, synchronous: Synchronous, train: Train
) -> None:
    config = Config(precision="bf16", clip_grad=CLIPS)
    assert_validated(
        synchronous(config, schedule), train(config, schedule, FLAG, *ALWAYS, *ON_HOST)
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_post_validation_in_place_is_exact_where_nothing_is_undone(
    precision: str, synchronous: Synchronous, train: Train
) -> None:
    config = Config(precision=precision, clip_grad=NEVER_CLIPS)  # type: ignore[arg-type]
    expected = synchronous(config, "zb-h1")
    actual = train(config, "zb-h1", FLAG, *ALWAYS, "--rollback", "inplace")
    assert_validated(expected, actual)


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_post_validation_where_the_batch_grows(
    schedule: str, synchronous: Synchronous, train: Train
) -> None:
    """No step runs into a batch of another size."""
    config = Config(batch_sizes="0:2 320:4 800:6", clip_grad=CLIPS)  # in tokens, 32 a sample
    expected = synchronous(config, schedule)
    batches = [len(one["executed"]) for one in expected.ranks[0]["runtime"]]
    before_a_change = [i for i, (now, then) in enumerate(pairwise(batches)) if now != then]
    assert len(before_a_change) == 2
    actual = train(config, schedule, FLAG, *ALWAYS)
    assert_validated(expected, actual, also_synchronous=frozenset(before_a_change))


@pytest.mark.slow
@pytest.mark.parametrize("pp", [1, 2])
def test_the_norm_of_post_validation_is_megatrons_up_to_rounding(
    pp: int,
    reference: Callable[..., Result],
    train: Train,
) -> None:
    """With Megatron's own schedule too, and without a pipeline."""
    config = Config(pp=pp, dp=2, clip_grad=NEVER_CLIPS)
    expected, actual = reference(config), train(config, "megatron", "--canonical-grad-norm")
    for part in ("skipped", "lr", "loss/lm loss"):
        assert expected.iterations(part) == actual.iterations(part)
    norms = expected.iterations("grad_norm"), actual.iterations("grad_norm")
    assert norms[1] == pytest.approx(norms[0], rel=2.0**-23, abs=0.0)
    for before, after in zip(expected.ranks, actual.ranks, strict=True):
        without_norm = [
            replace(expected, ranks=[rank | {"iterations": []}]) for rank in (before, after)
        ]
        assert_identical(*without_norm)
