"""What activations take on a stage, and what they may take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.zero_bubble.profile.activations import ActivationCounter, CountedCompute, Pending
from megatron.zero_bubble.runtime.interpreter import Compute
from zero_bubble.trace.rank_file import TracedPass

__all__ = ["Meter", "peak", "room"]

_SHARE = 0.9
"""Of what is free, the rest being for fragmentation and for what varies."""


class Meter:
    """Counts the bytes of activations that a stage holds.

    On a GPU the allocator knows, at no cost. Elsewhere the storages that autograd saves are
    counted, which takes the forward passes a few microseconds a tensor.

    Args:
        models: the stage's model chunks, whose parameters and buffers do not count.
        pending: what the B of (chunk, microbatch) left for its W.
        device: where they live.
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        pending: Callable[[int, int], Iterable[Pending]],
        device: torch.device,
    ) -> None:
        self._models, self._pending, self._device = models, pending, device

    def begin(
        self, compute: Compute, split_chunks: frozenset[int]
    ) -> tuple[Compute, Callable[[], int]]:
        """What computes a batch so that it can be counted, and the count."""
        if self._device.type == "cuda":
            before = torch.cuda.memory_allocated(self._device)
            return compute, lambda: torch.cuda.memory_allocated(self._device) - before
        counter = ActivationCounter(
            tensor
            for model in self._models
            # Megatron's wrapper has a list called buffers.
            for tensor in (*model.parameters(), *torch.nn.Module.buffers(model))
            if tensor.numel()
        )
        return (
            CountedCompute(compute, counter, self._pending, split_chunks),
            lambda: counter.held,
        )


def peak(passes: Sequence[TracedPass]) -> int:
    """Most bytes held after a pass; 0 without any."""
    return max((one.held or 0 for one in passes), default=0)


def room(device: torch.device, held_at_most: int) -> float | None:
    """Bytes that activations may take on this rank at most; None if nothing says.

    What they have taken at most, and nine tenths of what was free even then. On a CPU the host's
    memory is free, to all ranks on the host alike.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return held_at_most + _SHARE * float(free + max(0, unused))
    try:
        import psutil
    except ImportError:
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return held_at_most + _SHARE * float(psutil.virtual_memory().available) / max(1, ranks)
