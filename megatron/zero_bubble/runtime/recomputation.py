"""Activations computed again in a pass of their own (R), instead of at the start of B.

Megatron's ``checkpoint`` runs a part of the model without keeping what its backward needs, and runs
it again within the backward. The two halves of that need not be together: what the second run needs
(inputs, random states) is there from F on. R runs it, and B finds it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import detach_variable

__all__ = ["Recomputations", "recomputable"]

Checkpoint = Callable[..., Any]
"""(function, distribute_saved_activations, *inputs) -> the function's outputs, as Megatron's."""

_collected: list[Any] | None = None
"""Autograd nodes of the checkpoints that the F which is running has passed; None outside of one."""


class Recomputations:
    """What F's left to be computed again, by (chunk, microbatch)."""

    def __init__(self) -> None:
        self._due: dict[tuple[int, int], list[Any]] = {}

    def clear(self) -> None:
        """Forget F's that are thrown away."""
        self._due.clear()

    @contextmanager
    def collecting(self, chunk: int, microbatch: int) -> Iterator[None]:
        """While an F runs whose checkpoints are due in `run`."""
        global _collected
        _collected = self._due[chunk, microbatch] = []
        try:
            yield
        finally:
            _collected = None

    def run(self, chunk: int, microbatch: int) -> None:
        """The R pass: compute again all that the F of (chunk, microbatch) did not keep."""
        for node in self._due.pop((chunk, microbatch)):
            _recompute(node)


def recomputable(checkpoint: Checkpoint) -> Checkpoint:
    """Megatron's ``checkpoint``, which an F that is followed by an R leaves to that R."""

    def checkpoint_for_r(function: Any, distribute_saved_activations: bool, *inputs: Any) -> Any:
        # Behind frozen parameters no backward comes; spread over tensor-parallel ranks, inputs are
        # put together again by Megatron's.
        needed = torch.is_grad_enabled() and any(
            torch.is_tensor(one) and one.requires_grad for one in inputs
        )
        if _collected is None or distribute_saved_activations or not needed:
            return checkpoint(function, distribute_saved_activations, *inputs)
        return _Recomputed.apply(function, *inputs)

    return checkpoint_for_r


class _Recomputed(torch.autograd.Function):  # type: ignore[misc]
    """Megatron's CheckpointFunction with a backward that may have been prepared by `_recompute`."""

    @staticmethod
    def forward(ctx: Any, function: Any, *inputs: Any) -> Any:
        outputs = megatron_random.CheckpointFunction.forward(ctx, function, False, *inputs)
        ctx.again = None
        assert _collected is not None
        _collected.append(ctx)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.again is None:
            _recompute(ctx)
        inputs, edges = ctx.again
        ctx.again = None
        torch.autograd.backward(list(edges.values()), [gradients[index] for index in edges])
        return None, *(one.grad if torch.is_tensor(one) else None for one in inputs)


def _recompute(node: Any) -> None:
    """Run a checkpoint's function as its F did, but keep the graph.

    Of the outputs nothing is kept: their values are there already, as the F's.
    """
    inputs = detach_variable(node.saved_tensors)
    with megatron_random._fork_rng(), torch.enable_grad():
        megatron_random._set_all_rng_states(*node.rng_states)
        outputs = node.run_function(*inputs)
    outputs = (outputs,) if torch.is_tensor(outputs) else outputs
    edges: dict[int, GradientEdge] = {
        index: get_gradient_edge(output)
        for index, output in enumerate(outputs)
        if torch.is_tensor(output) and output.requires_grad
    }
    node.again = inputs, edges
