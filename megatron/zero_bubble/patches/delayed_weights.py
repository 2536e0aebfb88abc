"""Transformer Engine's layers are built to delay their weight gradients, where a schedule splits.

Megatron passes ``delay_wgrad_compute`` of its config on to the layers and to its
DistributedDataParallel, which then leaves these weights alone in the backward pass. But only its
own overlap of experts' communication may switch that on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.patches.placement import arrangement_of_run

__all__ = ["install"]


def install() -> None:
    """Patch the one check of the config that stands in the way."""
    apply(
        Patch(
            "megatron.core.transformer.transformer_config",
            "TransformerConfig.__post_init__",
            "a schedule's W passes take the place of Megatron's own use of delay_wgrad_compute",
            _letting_delay,
        )
    )


def _letting_delay(original: Callable[..., None]) -> Callable[..., None]:
    def post_init(self: Any) -> None:
        # With a schedule of ours nobody but us can have set it: the user's flag is refused.
        if arrangement_of_run() is None or not self.delay_wgrad_compute:
            original(self)
            return
        self.delay_wgrad_compute = False
        try:
            original(self)
        finally:
            self.delay_wgrad_compute = True

    return post_init
