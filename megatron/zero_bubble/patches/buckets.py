"""Gradients lie in buckets on every stage, where a flag asks for it.

Megatron cuts the gradients of the first rank's first chunk into buckets, and leaves those of all
others in one: under 1F1B the first stage is the last to end. The W's at the tail, with which
reductions can overlap, are on the others.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.patches.placement import arrangement_of_run

__all__ = ["install"]

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
_LAYOUT = "compute_full_param_layout"
_REASON = "--zero-bubble-bucket-all-stages cuts gradients into buckets on every stage"


def install() -> None:
    """Patch the places that decide on buckets."""
    apply(
        Patch("megatron.core.distributed", "DistributedDataParallel.__init__", _REASON, _wrapping)
    )
    # Since 0.18 the distributed optimizer lays its parameters out before they are wrapped.
    optimizer = importlib.import_module(_OPTIMIZER).DistributedOptimizer
    if hasattr(optimizer, _LAYOUT):
        apply(Patch(_OPTIMIZER, f"DistributedOptimizer.{_LAYOUT}", _REASON, _laying_out))


@dataclass(frozen=True, slots=True)
class _First:
    """What Megatron asks a pipeline's group, to cut gradients into buckets on its first rank."""

    def rank(self) -> int:
        return 0


def _wrapping(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, *given: Any, **options: Any) -> None:
        groups = options.get("pg_collection")
        if _is_asked_for() and groups is not None:
            options["pg_collection"] = groups = copy.copy(groups)
            groups.pp = _First()
            options["disable_bucketing"] = False
        original(self, *given, **options)

    return init


def _laying_out(original: Callable[..., Any]) -> Any:
    def lay_out(
        params: Any, bucket_size: int | None, ranks: int, ddp_config: Any, **options: Any
    ) -> Any:
        if _is_asked_for():
            bucket_size = ddp_config.bucket_size  # none where reductions do not overlap
        return original(params, bucket_size, ranks, ddp_config, **options)

    return staticmethod(lay_out)


def _is_asked_for() -> bool:
    if arrangement_of_run() is None:  # Megatron's own schedule
        return False
    from megatron.training import get_args

    return bool(get_args().zero_bubble_bucket_all_stages)
