"""Split linears: Megatron's own linear layers, giving B now and W later."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from megatron.zero_bubble.runtime.delayed_layers import delays, leave_to
from megatron.zero_bubble.runtime.weight_grad import (
    Accumulate,
    PendingGradient,
    WeightGradStore,
    accumulate_into_grad,
)

__all__ = ["SplitReport", "split_linears"]


@dataclass(frozen=True, slots=True)
class SplitReport:
    """Names of the layers that give B and W apart, and of those whose W stays in B."""

    split: tuple[str, ...]
    whole: tuple[str, ...]
    embedding: tuple[str, ...] = ()
    """Those of ``whole`` whose weight is that of an embedding as well."""


@dataclass(frozen=True, slots=True)
class _Link:
    """What a split linear's backward needs besides tensors."""

    store: WeightGradStore
    parameter: torch.nn.Parameter
    allreduce_dgrad: bool
    sequence_parallel: bool
    fused_accumulation: bool
    tp_group: torch.distributed.ProcessGroup


class _SplitLinear(torch.autograd.Function):  # type: ignore[misc]
    """``input @ weight.T (+ bias)`` whose backward computes all but the weight's gradient.

    The weight arrives detached: as an input of the function its AccumulateGrad node would run in
    B, without a gradient, and DistributedDataParallel's hook on it would count it as ready.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        link: _Link,
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.use_bias, ctx.link = bias is not None, link
        total_input = input
        if link.sequence_parallel:
            shape = [input.shape[0] * link.tp_group.size(), *input.shape[1:]]
            total_input = get_global_memory_buffer().get_tensor(shape, input.dtype, "mpu")
            megatron_layers.dist_all_gather_func(total_input, input, group=link.tp_group)
        output = torch.matmul(total_input, weight.t())
        return output if bias is None else output + bias

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad_output,) = grad_outputs
        input, _ = ctx.saved_tensors  # unpacked: autograd checks that the weight is what it was
        link: _Link = ctx.link
        reduces = link.allreduce_dgrad or link.sequence_parallel
        filler = link.store.take() if reduces else None
        # By the parameter, not its detached twin: whether torch folds a strided gradient into two
        # dimensions, and so how it rounds, depends on whether the matrix requires a gradient.
        grad_input = grad_output.matmul(link.parameter)
        handle = None
        if link.allreduce_dgrad:
            handle = torch.distributed.all_reduce(grad_input, group=link.tp_group, async_op=True)
        elif link.sequence_parallel:
            whole, grad_input = grad_input, torch.empty_like(input, requires_grad=False)
            handle = megatron_layers.dist_reduce_scatter_func(
                grad_input, whole, group=link.tp_group, async_op=True
            )
        if filler is not None:
            link.store.fill(filler)
        # Contiguous, so that what W keeps is this gradient and not the tensor it is a view of;
        # flat, because a bias gradient summed over two dimensions rounds differently from one.
        flat = grad_output.contiguous().view(-1, grad_output.shape[-1])
        grad_bias = flat.sum(dim=0) if ctx.use_bias else None
        link.store.put(
            PendingGradient(
                link.parameter,
                input.detach(),  # without the graph that made it
                flat,
                link.tp_group if link.sequence_parallel else None,
                link.fused_accumulation,
            )
        )
        if handle is not None:
            handle.wait()
        return grad_input, None, grad_bias, None


def _forward_impl(store: WeightGradStore) -> Any:
    """A `_forward_impl` for one instance; signature as Megatron's layers call it."""

    def forward_impl(
        self: torch.nn.Module, input: torch.Tensor, weight: torch.nn.Parameter, **options: Any
    ) -> torch.Tensor:
        splittable = (
            store.deferring
            and torch.is_grad_enabled()
            and input.requires_grad
            and weight.requires_grad
            and weight in store.accumulate
            and options.get("grad_output_buffer") is None
        )
        if not splittable:
            unsplit: torch.Tensor = type(self)._forward_impl(
                self, input=input, weight=weight, **options
            )
            return unsplit
        link = _Link(
            store=store,
            parameter=weight,
            allreduce_dgrad=options.get("allreduce_dgrad", False),
            sequence_parallel=options.get("sequence_parallel", False),
            fused_accumulation=options.get("gradient_accumulation_fusion", False)
            and hasattr(weight, "main_grad"),
            tp_group=get_tensor_model_parallel_group_if_none(options.get("tp_group")),
        )
        result: torch.Tensor = _SplitLinear.apply(input, weight.detach(), options.get("bias"), link)
        return result

    return forward_impl


def split_linears(model: Iterable[torch.nn.Module], store: WeightGradStore) -> SplitReport:
    """Make the linear layers of these model chunks give B and W apart while ``store`` defers.

    Covers Megatron's local ColumnParallelLinear and RowParallelLinear wherever they are, and so
    GPTModel's output layer, which layer specs do not reach. The change is an attribute of each
    instance; without deferral a layer behaves as its class does. Transformer Engine's layers are
    split where they were built to delay their weight gradient, and then leave it to ``store`` in
    every backward pass (`delayed_layers`). Calling it again is harmless.

    Returns:
        Names of the layers that were split, and of other modules with a weight matrix, whose
        weight gradient stays in B.
    """
    split: list[str] = []
    whole: list[str] = []
    embedding_too: list[str] = []
    for chunk in model:
        ddp = next((m for m in chunk.modules() if isinstance(m, DistributedDataParallel)), None)
        embedding = _embedding_weights(chunk)
        for parameter in chunk.parameters():
            if parameter.requires_grad and parameter not in embedding:
                store.accumulate[parameter] = _accumulation(ddp, parameter)
        tied = _outputs_that_embed(chunk)
        for name, module in chunk.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module._forward_impl = types.MethodType(_forward_impl(store), module)
                (whole if name in tied else split).append(name)
                embedding_too += [name] if name in tied else []
            elif delays(module):
                leave_to(store, module, ddp)
                split.append(name)
            elif _has_matrix(module):
                whole.append(name)
    return SplitReport(tuple(split), tuple(whole), tuple(embedding_too))


def _accumulation(ddp: DistributedDataParallel | None, parameter: torch.nn.Parameter) -> Accumulate:
    if ddp is None:
        return accumulate_into_grad(parameter)
    hook = ddp._make_backward_post_hook(parameter)

    def accumulate(gradient: torch.Tensor) -> None:
        parameter.grad = gradient
        hook()

    return accumulate


def _embedding_weights(chunk: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Weights that look up. If a linear layer of the chunk has one as well (tied embeddings with
    multi-token prediction), autograd adds both gradients before they are accumulated: in B."""
    return {
        parameter
        for module in chunk.modules()
        if _is_embedding(module)
        for parameter in module.parameters(recurse=False)
    }


def _outputs_that_embed(chunk: torch.nn.Module) -> set[str]:
    """Names of output layers whose weight is that of an embedding of the same chunk."""
    return {
        f"{name}.output_layer".removeprefix(".")
        for name, module in chunk.named_modules()
        if getattr(module, "share_embeddings_and_output_weights", False)
        and hasattr(module, "embedding")
        and hasattr(module, "output_layer")
    }


def _is_embedding(module: torch.nn.Module) -> bool:
    return "Embedding" in type(module).__name__


def _has_matrix(module: torch.nn.Module) -> bool:
    """Whether the module itself holds a matrix it multiplies by (an embedding only looks up)."""
    return not _is_embedding(module) and any(
        parameter.dim() > 1 and parameter.requires_grad
        for parameter in module.parameters(recurse=False)
    )
