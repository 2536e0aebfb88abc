"""What people turn on, under every schedule: each promise of the registry, compared with
Megatron's own 1F1B under the same flags.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed.configs import NEVER_CLIPS, Config
from tests.distributed.feature import Feature, Kind
from tests.distributed.features import DEFAULT, FEATURES, cases
from tests.distributed.harness import (
    Result,
    TrainingFailed,
    assert_identical,
    assert_identical_model,
)
from tests.distributed.observations import check_runtime
from tests.distributed.validated import assert_validated
from zero_bubble.builders import build
from zero_bubble.builders.recomputing import with_recomputation

type Reference = Callable[[Config], Result]
type Start = Callable[[Config], Config]
type Synchronous = Callable[[Config, str], Result]
type Train = Callable[..., Result]

AUTO = (
    *("--zero-bubble-profile-iters", "2:3", "--zero-bubble-wait-for-search"),
    *("--zero-bubble-effort", "quick", "--zero-bubble-drift-interval", "0"),
    *("--zero-bubble-memory-limit", "2p"),
)
"""Measures two iterations, and goes over before the sixth if it finds a better schedule."""


def _parameters(*kinds: Kind, validated: bool = False) -> list[object]:
    return [
        pytest.param(
            name,
            schedule,
            id=f"{name}-{schedule.replace('-', '_')}",
            marks=() if (name, schedule) in DEFAULT else pytest.mark.slow,
        )
        for name, schedule in cases()
        if FEATURES[name].promise(schedule).kind in kinds and FEATURES[name].validated == validated
    ]


def _flags(feature: Feature, schedule: str, cache: Path) -> tuple[str, ...]:
    flags = feature.flags(schedule)
    return (*flags, *AUTO, "--zero-bubble-cache", str(cache)) if schedule == "auto" else flags


def _check_ran(result: Result, feature: Feature, schedule: str) -> None:
    """The schedule's own programs, on all ranks alike."""
    config = result.config
    if schedule != "auto":
        expected = build(schedule, config.pp, config.num_microbatches)
        if feature.recomputes_in_passes:
            expected = with_recomputation(expected)
        check_runtime(result, expected)
        return
    names = [[batch["schedule"] for batch in rank["runtime"]] for rank in result.ranks]
    assert names == [names[0]] * len(names), "ranks ran different schedules"
    assert set(names[0][:5]) == {"zb-h1"}
    switched = len(set(names[0])) > 1
    assert switched or "goes on" in result.logs[0], "neither a switch nor a reason for none"


@pytest.mark.parametrize(("name", "schedule"), _parameters("identical", "tolerance"))
def test_features_keep_the_bits_of_1f1b(
    name: str,
    schedule: str,
    reference: Reference,
    from_one_start: Start,
    train: Train,
    tmp_path: Path,
) -> None:
    """Of a V as a model, since other ranks hold the layers; with clipping, up to rounding."""
    feature = FEATURES[name]
    config = feature.config_for(schedule)
    if schedule == "zb-v":
        config = from_one_start(config)
        assert config.clips == (feature.promise(schedule).kind == "tolerance")
    actual = train(config, schedule, *_flags(feature, schedule, tmp_path))
    compare = assert_identical_model if schedule == "zb-v" else assert_identical
    compare(reference(config), actual)
    _check_ran(actual, feature, schedule)


@pytest.mark.parametrize(("name", "schedule"), _parameters("identical", validated=True))
def test_features_with_post_validation(
    name: str,
    schedule: str,
    reference: Reference,
    synchronous: Synchronous,
    train: Train,
    tmp_path: Path,
) -> None:
    """Bit for bit the synchronous run, and that is compared with Megatron elsewhere.

    What is measured first differs from run to run: such a schedule is compared with Megatron, which
    adds the norm in another order, without clipping.
    """
    feature = FEATURES[name]
    config = replace(feature.config, layers=4)
    flags = _flags(feature, schedule, tmp_path)
    if schedule == "auto":
        config = replace(config, clip_grad=NEVER_CLIPS)
        actual = train(config, schedule, *flags)
        assert_identical_model(reference(config), actual)
        _check_ran(actual, feature, schedule)
    else:
        assert_validated(synchronous(config, schedule), train(config, schedule, *flags))


@pytest.mark.parametrize(("name", "schedule"), _parameters("rejected"))
def test_features_that_are_rejected(name: str, schedule: str, train: Train, tmp_path: Path) -> None:
    """By a message with the flag and a remedy, before anything runs."""
    feature = FEATURES[name]
    promise = feature.promise(schedule)
    with pytest.raises(TrainingFailed) as caught:
        train(
            feature.config_for(schedule), schedule, *_flags(feature, schedule, tmp_path), limit_s=60
        )
    said = [line for line in str(caught.value).splitlines() if "zero-bubble: error: " in line]
    assert "exit code 2" in str(caught.value)
    assert len(said) == 1
    assert promise.flag in said[0]
    assert promise.why in said[0]


def test_features_loss_scale_skips_steps(reference: Reference) -> None:
    """The scaled runs above do overflow, and recover."""
    skipped = reference(FEATURES["fp16"].config).iterations("skipped")
    assert 0 < sum(skipped) < len(skipped)


@pytest.mark.slow
def test_features_context_parallelism_is_that_of_the_whole_sequence(
    reference: Reference, from_one_start: Start
) -> None:
    """The stand-in for attention over parts of a sequence, by Megatron's own over all of it."""
    parts = from_one_start(replace(FEATURES["context"].config, clip_grad=0.0))
    whole = replace(parts, cp=1)
    assert parts.cp == 2
    for name in ("loss/lm loss", "grad_norm"):
        expected, actual = (
            torch.stack([torch.as_tensor(one) for one in reference(config).iterations(name)])
            for config in (whole, parts)
        )
        assert torch.allclose(expected, actual, rtol=1e-4, atol=0.0), (name, expected, actual)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_features_batch_size_ramp_up(schedule: str, reference: Reference, train: Train) -> None:
    """Every number of microbatches gets its own program."""
    config = Config(batch_sizes="0:2 320:4 800:6")  # thresholds in tokens, 32 a sample
    expected, actual = reference(config), train(config, schedule)
    assert_identical(expected, actual)
    programs = {len(batch["executed"]) for batch in actual.ranks[0]["runtime"]}
    assert len(programs) == 3
