"""Pending weight gradients: what a B pass leaves behind, and what the W pass does with it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

__all__ = ["PendingGradient", "WeightGradStore", "accumulate_into_grad"]

Accumulate = Callable[[torch.Tensor], None]
"""Consumes a parameter's gradient for one microbatch, as the hook after a fused backward would."""


@dataclass(frozen=True, slots=True)
class PendingGradient:
    """One linear layer's weight gradient, not computed yet.

    ``input`` is [sequence, batch, in] (with ``gather_group``, this rank's part of the sequence),
    ``grad_output`` is [sequence * batch, out], contiguous.
    """

    parameter: torch.nn.Parameter
    input: torch.Tensor
    grad_output: torch.Tensor
    gather_group: torch.distributed.ProcessGroup | None = None
    fused_accumulation: bool = False

    def compute(self) -> torch.Tensor:
        """The gradient, [out, in], in the parameter's dtype.

        Matmul first, addition after, as autograd has it: a matmul that accumulates rounds
        differently. With fused accumulation the kernel adds into ``main_grad`` itself and the
        result is a placeholder.
        """
        total_input = self._gathered_input()
        grad_output, total_input = prepare_input_tensors_for_wgrad_compute(
            self.grad_output.view(*total_input.shape[:-1], self.grad_output.shape[-1]), total_input
        )
        if not self.fused_accumulation:
            return grad_output.t().matmul(total_input)
        main_grad: torch.Tensor = self.parameter.main_grad
        kernels = megatron_layers.fused_weight_gradient_mlp_cuda
        if main_grad.dtype == torch.float32:
            kernels.wgrad_gemm_accum_fp32(total_input, grad_output, main_grad)
        else:
            kernels.wgrad_gemm_accum_fp16(total_input, grad_output, main_grad)
        # The hook wants a gradient of the right shape. This one takes no memory, and is zero, for
        # the hook adds it where the parameter has `zero_out_wgrad` (tied embeddings).
        self.parameter.grad_added_to_main_grad = True
        return self.parameter.detach().new_zeros(1).expand_as(self.parameter)

    def _gathered_input(self) -> torch.Tensor:
        if self.gather_group is None:
            return self.input
        shape = list(self.input.shape)
        shape[0] *= self.gather_group.size()
        total = get_global_memory_buffer().get_tensor(shape, self.input.dtype, "mpu")
        megatron_layers.dist_all_gather_func(total, self.input, group=self.gather_group)
        return total


@dataclass(slots=True)
class WeightGradStore:
    """Weight gradients between B and W, a bundle a (chunk, microbatch).

    ``accumulate`` maps a split parameter to what consumes its gradient: the hook of Megatron's
    DistributedDataParallel, or `accumulate_into_grad` without it.
    """

    accumulate: dict[torch.nn.Parameter, Accumulate] = field(default_factory=dict)
    deferring: bool = False
    """Whether split layers leave their weight gradients here, instead of computing them in B."""
    peak: int = 0
    """Most bundles held at once since the last `begin_iteration`."""
    computed: int = 0
    """Weight gradients computed since the last `begin_iteration`."""
    _bundles: dict[tuple[int, int], deque[PendingGradient]] = field(default_factory=dict)
    _open: deque[PendingGradient] | None = None

    def begin_iteration(self) -> None:
        """Forget what a failed iteration may have left, and count anew."""
        self._bundles.clear()
        self._open = None
        self.peak = self.computed = 0

    @contextmanager
    def deferred(self, enabled: bool) -> Iterator[None]:
        """While open, forwards (and forwards repeated by recomputation) build split layers."""
        before, self.deferring = self.deferring, enabled
        try:
            yield
        finally:
            self.deferring = before

    @contextmanager
    def collecting(self, chunk: int, microbatch: int) -> Iterator[None]:
        """While a B pass runs: what its split layers `put` becomes the bundle of its W pass."""
        bundle: deque[PendingGradient] = deque()
        self._open = bundle
        try:
            yield
        finally:
            self._open = None
        self._bundles[chunk, microbatch] = bundle
        self.peak = max(self.peak, len(self._bundles))

    def put(self, pending: PendingGradient) -> None:
        """Called by a split layer's backward. Outside a B pass the gradient is due at once."""
        if self._open is None:
            self._run(deque([pending]))
        else:
            self._open.append(pending)

    def pending(self, chunk: int, microbatch: int) -> tuple[PendingGradient, ...]:
        """What the W pass of (chunk, microbatch) will compute, in order."""
        return tuple(self._bundles[chunk, microbatch])

    def run(self, chunk: int, microbatch: int) -> None:
        """The W pass: compute and accumulate all weight gradients of (chunk, microbatch)."""
        self._run(self._bundles.pop((chunk, microbatch)))

    def _run(self, bundle: deque[PendingGradient]) -> None:
        with torch.no_grad():
            self._compute_all(bundle)

    def _compute_all(self, bundle: deque[PendingGradient]) -> None:
        uses_left = Counter(one.parameter for one in bundle)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        while bundle:
            one = bundle.popleft()
            gradient = one.compute()
            self.computed += 1
            # A weight used twice in a microbatch is summed before it is accumulated, as autograd
            # sums it before the parameter's hook runs.
            if one.parameter in sums:
                gradient = sums.pop(one.parameter) + gradient
            uses_left[one.parameter] -= 1
            if uses_left[one.parameter]:
                sums[one.parameter] = gradient
            else:
                self.accumulate[one.parameter](gradient)


def accumulate_into_grad(parameter: torch.nn.Parameter) -> Accumulate:
    """Adds into ``parameter.grad``, as autograd does where no DistributedDataParallel is."""

    def accumulate(gradient: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient

    return accumulate
