"""Activations are computed again where the schedule has a pass for it."""

from __future__ import annotations

from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.runtime.recomputation import recomputable

__all__ = ["install"]


def install() -> None:
    """Patch the one function through which Megatron's layers recompute."""
    apply(
        Patch(
            "megatron.core.tensor_parallel.random",
            "checkpoint",
            "a schedule's R passes compute activations again, instead of B",
            recomputable,
        )
    )
