"""Spikes in a rank's gradients, between the backward passes and the optimizer's step.

The same in a reference run and in one of ours: both end a batch with Megatron's finalize function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tests.distributed.gathering import named_parameters

__all__ = ["install"]


def install(spikes: Sequence[dict[str, Any]]) -> None:
    """Wrap the finalize function where the loop looks it up. ``spikes`` are `configs.Spike`'s."""
    if not spikes:
        return
    from megatron.training import get_args, training

    finalize = training.finalize_model_grads

    def finalize_and_spike(model: list[Any], *rest: Any, **options: Any) -> None:
        finalize(model, *rest, **options)
        now = [one for one in spikes if one["iteration"] == get_args().curr_iteration]
        if now:
            gradients = {
                name: parameter.main_grad
                for chunk in model
                for name, parameter in named_parameters(chunk)
            }
            for one in now:
                if one["parameter"] in gradients:
                    _spike(gradients[one["parameter"]], one["factor"])

    training.finalize_model_grads = finalize_and_spike


def _spike(gradient: Any, factor: float) -> None:
    if math.isfinite(factor):
        gradient.mul_(factor)
    else:
        gradient.view(-1)[0] = factor
