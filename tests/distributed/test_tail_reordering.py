"""The last W's run by parameter: the bits stay Megatron's, and reductions begin earlier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import NEVER_CLIPS, Config
from tests.distributed.harness import Result, assert_identical, assert_identical_model
from tests.distributed.observations import check_runtime
from tests.distributed.validated import assert_validated
from zero_bubble.builders import build

type Reference = Callable[[Config], Result]
type Train = Callable[..., Result]
type Batch = dict[str, Any]
"""See `watch.RuntimeWatch`."""

LEFT = "--no-zero-bubble-reorder-tail"
BUCKETS = "--zero-bubble-bucket-all-stages"
"""With two data-parallel ranks the sums have the same bits, however gradients are cut."""
OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "4096")
PLAIN = Config(dp=2, iterations=4, extra=OVERLAP)
SHARDED = Config(
    dp=2,
    iterations=4,
    precision="bf16",
    distributed_optimizer=True,
    clip_grad=0.0,  # what a rank adds to the norm depends on the buckets
    extra=(*OVERLAP, "--overlap-param-gather"),
)
CONFIGS = {"all_reduce": PLAIN, "distributed_optimizer": SHARDED}


def _cases() -> list[object]:
    found: list[object] = []
    for name in CONFIGS:
        for schedule in ("zb-h1", "zb-h2"):
            default = (name, schedule) == ("all_reduce", "zb-h2")
            marks = () if default else pytest.mark.slow
            found.append(pytest.param(name, schedule, marks=marks))
    return found


@pytest.mark.parametrize(("name", "schedule"), _cases())
def test_bits_stay_and_reductions_begin_earlier(
    name: str, schedule: str, reference: Reference, train: Train
) -> None:
    config = CONFIGS[name]
    actual = train(config, schedule, BUCKETS)
    compare = assert_identical_model if config.distributed_optimizer else assert_identical
    compare(reference(config), actual)
    check_runtime(actual, build(schedule, config.pp, config.num_microbatches))
    assert_by_parameter(actual)


@pytest.mark.slow
def test_bits_stay_with_the_tail_as_it_is(reference: Reference, train: Train) -> None:
    """The flag does switch it off, and what `assert_by_parameter` asserts is then not so."""
    actual = train(PLAIN, "zb-h2", BUCKETS, LEFT)
    assert_identical(reference(PLAIN), actual)
    with pytest.raises(AssertionError, match="no share"):
        assert_by_parameter(actual)
    for batch in batches(actual, stage=1):
        last = PLAIN.num_microbatches - 1
        assert not reductions(batch, f"0I{last}", f"0W{last - 1}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_stay_with_a_v(
    name: str,
    reference: Reference,
    from_one_start: Callable[[Config], Config],
    train: Train,
) -> None:
    config = from_one_start(
        Config(
            dp=2,
            iterations=4,
            clip_grad=0.0,
            precision=CONFIGS[name].precision,
            distributed_optimizer=CONFIGS[name].distributed_optimizer,
            extra=CONFIGS[name].extra,
        )
    )
    actual = train(config, "zb-v", BUCKETS)
    assert_identical_model(reference(config), actual)
    check_runtime(actual, build("zb-v", config.pp, config.num_microbatches))
    assert any("/" in one for batch in batches(actual, stage=1) for one in batch["executed"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v"])
@pytest.mark.parametrize("name", CONFIGS)
def test_bits_stay_with_post_validation(name: str, schedule: str, train: Train) -> None:
    config = CONFIGS[name]
    expected = train(config, schedule, "--canonical-grad-norm", BUCKETS, LEFT)
    assert_validated(expected, train(config, schedule, "--optimizer-post-validation", BUCKETS))


@pytest.mark.slow
def test_bits_stay_where_a_search_goes_over_to_another_schedule(
    reference: Reference, train: Train, tmp_path: Path
) -> None:
    config = Config(dp=2, iterations=7, extra=OVERLAP, clip_grad=NEVER_CLIPS)
    flags = (
        *("--zero-bubble-profile-iters", "2:3", "--zero-bubble-wait-for-search"),
        *("--zero-bubble-effort", "quick", "--zero-bubble-drift-interval", "0"),
        BUCKETS,
        *("--zero-bubble-memory-limit", "2p", "--zero-bubble-cache", str(tmp_path)),
    )
    assert_identical(reference(config), train(config, "auto", *flags))


def assert_by_parameter(result: Result) -> None:
    """On the last stage, once Megatron reduces early: a reduction starts while W's of earlier
    microbatches than the last are still to run, and by the end of each of the last microbatch's
    shares so have as many as there have been shares."""
    last = result.config.num_microbatches - 1
    for batch in batches(result, stage=result.config.pp - 1)[2:]:
        shares = [one for one in batch["executed"] if one.startswith(f"0W{last}.")]
        assert shares, f"no share in {batch['executed']}"
        parts = int(shares[0].partition("/")[2])
        # What a stage reduces of norms and biases alone begins within the last B.
        assert reductions(batch, f"0I{last}", f"0W{last - 1}.{parts - 1}/{parts}")
        for part in range(parts):
            started = reductions(batch, f"0I{last}", f"0W{last}.{part}/{parts}")
            assert started > part, f"{started} reductions by the end of share {part} of {parts}"


def batches(result: Result, stage: int) -> list[Batch]:
    """Those of a stage's first rank."""
    rank = next(one for one in result.ranks if one["runtime"][0]["stage"] == stage)
    return list(rank["runtime"])


def reductions(batch: Batch, after: str, until: str) -> int:
    """How many start between the ends of two instructions."""
    begin, end = (batch["ends"][batch["executed"].index(one)] for one in (after, until))
    return sum(begin < one < end for one in batch["reductions"])
