"""Layers that split B and W by themselves: Transformer Engine's, by its delayed weight gradient.

Built with ``delay_wgrad_compute``, such a layer's backward pass ends with ``wgrad_store.put``: the
tensors and the function that its weight gradient is made of. ``backward_dw`` takes the oldest out
of that store and computes it. Here, what is put goes into the bundle of its microbatch instead, and
comes back right before ``backward_dw``; so nothing depends on what else waits in the layer's store,
and what a failed iteration has left is forgotten with its bundles.

Nothing of Transformer Engine is imported: this is written for the interface of 2.8 to 2.20.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron.zero_bubble.errors import ConfigurationError, PipelineError
from megatron.zero_bubble.runtime.weight_grad import (
    Accumulate,
    Gather,
    WeightGradStore,
    added_already,
)
from zero_bubble.program import Instruction, Run
from zero_bubble.schedule import Kind

__all__ = ["LeftToLayer", "check_order", "delays", "leave_to", "some_delay"]

QUANTIZED = "get_data_tensors"
"""What Transformer Engine's quantized tensors have."""


def delays(module: torch.nn.Module) -> bool:
    """Whether a backward pass of this layer leaves its weight gradient for later."""
    kept = getattr(module, "wgrad_store", None)
    return kept is not None and bool(kept.delay_wgrad_compute())


def some_delay(models: Iterable[torch.nn.Module]) -> bool:
    """Whether there is such a layer in these models."""
    return any(delays(part) for model in models for part in model.modules())


def check_order(instructions: Iterable[Instruction]) -> None:
    """Such a layer decides in F what its W does: that of the first microbatch may overwrite.

    Raises:
        ConfigurationError: F's, B's or W's of a chunk that do not ascend by microbatch.
    """
    last: dict[tuple[Kind, int], int] = {}
    for one in instructions:
        if not isinstance(one, Run):
            continue
        what = one.what
        if what.microbatch < last.get((what.kind, what.chunk), 0):
            raise ConfigurationError(
                f"{what} comes after a later microbatch's, and layers of Transformer Engine need "
                "them in order: use another schedule, or --transformer-impl local"
            )
        last[what.kind, what.chunk] = what.microbatch


def leave_to(
    store: WeightGradStore, module: torch.nn.Module, ddp: DistributedDataParallel | None
) -> None:
    """From now on what the layer leaves in a backward pass goes to ``store``.

    The layer's parameters have to be in ``store.accumulate``. Calling it again is harmless.

    Raises:
        ConfigurationError: DistributedDataParallel counts on weight gradients in B.
    """
    if ddp is not None and not ddp.ddp_config.delay_wgrad_compute:
        raise ConfigurationError(
            f"{type(module).__name__} delays its weight gradient, but DistributedDataParallel was "
            "built without delay_wgrad_compute and counts on it in the backward pass: build both "
            "from the arguments of the run"
        )
    layer: Any = module
    # Megatron has registered its hook on the layer, for all parameters at once and in each
    # backward_dw. They are called by `store.accumulate`, for each when its gradient is there.
    layer.wgrad_accumulation_and_reduce_hooks.clear()
    named = dict(_delayed(layer))
    biases = tuple(one for name, one in named.items() if "bias" in name)
    weights = tuple(one for name, one in named.items() if "bias" not in name)

    def put(tensors: list[Any], function: Callable[..., Any]) -> None:
        store.put(LeftToLayer(layer, weights, biases, _without_graph(tensors), function))

    layer.wgrad_store.put = put
    if ddp is None:
        for weight in filter(_trains, weights):
            weight.register_hook(_nothing_of_worth)
    else:
        _watch(filter(_trains, weights), filter(_trains, biases), store.accumulate)


def _delayed(layer: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The layer's parameters whose gradients it may delay: those that it has marked."""
    for name, one in layer.named_parameters(recurse=False):
        if getattr(one, "skip_backward_post_hook", False):
            yield name, one
        elif name.startswith(("weight", "bias")):
            raise ConfigurationError(
                f"{name} of {type(layer).__name__} was replaced after the layer was built, and "
                "DistributedDataParallel counts on its gradient in the backward pass: leave out "
                "--use-cpu-initialization"
            )


def _trains(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter.requires_grad)


def _nothing_of_worth(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """In place of what autograd delivers in B of a weight: see `_watch`."""
    return None if gradient is None else torch.zeros_like(gradient)


def _watch(
    weights: Iterable[torch.nn.Parameter],
    biases: Iterable[torch.nn.Parameter],
    accumulate: Mapping[torch.nn.Parameter, Accumulate],
) -> None:
    """Take what autograd delivers in B.

    Of a weight that is nothing of worth: a placeholder where accumulation is fused, which would be
    added to the next one's, and whose hook would say that the gradient is complete; of a grouped
    layer without fusion the memory that W will write to. Of a bias it is the gradient, wherever the
    layer does not compute it together with the weight's: Megatron adds the bias of most
    row-parallel layers itself, and FP8 sums it while it quantizes.
    """

    def drop(parameter: torch.nn.Parameter) -> None:
        parameter.grad = None

    def came(parameter: torch.nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            accumulate[parameter](gradient)

    for weight in weights:
        weight.register_post_accumulate_grad_hook(drop)
    for bias in biases:
        bias.register_post_accumulate_grad_hook(came)


@dataclass(frozen=True, slots=True)
class LeftToLayer:
    """A `runtime.weight_grad.Pending` that the layer itself computes.

    ``tensors`` and ``function`` are what the layer's backward has put: input, gradient of the
    output, and in grouped layers where to write. ``weights`` and ``biases`` are all of the layer's:
    it does not mind which are frozen.
    """

    layer: Any
    weights: tuple[torch.nn.Parameter, ...]
    biases: tuple[torch.nn.Parameter, ...]
    tensors: list[Any]
    function: Callable[..., Any]

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]:
        return tuple(filter(_trains, self.weights + self.biases))

    @property
    def held(self) -> tuple[torch.Tensor, ...]:
        # The third is where a grouped layer's gradients go: memory of its own, or `main_grad`.
        own = self.tensors[:2] if self.layer.fuse_wgrad_accumulation else self.tensors
        return tuple(_tensors_of(own))

    @property
    def lendable(self) -> bool:
        """Not to a reduction of another layer: the layer's streams and buffers are its own."""
        return False

    def start_gather(self, buffer: int) -> Gather | None:
        """With sequence parallelism the layer has gathered its input in B, and keeps it whole."""
        return None

    def gradients(self, gather: Gather | None) -> Sequence[tuple[torch.nn.Parameter, torch.Tensor]]:
        own = self.weights + self.biases
        before = [one.grad for one in own]
        for one in own:
            one.grad = None
        had_in_b: set[torch.nn.Parameter] = set()

        def function(*tensors: Any) -> Any:
            result = self.function(*tensors)
            had_in_b.update(self._without_gradient(result))
            for bias in had_in_b:
                bias.grad = _nothing(bias)  # up to 2.8 at least, backward_dw reads one for each
            return result

        kept = self.layer.wgrad_store
        type(kept).put(kept, self.tensors, function)  # its own, which `leave_to` hides
        self.layer.backward_dw()
        found = [(one, self._of_weight(one)) for one in filter(_trains, self.weights)]
        found += [
            (one, one.grad)
            for one in filter(_trains, self.biases)
            if one not in had_in_b and one.grad is not None
        ]
        for one, gradient in zip(own, before, strict=True):
            one.grad = gradient
        return found

    def _of_weight(self, weight: torch.nn.Parameter) -> torch.Tensor:
        if self.layer.fuse_wgrad_accumulation:
            return added_already(weight)
        if weight.grad is None:
            raise PipelineError(
                f"{type(self.layer).__name__}.backward_dw left a weight without its gradient"
            )
        return weight.grad

    def _without_gradient(self, result: Sequence[Any]) -> Iterator[torch.nn.Parameter]:
        """Biases that the function does not compute: their gradient has come in B."""
        given = result[1]
        given = given if isinstance(given, list | tuple) else [given]
        for index, bias in enumerate(self.biases):
            one = given[index] if index < len(given) else None
            if one is None or not one.numel():
                yield bias


def _nothing(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Of the parameter's shape, and of no memory."""
    zero = torch.zeros(1, dtype=parameter.dtype, device=parameter.device)
    return zero.expand(parameter.shape)


def _without_graph(value: Any) -> Any:
    """The same memory. A layer puts its input as it came, which until W would keep alive the graph
    that made it, and with that what the stage has received and its gradient."""
    if isinstance(value, list | tuple):
        return [_without_graph(one) for one in value]
    if torch.is_tensor(value) and value.requires_grad and not hasattr(value, QUANTIZED):
        return value.detach()
    return value


def _tensors_of(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, and in what Transformer Engine keeps of a quantized one."""
    for value in values:
        if hasattr(value, QUANTIZED):
            yield from _tensors_of(value.get_data_tensors())
        elif torch.is_tensor(value):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_of(value)
