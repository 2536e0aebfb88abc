"""The state of an inner optimizer: moments, counters, and what else a step changes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizers

from megatron.zero_bubble.optimizer.model_parameters import main_parameters

__all__ = [
    "Counters",
    "check_state",
    "fresh",
    "is_adam",
    "is_elementwise",
    "is_sgd",
    "nbytes",
    "standing_in",
    "writes_gradients",
]


def is_adam(inner: Any) -> bool:
    """Whether this is an Adam or AdamW: torch's, or the fused one that Megatron found."""
    return isinstance(inner, torch.optim.Adam | torch.optim.AdamW | megatron_optimizers.Adam)


def is_sgd(inner: Any) -> bool:
    """Whether this is an SGD: torch's, or the fused one that Megatron found."""
    return isinstance(inner, torch.optim.SGD | megatron_optimizers.SGD)


def writes_gradients(inner: Any) -> bool:
    """Whether a step may write into gradients.

    Fused kernels that add the weight decay to the gradient (Adam's L2 mode) may keep the sum there.
    """
    return not getattr(inner, "adam_w_mode", True)


def is_elementwise(parameter: torch.Tensor, value: Any) -> bool:
    """Whether an entry of a parameter's state has a number for each element of the parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def fresh(value: Any) -> Any:
    """A copy that stays as it is when the original is changed."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def nbytes(values: Iterable[Any]) -> int:
    """Memory of the tensors among these values."""
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def check_state(members: Iterable[Any]) -> None:
    """Refuse to go on where a step would make state that did not exist before.

    Raises:
        RuntimeError: a parameter has no moments yet.
    """
    for member in members:
        inner = member.optimizer
        for parameter in main_parameters(member):
            state = inner.state.get(parameter.tensor) or {}
            for entry in _required(inner, inner.param_groups[parameter.group]):
                if not isinstance(state.get(entry), torch.Tensor):
                    raise RuntimeError(
                        f"{parameter.name} has no {entry!r} in {type(inner).__name__}: a step that "
                        "may be undone needs an ordinary step before it"
                    )


def _required(inner: Any, group: dict[str, Any]) -> tuple[str, ...]:
    if is_sgd(inner):
        return ("momentum_buffer",) if group["momentum"] else ()
    return ("exp_avg", "exp_avg_sq")


@contextmanager
def standing_in(
    inner: Any, groups: list[dict[str, Any]], state: dict[torch.Tensor, dict[str, Any]]
) -> Iterator[None]:
    """Let an inner optimizer work on other parameters and state for a while."""
    kept = inner.param_groups, inner.state
    inner.param_groups, inner.state = groups, defaultdict(dict, state)
    try:
        yield
    finally:
        inner.param_groups, inner.state = kept


class Counters:
    """Copies of all that is not a number for each element: steps taken, mostly."""

    def __init__(self, members: Iterable[Any]) -> None:
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for member in members:
            inner = member.optimizer
            for group in inner.param_groups:
                kept = {key: fresh(value) for key, value in group.items() if key != "params"}
                self._groups.append((group, kept))
            for parameter in main_parameters(member):
                state = inner.state.get(parameter.tensor)
                if state:
                    kept = {
                        key: fresh(value)
                        for key, value in state.items()
                        if not is_elementwise(parameter.tensor, value)
                    }
                    self._states.append((state, kept))

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return sum(nbytes(kept.values()) for _, kept in [*self._groups, *self._states])

    def restore(self) -> None:
        """Set every entry back."""
        for live, kept in [*self._groups, *self._states]:
            for key, value in kept.items():
                current = live.get(key)
                if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                    current.copy_(value)  # others may hold this very tensor
                else:
                    live[key] = value
