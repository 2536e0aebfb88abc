"""Snapshot: copy what a step changes, step, and copy back to undo.

Memory kept until then: 12 bytes a parameter with Adam, on the device or in the host's memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.zero_bubble.optimizer.model_parameters import (
    forget_gathers,
    gather_model_parameters,
    main_parameters,
    step_members,
    steppable_members,
    write_model_parameters,
)
from megatron.zero_bubble.optimizer.state import (
    Counters,
    check_state,
    is_elementwise,
    nbytes,
    writes_gradients,
)

__all__ = ["Snapshot"]


class Snapshot:
    """An ordinary step after copies of main parameters, moments and counters.

    Args:
        optimizer: what Megatron made.
        on_host: keep the copies in the host's memory; pinned, and kept for the next step, where the
            parameters are on a GPU.
    """

    def __init__(self, optimizer: ChainedOptimizer, *, on_host: bool = False) -> None:
        self._optimizer = optimizer
        self._members = steppable_members(optimizer)
        self._on_host = on_host
        self._host_buffers: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (the live tensor, its copy)
        self._counters: Counters | None = None
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    @property
    def scratch_bytes(self) -> int:
        return 0

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def apply(self) -> None:
        check_state(self._members)
        live = [tensor for member in self._members for tensor in _changing(member)]
        self._copies = [(tensor, self._copy(tensor, place)) for place, tensor in enumerate(live)]
        self._counters = Counters(self._members)
        self._kept_bytes = nbytes(copy for _, copy in self._copies) + self._counters.nbytes
        step_members(self._members)
        gather_model_parameters(self._optimizer)

    def commit(self) -> None:
        self._drop()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def undo(self, *, publish: bool) -> None:
        forget_gathers(self._optimizer)
        for tensor, copy in self._copies:
            tensor.copy_(copy, non_blocking=True)
        if self._counters is not None:
            self._counters.restore()
        self._drop()
        if publish:
            write_model_parameters(self._members)
            gather_model_parameters(self._optimizer)

    def _copy(self, tensor: torch.Tensor, place: int) -> torch.Tensor:
        if not self._on_host:
            return tensor.clone()
        # Copies to and from pinned memory are in order with the steps on the device's stream.
        buffers = self._host_buffers
        if place == len(buffers):
            pinned = tensor.device.type == "cuda"
            buffers.append(
                torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            )
        buffer = buffers[place]
        if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            del buffers[place:]
            return self._copy(tensor, place)
        return buffer.copy_(tensor, non_blocking=True)

    def _drop(self) -> None:
        self._copies = []
        self._counters = None


def _changing(member: Any) -> Iterator[torch.Tensor]:
    """The tensors that a step of this member changes, but for the model's and for counters."""
    inner = member.optimizer
    for parameter in main_parameters(member):
        yield parameter.tensor.data
        for value in inner.state.get(parameter.tensor, {}).values():
            if is_elementwise(parameter.tensor, value):
                yield value
        if writes_gradients(inner):
            yield parameter.tensor.grad
