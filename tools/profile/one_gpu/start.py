"""One start for all turns: the same weights, an optimizer without a past, the same data."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["Data", "Start", "digests", "named_parameters"]

_LAYER = re.compile(r"(?:module\.)*decoder\.layers\.(\d+)(?=\.)")
_DEVIATION = 0.02
"""Of weights, as Megatron's --init-method-std."""


def named_parameters(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """(name in the model, parameter): layers have their numbers in the model, counted from 0."""
    modules = dict(chunk.named_modules())
    for name, parameter in chunk.named_parameters():
        layer = _LAYER.match(name)
        if layer is not None:
            number = int(modules[layer[0]].layer_number) - 1  # Megatron counts from 1
            name = f"decoder.layers.{number}{name[layer.end() :]}"
        while name.startswith("module."):
            name = name.removeprefix("module.")
        yield name, parameter


class Start:
    """Sets a rank's chunks and optimizer to a start that does not depend on the placement.

    Megatron draws weights by the number of the rank. Here matrices are drawn by their names in the
    model; vectors are as Megatron made them, which is 0 or 1.
    """

    def __init__(self, models: Sequence[torch.nn.Module], optimizer: Any) -> None:
        self._models, self._optimizer = models, optimizer
        self._vectors = {
            parameter: parameter.detach().clone()
            for model in models
            for parameter in model.parameters()
            if parameter.dim() < 2
        }

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def restore(self) -> None:
        """To be called between two iterations."""
        for model in self._models:
            for name, parameter in named_parameters(model):
                if parameter in self._vectors:
                    parameter.copy_(self._vectors[parameter])
                else:
                    random = torch.Generator(parameter.device)
                    random.manual_seed(zlib.crc32(name.encode()))
                    parameter.normal_(0.0, _DEVIATION, generator=random)
        for member in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            _forget(member.optimizer)
        # Where there are main parameters, they are the model's.
        self._optimizer.reload_model_params()


def _forget(inner: Any) -> None:
    """Set moments and counters of an optimizer back."""
    if inner is None:  # of a rank without parameters
        return
    for state in inner.state.values():
        _to_zero(state, state.keys())
    for group in inner.param_groups:
        _to_zero(group, [key for key in group if key == "step"])


def _to_zero(entries: dict[str, Any], keys: Any) -> None:
    for key in list(keys):
        if isinstance(entries[key], torch.Tensor):
            entries[key].zero_()
        else:
            entries[key] = 0


@torch.no_grad()  # type: ignore[untyped-decorator]
def digests(models: Sequence[torch.nn.Module]) -> dict[str, int]:
    """Of each parameter, by its name in the model, the sum of its bits as whole numbers.

    Equal parameters have equal digests, and one that differs in a single bit does not.
    """
    whole = {2: torch.int16, 4: torch.int32}
    return {
        name: int(parameter.detach().view(whole[parameter.element_size()]).sum(dtype=torch.int64))
        for model in models
        for name, parameter in named_parameters(model)
    }


class Data:
    """A turn's microbatches, read once and then given out again.

    Args:
        given: the loop's iterator: None where nothing is read, a list where there are chunks.
        count: microbatches of a turn.
    """

    def __init__(self, given: Any, count: int) -> None:
        self._is_list = isinstance(given, list)
        self._kept = [
            None if one is None else [next(one) for _ in range(count)]
            for one in (given if self._is_list else [given])
        ]

    def again(self) -> Any:
        """Iterators as the loop's own, from the first microbatch on."""
        iterators = [None if one is None else iter(one) for one in self._kept]
        return iterators if self._is_list else iterators[0]
