"""Gradients are reduced while weight gradients are still computed, by the event log.

Megatron makes several buckets on the first pipeline rank, of its first chunk. Elsewhere a chunk has
one, which is complete with the chunk's last W. All ranks are on one machine, and so have one clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tests.distributed.configs import Config
from tests.distributed.harness import Result

LEAST = 0.8
"""The part of an iteration's reductions that start before its last W ends."""
BUCKETS = Config(
    dp=2,
    # Every layer's matrices fill a bucket or more.
    extra=("--overlap-grad-reduce", "--ddp-bucket-size", "2048"),
    iterations=4,
    layers=8,
    clip_grad=0.0,
)


def _before(times: Sequence[int], end: int) -> float:
    return sum(one < end for one in times) / len(times)


@pytest.mark.parametrize(
    "schedule",
    ["zb-h1", pytest.param("zb-h2", marks=pytest.mark.slow), "zb-v"],
    ids=["zb_h1", "zb_h2", "zb_v"],
)
def test_features_overlap_of_reductions_with_w(schedule: str, train: Callable[..., Result]) -> None:
    """On a rank with several buckets before its own last W, and in all before the last one of all.

    In the first iteration Megatron counts what belongs to a bucket, and reduces at its end.
    """
    run = train(BUCKETS, schedule)
    iterations = zip(*(record["runtime"][1:] for record in run.ranks), strict=True)
    for index, batches in enumerate(iterations, start=1):
        several = [batch for batch in batches if len(batch["reductions"]) >= 5]
        assert len(several) >= BUCKETS.dp, "at least on the first pipeline rank of each replica"
        for batch in several:
            early = _before(batch["reductions"], batch["ended"]["W"])
            assert early >= LEAST, f"iteration {index}, stage {batch['stage']}: {early:.0%}"
        every = [one for batch in batches for one in batch["reductions"]]
        early = _before(every, max(batch["ended"]["W"] for batch in batches))
        assert early >= LEAST, f"iteration {index}: {early:.0%} of {len(every)}"
