"""What else a training run may ask of its schedule, each compared with Megatron's own 1F1B."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from tests.distributed.configs import Config
from tests.distributed.harness import Result, assert_identical
from tests.distributed.observations import check_runtime
from zero_bubble.builders import build

ONE_LAYER_EACH = ("--recompute-granularity", "full", "--recompute-method", "uniform",
                  "--recompute-num-layers", "1")  # fmt: skip
MODERN = ("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm",
          "--position-embedding-type", "rope", "--no-rope-fusion",
          "--group-query-attention", "--num-query-groups", "2")  # fmt: skip

OPTIONS = {
    # The scale starts so high that the first steps overflow and are skipped.
    "loss_scale": Config(precision="fp16", extra=("--initial-loss-scale", str(2.0**18))),
    "per_token_loss": Config(extra=("--calculate-per-token-loss",)),
    "fewer_microbatches_than_stages": Config(pp=4, microbatches=3),
    "one_microbatch": Config(microbatches=1),
    "overlapped_gradient_reduction": Config(dp=2, extra=("--overlap-grad-reduce",)),
    "overlapped_unaligned_gradient_reduction": Config(
        dp=2, extra=("--overlap-grad-reduce", "--no-align-grad-reduce")
    ),
    "overlapped_distributed_optimizer": Config(
        dp=2,
        precision="bf16",
        distributed_optimizer=True,
        extra=("--overlap-grad-reduce", "--overlap-param-gather"),
    ),
    "sequence_parallelism": Config(tp=2, extra=("--sequence-parallel",)),
    "recomputation": Config(dropout=0.1, extra=ONE_LAYER_EACH),
    "modern_layers": Config(extra=MODERN),
    "experts": Config(
        extra=(
            "--num-experts",
            "4",
            "--moe-router-topk",
            "2",
            "--moe-token-dispatcher-type",
            "allgather",
            "--swiglu",
            "--disable-bias-linear",
        )
    ),
    "stage_without_layers": Config(extra=("--pipeline-model-parallel-layout", "E|ttttL")),
    "stage_without_parameters": Config(
        pp=3, microbatches=4, extra=("--pipeline-model-parallel-layout", "Ett||ttL")
    ),
    "uneven_stages": Config(extra=("--pipeline-model-parallel-layout", "Et|tttL")),
}
SCHEDULES = ("zb-h1", "zb-h2")
DEFAULT = (
    "loss_scale",
    "per_token_loss",
    "fewer_microbatches_than_stages",
    "overlapped_distributed_optimizer",
    "overlapped_unaligned_gradient_reduction",
    "sequence_parallelism",
    "recomputation",
    "modern_layers",
    "experts",
    "stage_without_parameters",
)


def _parameters() -> list[object]:
    """Default tier: every option of DEFAULT under one of the two schedules, by turns."""
    quick = set(zip(DEFAULT, itertools.cycle(SCHEDULES), strict=False))
    return [
        pytest.param(
            name,
            schedule,
            id=f"{name}-{schedule}",
            marks=() if (name, schedule) in quick else pytest.mark.slow,
        )
        for name in OPTIONS
        for schedule in SCHEDULES
    ]


@pytest.mark.parametrize(("name", "schedule"), _parameters())
def test_option(
    name: str,
    schedule: str,
    reference: Callable[[Config], Result],
    train: Callable[..., Result],
) -> None:
    config = OPTIONS[name]
    expected, actual = reference(config), train(config, schedule)
    assert_identical(expected, actual)
    check_runtime(actual, build(schedule, config.pp, config.num_microbatches))


def test_loss_scale_skips_steps(reference: Callable[[Config], Result]) -> None:
    """The scaled runs above do overflow, and recover."""
    skipped = reference(OPTIONS["loss_scale"]).iterations("skipped")
    assert 0 < sum(skipped) < len(skipped)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_batch_size_ramp_up(
    schedule: str, reference: Callable[[Config], Result], train: Callable[..., Result]
) -> None:
    """Every number of microbatches gets its own program."""
    config = Config(batch_sizes="0:2 320:4 800:6")  # thresholds in tokens, 32 a sample
    expected, actual = reference(config), train(config, schedule)
    assert_identical(expected, actual)
    programs = {len(batch["executed"]) for batch in actual.ranks[0]["runtime"]}
    assert len(programs) == 3
