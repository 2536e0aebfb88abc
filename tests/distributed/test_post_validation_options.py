"""Post-validation with what people turn on: bit for bit the synchronous run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.configs import Config
from tests.distributed.features import FEATURES
from tests.distributed.harness import Result
from tests.distributed.validated import FLAG, assert_validated

type Synchronous = Callable[[Config, str], Result]
type Train = Callable[..., Result]

EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0.01"),
    *("--swiglu", "--disable-bias-linear", "--expert-model-parallel-size", "2"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
OF_ANY_RUN = {
    name: FEATURES[name].config
    for name in (
        *("fp16", "few_microbatches", "one_microbatch", "overlap", "overlap_unaligned"),
        *("overlap_gather", "sequence", "recompute_uniform", "modern", "experts_allgather"),
        *("context", "mtp", "stage_without_layers", "stage_without_parameters", "uneven_stages"),
    )
} | {"per_token_loss": Config(extra=("--calculate-per-token-loss",))}
OWN = {
    "tied": Config(pp=3, layers=3, tied=True),
    "tied_replicas": Config(dp=2, tied=True, extra=("--overlap-grad-reduce",)),
    "tied_shards": Config(
        dp=3, microbatches=4, tied=True, precision="bf16", distributed_optimizer=True, extra=OVERLAP
    ),
    "tied_tokens": Config(dp=2, tied=True, extra=("--calculate-per-token-loss",)),
    "split_experts": Config(dp=2, extra=EXPERTS),
    "sharded_experts": Config(dp=2, precision="bf16", distributed_optimizer=True, extra=EXPERTS),
    "sgd": Config(extra=("--optimizer", "sgd")),
    "growing_batch": Config(batch_sizes="0:2 192:4", extra=("--log-interval", "2")),
    "skipped_iteration": Config(extra=("--iterations-to-skip", "5")),
}
OPTIONS = {
    name: replace(config, iterations=10, clip_grad=1.2)
    for name, config in (*OF_ANY_RUN.items(), *OWN.items())
}
DEFAULT = {
    ("tied", "zb-h2"),
    ("tied_replicas", "1f1b"),
    ("tied_tokens", "zb-v"),
    ("sequence", "zb-h2"),
    ("sgd", "interleaved"),
    ("growing_batch", "zb-h2"),
}
"""The default tier; the others are slow."""
ONE_CHUNK = (
    "stage_without_layers",
    "stage_without_parameters",
    "uneven_stages",
    "skipped_iteration",
)
"""Their layouts are for one chunk a stage, and so is Megatron's way to skip an iteration."""


def _cases() -> list[object]:
    rows = [
        *((name, schedule) for name in OPTIONS for schedule in ("zb-h1", "zb-v")),
        *DEFAULT,
    ]
    return [
        pytest.param(name, schedule, marks=() if (name, schedule) in DEFAULT else pytest.mark.slow)
        for name, schedule in dict.fromkeys(rows)
        if not (schedule == "zb-v" and name in ONE_CHUNK)
    ]


@pytest.mark.parametrize(("name", "schedule"), _cases())
def test_an_option_with_post_validation(
    name: str, schedule: str, synchronous: Synchronous, train: Train
) -> None:
    config = OPTIONS[name]
    if schedule in ("zb-v", "interleaved"):
        config = replace(config, layers=max(config.layers, 2 * config.pp))
    expected = synchronous(config, schedule)
    actual = train(config, schedule, FLAG, "--post-validation-window", "0")
    if name in ("growing_batch", "skipped_iteration"):
        # More iterations than usual step synchronously; only that some do not is said here.
        from tests.distributed.harness import assert_identical

        assert_identical(expected, actual)
        assert {step["synchronous"] for step in actual.ranks[0]["steps"]} == {True, False}
    else:
        assert_validated(expected, actual)
