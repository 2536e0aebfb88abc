"""Hardware queues of a GPU: whether there are as many as messages and reductions need."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from typing import Any

import torch

from zero_bubble.program import Channel

__all__ = ["advise", "queue_advice"]

logger = logging.getLogger(__name__)

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_DEFAULT = 8  # CUDA's own
_MOST = 32  # CUDA takes no more
_BLACKWELL = (10, 0)
_OTHER_STREAMS = 2  # of compute, and of reductions over data-parallel ranks


def advise(stage: int, channels: Collection[Channel], config: Any) -> None:
    """Warn if a stage with these channels has not the queues that it needs."""
    advice = queue_advice(
        os.environ.get(VARIABLE),
        channels=sum(stage in (one.source, one.target) for one in channels),
        ordered=_needs_order(config),
    )
    if advice is not None:
        logger.warning("stage %d: %s", stage, advice)


def _needs_order(config: Any) -> bool:
    """As Megatron has it: from Blackwell on kernels keep their order in any number of queues."""
    shares = config.tensor_model_parallel_size > 1 or config.context_parallel_size > 1
    return bool(shares and torch.cuda.get_device_capability() < _BLACKWELL)


def queue_advice(given: str | None, *, channels: int, ordered: bool) -> str | None:
    """What to tell whoever started a job on GPUs with this number of queues; None if it is right.

    A queue starts kernels in the order of their launch, whatever stream they are in.

    Args:
        given: value of the variable.
        channels: of this stage, each of which has a stream.
        ordered: whether kernels have to start in the order of their launch, so that a reduction
            over tensor- or context-parallel ranks is under way before the product that hides it.
    """
    shown = "not set" if given is None else given or "empty"
    if ordered:
        if given == "1":
            return None
        return (
            f"{VARIABLE} is {shown}: kernels may start in another order than they were launched "
            "in, and a reduction over tensor- or context-parallel ranks after the product that is "
            f"to hide it; export {VARIABLE}=1"
        )
    queues = _DEFAULT if given is None else int(given) if given.isdecimal() else 0
    if queues >= min(_MOST, channels + _OTHER_STREAMS):
        return None
    return (
        f"{VARIABLE} is {shown}: this stage has {channels} channels with a stream each, and "
        "streams that share a hardware queue wait for each other's messages; "
        f"export {VARIABLE}={_MOST}"
    )
