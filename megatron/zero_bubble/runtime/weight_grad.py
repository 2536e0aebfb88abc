"""Pending weight gradients: what a B pass leaves behind, and what the W pass does with it."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.utils import prepare_input_tensors_for_wgrad_compute

__all__ = ["Pending", "PendingGradient", "WeightGradStore", "accumulate_into_grad", "added_already"]

Accumulate = Callable[[torch.Tensor], None]
"""Consumes a parameter's gradient for one microbatch, as the hook after a fused backward would."""


@dataclass(frozen=True, slots=True)
class Gather:
    """An input that is being gathered over the ranks that share its sequence."""

    total: torch.Tensor
    handle: torch.distributed.Work

    def wait(self) -> torch.Tensor:
        """The whole input, once it is there (on a GPU: for what the stream runs from now on)."""
        self.handle.wait()
        return self.total


class Pending(Protocol):
    """What one use of a layer leaves for W."""

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        """Those that may get a gradient; one of a local layer, more of Transformer Engine's."""

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        """Activations and gradients that it keeps alive."""

    @property
    def lendable(self) -> bool:
        """Whether it may be computed within a B."""

    def start_gather(self, buffer: int) -> Gather | None:
        """Begin to gather what has to be, into one of two buffers."""

    def gradients(self, gather: Gather | None) -> Sequence[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Compute: parameters, each with its gradient, for whoever accumulates."""


@dataclass(frozen=True, slots=True)
class PendingGradient:
    """One local linear layer's weight gradient, not computed yet.

    ``input`` is [sequence, batch, in] (with ``gather_group``, this rank's part of the sequence),
    ``grad_output`` is [sequence * batch, out], contiguous.
    """

    parameter: torch.nn.Parameter
    input: torch.Tensor
    grad_output: torch.Tensor
    gather_group: torch.distributed.ProcessGroup | None = None
    fused_accumulation: bool = False

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return (self.parameter,)

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        return self.input, self.grad_output

    @property
    def lendable(self) -> bool:
        return True

    def gradients(self, gather: Gather | None) -> Sequence[tuple[torch.nn.Parameter, torch.Tensor]]:
        return ((self.parameter, self.compute(gather)),)

    def start_gather(self, buffer: int) -> Gather | None:
        """Begin to gather the input over the sequence-parallel ranks, into one of two buffers."""
        if self.gather_group is None:
            return None
        shape = list(self.input.shape)
        shape[0] *= self.gather_group.size()
        name = f"zero-bubble-weight-{buffer}"
        total = get_global_memory_buffer().get_tensor(shape, self.input.dtype, name)
        handle = megatron_layers.dist_all_gather_func(
            total, self.input, group=self.gather_group, async_op=True
        )
        return Gather(total, handle)

    def compute(self, gather: Gather | None = None) -> torch.Tensor:
        """The gradient, [out, in], in the parameter's dtype; ``gather`` is that of `start_gather`.

        Matmul first, addition after, as autograd has it: a matmul that accumulates rounds
        differently. With fused accumulation the kernel adds into ``main_grad`` itself and the
        result is a placeholder.
        """
        total_input = self.input if gather is None else gather.wait()
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
        return added_already(self.parameter)


def added_already(parameter: torch.nn.Parameter) -> torch.Tensor:
    """A gradient that stands for one which a fused kernel has added into ``main_grad``.

    DistributedDataParallel's hook wants one of the right shape. This one takes no memory, and is
    zero, for the hook adds it where the parameter has `zero_out_wgrad` (tied embeddings).
    """
    parameter.grad_added_to_main_grad = True
    zero = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
    return zero.expand(parameter.shape)


@dataclass(frozen=True, slots=True)
class Filler:
    """A weight gradient that is computed while something else moves between ranks."""

    pending: Pending
    gather: Gather | None


@dataclass(slots=True)
class WeightGradStore:
    """Weight gradients between B and W, a bundle a (chunk, microbatch).

    ``accumulate`` maps a split parameter to what consumes its gradient: the hook of Megatron's
    DistributedDataParallel, or `accumulate_into_grad` without it.
    """

    accumulate: dict[torch.nn.Parameter, Accumulate] = field(default_factory=dict)
    deferring: bool = False
    """Whether split layers leave their weight gradients here, instead of computing them in B."""
    lends: bool = True
    """Whether a W's gradients may be computed within the B before it, see `lending`."""
    share_of: dict[torch.nn.Parameter, int] = field(default_factory=dict)
    """Which share of a W that is cut into shares a weight is in; the last, if it is not here."""
    peak: int = 0
    """Most bundles held at once since the last `begin_iteration`; one with shares done counts less.
    """
    computed: int = 0
    """Weight gradients computed since the last `begin_iteration`."""
    _bundles: dict[tuple[int, int], deque[Pending]] = field(default_factory=dict)
    _done: dict[tuple[int, int], Fraction] = field(default_factory=dict)
    """How much of a bundle whose W is cut into shares has run."""
    _open: deque[Pending] | None = None
    _lent: deque[Pending] | None = None
    _known: set[torch.nn.Parameter] = field(default_factory=set)
    """Weights that have been in a whole bundle."""
    _repeated: set[torch.nn.Parameter] = field(default_factory=set)
    """Those that have been in one more than once."""

    def begin_iteration(self) -> None:
        """Forget what a failed iteration may have left, and count anew."""
        self._bundles.clear()
        self._done.clear()
        self._open = self._lent = None
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
        bundle: deque[Pending] = deque()
        self._open = bundle
        try:
            yield
        finally:
            self._open = None
        self._bundles[chunk, microbatch] = bundle
        uses = _uses(bundle)
        self._known.update(uses)
        self._repeated.update(one for one, count in uses.items() if count > 1)
        held = len(self._bundles) - sum(self._done.values())
        self.peak = max(self.peak, math.ceil(held))

    def put(self, pending: Pending) -> None:
        """Called by a split layer's backward. Outside a B pass the gradient is due at once."""
        if self._open is None:
            self._run(deque([pending]))
        else:
            self._open.append(pending)

    @contextmanager
    def lending(self, chunk: int, microbatch: int) -> Iterator[None]:
        """While a B pass runs that the W pass of (chunk, microbatch) follows: `take` takes from it.

        It may be the W of the B that is `collecting`, which has to be open already.
        """
        self._lent = self._bundles.get((chunk, microbatch), self._open)
        try:
            yield
        finally:
            self._lent = None

    def take(self) -> Filler | None:
        """Something to compute while a reduction of B moves; None if nothing is lent.

        A split layer calls it before it starts the reduction, since what is taken may have to be
        gathered first, on the same line.
        """
        for index, one in enumerate(self._lent or ()):
            # A gradient that is one of several to be added up is left to the W pass.
            known = self._known.issuperset(one.parameters)
            if one.lendable and known and self._repeated.isdisjoint(one.parameters):
                assert self._lent is not None
                del self._lent[index]
                return Filler(one, one.start_gather(0))
        return None

    def fill(self, filler: Filler) -> None:
        """Compute and accumulate what was taken."""
        with torch.no_grad():
            for parameter, gradient in filler.pending.gradients(filler.gather):
                self.accumulate[parameter](gradient)
        self.computed += 1

    def pending(self, chunk: int, microbatch: int) -> tuple[Pending, ...]:
        """What is left for the W pass of (chunk, microbatch) to compute, in order."""
        return tuple(self._bundles.get((chunk, microbatch), ()))

    @property
    def known(self) -> frozenset[torch.nn.Parameter]:
        """Weights whose gradients have been left to W passes, since there is a store."""
        return frozenset(self._known)

    def run(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        """The W pass: compute and accumulate all weight gradients of (chunk, microbatch).

        With ``parts`` above 1, those of the weights that `share_of` puts into share ``part``. A
        weight is in one share only, so its gradients in a microbatch are summed within one.
        """
        key = chunk, microbatch
        if parts == 1:
            self._run(self._bundles.pop(key))
            return
        bundle = self._bundles[key]
        mine = deque(one for one in bundle if self._share(one, parts) == part)
        self._bundles[key] = deque(one for one in bundle if self._share(one, parts) != part)
        bundle.clear()  # what has been computed is freed as the share goes on
        self._done[key] = self._done.get(key, Fraction(0)) + Fraction(1, parts)
        if self._done[key] == 1:
            del self._bundles[key], self._done[key]
        self._run(mine)

    def _share(self, one: Pending, parts: int) -> int:
        last = parts - 1
        return min(max(self.share_of.get(each, last) for each in one.parameters), last)

    def _run(self, bundle: deque[Pending]) -> None:
        with torch.no_grad():
            self._compute_all(bundle)

    def _compute_all(self, bundle: deque[Pending]) -> None:
        uses_left = _uses(bundle)
        sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        buffer = 0
        coming = bundle[0].start_gather(buffer) if bundle else None
        while bundle:
            one = bundle.popleft()
            gather = coming
            # The next input is gathered while this gradient is computed.
            buffer = 1 - buffer
            coming = bundle[0].start_gather(buffer) if bundle else None
            gradients = one.gradients(gather)
            self.computed += 1
            uses_left.subtract(one.parameters)
            # A weight used twice in a microbatch is summed before it is accumulated, as autograd
            # sums it before the parameter's hook runs.
            for parameter, gradient in gradients:
                if parameter in sums:
                    gradient = sums.pop(parameter) + gradient
                if uses_left[parameter]:
                    sums[parameter] = gradient
                else:
                    self.accumulate[parameter](gradient)


def _uses(bundle: Iterable[Pending]) -> Counter[torch.nn.Parameter]:
    return Counter(parameter for one in bundle for parameter in one.parameters)


def accumulate_into_grad(parameter: torch.nn.Parameter) -> Accumulate:
    """Adds into ``parameter.grad``, as autograd does where no DistributedDataParallel is."""

    def accumulate(gradient: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad += gradient

    return accumulate
