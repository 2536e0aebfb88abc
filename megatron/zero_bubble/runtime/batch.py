"""One call of Megatron's forward_backward function: what it asks for, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.zero_bubble.runtime.compute import BatchOptions, MegatronCompute
from megatron.zero_bubble.runtime.interpreter import Interpreter
from zero_bubble.program import Instruction, Program

__all__ = ["Batch", "BatchRequest", "groups_of", "message_shape"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """What the training loop wants of a batch. Two that are equal differ in their data only."""

    models: tuple[torch.nn.Module, ...]
    """The rank's model chunks, as the training loop holds them (wrapped)."""
    iterators: tuple[Any, ...]
    """Of microbatches, one a model chunk."""
    seq_length: int
    micro_batch_size: int
    decoder_seq_length: int | None
    groups: ProcessGroupCollection | None
    options: BatchOptions


@dataclass(slots=True)
class Batch:
    """A batch on this stage; ``left`` is what has not run yet."""

    request: BatchRequest
    program: Program
    stage: int
    compute: MegatronCompute
    interpreter: Interpreter
    left: Sequence[Instruction]


def message_shape(request: BatchRequest) -> tuple[int, ...]:
    """Of the activations that stages exchange for a batch."""
    groups = groups_of(request)
    return tuple(
        schedules.get_tensor_shapes(
            seq_length=request.seq_length,
            micro_batch_size=request.micro_batch_size,
            decoder_seq_length=request.decoder_seq_length,
            config=get_model_config(request.models[0]),
            tp_group=groups.tp,
            cp_group=groups.cp,
        )[0]
    )


def groups_of(request: BatchRequest | None) -> ProcessGroupCollection:
    """Process groups of this rank: those given with a batch, or else the job's."""
    given = None if request is None else request.groups
    return given or ProcessGroupCollection.use_mpu_process_groups()
