"""Which tensor of the model follows a parameter of the optimizer, and how the model gets it.

Megatron's sub-optimizers wrap an inner optimizer, which steps *main* parameters. Forwards read the
model's. The two are different tensors where the model is in 16 bits, and the same memory where it
is in 32 bits. With the distributed optimizer a main parameter is this rank's shard, and the ranks
of the data-parallel group gather the model's parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    MixedPrecisionOptimizer,
)

__all__ = [
    "MainParameter",
    "forget_gathers",
    "gather_model_parameters",
    "main_parameters",
    "step_members",
    "steppable_members",
    "write_model_parameters",
]


@dataclass(frozen=True, slots=True, eq=False)
class MainParameter:
    """A parameter with a gradient, as an inner optimizer holds it.

    Attributes:
        tensor: what the inner optimizer steps.
        in_model: the same elements as forwards read them, without autograd's version counter. With
            the distributed optimizer this rank's shard of them.
        separate: whether the two are different memory.
        group: the index of its parameter group.
        name: says which parameter it is, for messages. Inner optimizers know no names.
    """

    tensor: torch.Tensor
    in_model: torch.Tensor
    separate: bool
    group: int
    name: str


def steppable_members(optimizer: ChainedOptimizer) -> list[Any]:
    """The sub-optimizers that have something to step on this rank."""
    return [
        member
        for member in optimizer.chained_optimizers
        if not member.is_stub_optimizer
        and any(group["params"] for group in member.optimizer.param_groups)
    ]


def main_parameters(member: Any) -> Iterator[MainParameter]:
    """Those parameters of a sub-optimizer that have a gradient, in the inner optimizer's order."""
    in_model = dict(_separate_model_tensors(member))
    for group_index, group in enumerate(member.optimizer.param_groups):
        for index, tensor in enumerate(group["params"]):
            if tensor.grad is None:
                continue
            separate = tensor in in_model
            yield MainParameter(
                tensor=tensor,
                in_model=in_model[tensor] if separate else tensor.data,
                separate=separate,
                group=group_index,
                name=f"parameter {index} of group {group_index}, shape {tuple(tensor.shape)}",
            )


def _separate_model_tensors(member: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(main parameter, the model's elements) wherever these are different memory."""
    if isinstance(member, DistributedOptimizer):
        for mains, models in zip(
            member.shard_fp32_from_float16_groups, member.model_float16_groups, strict=True
        ):
            for main, model in zip(mains, models, strict=True):
                yield main, _shard_in_buffer(member, model).view(main.shape)
    elif isinstance(member, Float16OptimizerWithFloat16Params):
        for mains, models in zip(
            member.fp32_from_float16_groups, member.float16_groups, strict=True
        ):
            for main, model in zip(mains, models, strict=True):
                yield main, model.data


def _shard_in_buffer(member: Any, model_parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's elements of a parameter, in the buffer that is gathered."""
    buffer, _, bucket = member.model_param_gbuf_map[model_parameter]
    shard = member._get_model_param_range_map(model_parameter)["gbuf_world_in_bucket"]
    whole = member.buffers[buffer].buckets[bucket].param_data
    return whole.view(-1)[shard.start : shard.end]


def step_members(members: Iterable[Any]) -> None:
    """An ordinary step of each member, up to but without the gathering.

    What ``step_with_ready_grads`` does, without its timers: these may wait for all ranks.
    """
    for member in members:
        member.optimizer.step()
        write_model_parameters([member])


def write_model_parameters(members: Iterable[Any]) -> None:
    """Cast main parameters into the model; without effect where they are the same memory."""
    for member in members:
        if isinstance(member, MixedPrecisionOptimizer):
            member._copy_main_params_to_model_params()


def gather_model_parameters(optimizer: ChainedOptimizer) -> None:
    """Gather all shards of the model now, unless forwards gather them when they need them.

    A collective of the data-parallel group, also for a rank that has nothing to step.
    """
    for chunk in _sharded_chunks(optimizer):
        if not chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync()


def forget_gathers(optimizer: ChainedOptimizer) -> None:
    """Wait for gathers in flight, and have the next forwards gather again.

    Only where forwards gather (``--overlap-param-gather``).
    """
    for chunk in _sharded_chunks(optimizer):
        if not chunk.ddp_config.overlap_param_gather:
            continue
        for buckets in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            if buckets.param_gather_handle is not None:
                buckets.start_param_sync(force_sync=True)  # only waits, as one is in flight
            buckets.param_gather_dispatched = False


def _sharded_chunks(optimizer: ChainedOptimizer) -> list[Any]:
    """The model chunks of distributed optimizers, each once: members share them."""
    chunks = {
        id(chunk): chunk
        for member in optimizer.chained_optimizers
        if isinstance(member, DistributedOptimizer)
        for chunk in member.model_chunks
    }
    return list(chunks.values())
