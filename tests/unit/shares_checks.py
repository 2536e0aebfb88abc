"""Which weights are in which share, and what the store computes of a share (test_shares.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.zero_bubble.runtime.tail import _dealt
from megatron.zero_bubble.runtime.weight_grad import (
    PendingGradient,
    WeightGradStore,
    accumulate_into_grad,
)


def weight(rows: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(rows, 3))


def dealt(sizes: Sequence[int], parts: int) -> list[int]:
    """The shares of weights of so many rows, each in a bucket of its own."""
    weights = [weight(size) for size in sizes]
    shares = _dealt([[one] for one in weights], parts)
    return [shares[one] for one in weights]


def a_share() -> None:
    """It computes its weights, a weight used twice in one share, and leaves the others."""
    first, second = weight(2), weight(2)
    store = WeightGradStore({one: accumulate_into_grad(one) for one in (first, second)})
    store.share_of = {first: 0, second: 1}
    with store.collecting(0, 5):
        for one in (second, first, second):
            store.put(PendingGradient(one, torch.ones(1, 1, 3), torch.ones(1, 2)))
    assert store.peak == 1
    store.run(0, 5, 0, 2)
    assert torch.equal(first.grad, torch.ones(2, 3))
    assert second.grad is None
    assert [one.parameters for one in store.pending(0, 5)] == [(second,), (second,)]
    store.run(0, 5, 1, 2)
    assert torch.equal(second.grad, 2 * torch.ones(2, 3))
    assert store.pending(0, 5) == ()
    assert store.computed == 3


def peak() -> None:
    """Bundles with shares done count less."""
    store = WeightGradStore()
    for microbatch in range(3):
        with store.collecting(0, microbatch):
            pass
    assert store.peak == 3
    store.run(0, 0, 0, 2)
    store.run(0, 1, 0, 2)
    with store.collecting(0, 3):
        pass
    assert store.peak == 3  # four bundles, two of them half done
