"""With post-validation every schedule trains to the bits of its own synchronous run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.configs import NEVER_CLIPS, Config, Spike, ValidatedCase, validated_cases
from tests.distributed.harness import Result, assert_identical_model
from tests.distributed.observations import check_runtime
from tests.distributed.validated import (
    CLIP,
    FLAG,
    SKIP,
    STEP,
    assert_validated,
    outcomes,
    rolled_back,
)
from zero_bubble.builders import build

type Synchronous = Callable[..., Result]
type Train = Callable[..., Result]

ALWAYS = ("--post-validation-window", "0")
"""However often steps clip, they are optimistic."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if default else pytest.mark.slow)
        for case, default in validated_cases()
    ],
)
def test_post_validation_is_a_synchronous_run(
    case: ValidatedCase, synchronous: Synchronous, train: Train
) -> None:
    config = case.config
    expected = synchronous(config, case.schedule)
    actual = train(config, case.schedule, FLAG, "--rollback", case.rollback, *ALWAYS)
    assert_validated(expected, actual)
    schedule = build(case.schedule, config.pp, config.num_microbatches)
    check_runtime(actual, schedule, runs_ahead=True)
    # The comparison is one of all that can happen.
    happened = Counter(outcomes(expected))
    assert config.iterations / 6 <= happened[CLIP] <= config.iterations / 2
    assert happened[STEP] >= config.iterations / 3
    assert (happened[SKIP] > 0) == (config.precision == "fp16")
    assert any(rolled_back(actual).values())


SPIKES = tuple(
    Spike(f"decoder.layers.{layer}.mlp.linear_fc1.weight", iteration, value)
    for layer, iteration, value in ((3, 7, math.inf), (0, 8, math.nan), (2, 20, math.nan))
)
UNCLIPPED = {
    name: (case, default)
    for name, case, default in (
        ("zb_h1", ValidatedCase.of("zb-h1", "deferred", "pp2", "fp32"), False),
        ("zb_h2", ValidatedCase.of("zb-h2", "deferred", "pp4", "bf16"), False),
        ("zb_h1_dp", ValidatedCase.of("zb-h1", "snapshot", "pp2-dp2", "bf16",
                                      distributed_optimizer=True), False),
        ("zb_h2_skips", ValidatedCase.of("zb-h2", "deferred", "pp2", "fp16", dropout=0.1,
                                         spikes=SPIKES), True),
        ("zb_v", ValidatedCase.of("zb-v", "deferred", "pp2", "bf16",
                                  distributed_optimizer=True), True),
        ("zb_v_pp4", ValidatedCase.of("zb-v", "snapshot", "pp4", "fp32"), False),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if default else pytest.mark.slow)
        for name, (case, default) in UNCLIPPED.items()
    ],
)
def test_post_validation_is_megatrons_own_run_where_nothing_clips(
    case: ValidatedCase,
    reference: Callable[..., Result],
    from_one_start: Callable[[Config], Config],
    train: Train,
) -> None:
    """But for the last bit of the norm, which Megatron sums in another order."""
    config = from_one_start(replace(case.config, clip_grad=NEVER_CLIPS))
    expected = reference(config)
    actual = train(config, case.schedule, FLAG, "--rollback", case.rollback, *ALWAYS)
    assert_identical_model(expected, actual)
    verdicts = Counter(one["verdict"] for one in actual.ranks[0]["steps"])
    assert verdicts == Counter(outcomes(expected))
    assert verdicts[CLIP] == 0
    assert verdicts[SKIP] >= len(config.spikes)
    assert actual.ranks[0]["counts"]["committed"] >= 18
