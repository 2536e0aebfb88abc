"""The parts of Megatron's optimizer step that need no other stage.

To be called without recording gradients, as Megatron's step itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from megatron.zero_bubble.optimizer.statistics import Norm, for_megatron

__all__ = ["clip", "prepare_gradients", "update_loss_scale"]


def prepare_gradients(optimizer: Any) -> list[bool]:
    """Gradients become what the step reads: in fp32, and unscaled.

    Megatron's ``prepare_grads`` without its reduction over ranks, and without the update of the
    loss scale, which needs its result.

    Returns:
        Of each sub-optimizer, whether a gradient of this rank is not finite; False without a
        loss scale.
    """
    return [_prepare(one) for one in optimizer.chained_optimizers]


def _prepare(one: Any) -> bool:
    if not isinstance(one, MixedPrecisionOptimizer):
        one.prepare_grads()
        return False
    if one.is_stub_optimizer:
        return False
    one._copy_model_grads_to_main_grads()
    if not one.grad_scaler:
        return False
    one.found_inf.fill_(0.0)
    gradients = one._collect_main_grad_data_for_unscaling()
    torch._amp_foreach_non_finite_check_and_unscale_(
        gradients, one.found_inf, one.grad_scaler.inv_scale
    )
    return bool(one.found_inf.item() > 0)


def clip(optimizer: Any, norm: Norm) -> None:
    """Scale gradients that are ready, as Megatron does for this norm."""
    norm = for_megatron(norm)
    for one in _with_parameters(optimizer):
        if one.config.clip_grad > 0.0:
            clip_grad_by_total_norm_fp32(
                one.get_parameters(), max_norm=one.config.clip_grad, total_norm=norm
            )


def update_loss_scale(optimizer: Any, found_inf: Sequence[bool]) -> None:
    """Tell each sub-optimizer's loss scale what was found over all its ranks."""
    for one, found in zip(optimizer.chained_optimizers, found_inf, strict=True):
        scaler = getattr(one, "grad_scaler", None)
        if scaler:
            scaler.update(found)


def _with_parameters(optimizer: Any) -> Iterator[Any]:
    for one in optimizer.chained_optimizers:
        if not getattr(one, "is_stub_optimizer", False) and one.get_parameters():
            yield one
