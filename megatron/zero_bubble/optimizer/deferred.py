"""Deferred: what must be undone is never done.

The optimistic step runs on scratch copies, a slice of parameters at a time, and only what forwards
read is written. Main parameters, moments and counters change on success, by the same arithmetic,
which the run's own optimizer does both times. So an undo has nothing to compute: it casts the main
parameters, which never changed, into the model again.

Memory kept until then: none where the model is in 16 bits, and 4 bytes a parameter where the
optimizer steps the model's parameters themselves. Scratch: a copy of one slice of the parameters
and their moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.zero_bubble.optimizer.model_parameters import (
    MainParameter,
    forget_gathers,
    gather_model_parameters,
    main_parameters,
    steppable_members,
    write_model_parameters,
)
from megatron.zero_bubble.optimizer.state import (
    check_state,
    fresh,
    is_elementwise,
    nbytes,
    standing_in,
    writes_gradients,
)

__all__ = ["ALIGNMENT", "SLICE_ELEMENTS", "Deferred", "Piece", "batches"]

# Where a parameter may be cut, in elements. Vectorized kernels compute the elements that fill no
# whole vector in another way, so that their last bits differ: cuts must not make such elements.
ALIGNMENT = 4096
# By device. A GPU should compute for longer than its kernels take to launch; a CPU should find the
# scratch in its caches, and the allocator should not ask the system for it each time.
SLICE_ELEMENTS = {"cuda": 1 << 23, "cpu": 1 << 18}


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter; all of them in its own shape, else flat."""

    parameter: MainParameter
    start: int
    stop: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor that has the parameter's elements."""
        if self.stop - self.start == self.parameter.tensor.numel():
            return tensor
        return tensor.view(-1)[self.start : self.stop]


class Deferred:
    """Steps scratch copies first, and the real thing on success.

    Args:
        optimizer: what Megatron made, with inner optimizers that treat each element on its own.
        slice_elements: how many elements are stepped at a time; a multiple of ``ALIGNMENT``, or
            None for what suits the device.
    """

    def __init__(self, optimizer: ChainedOptimizer, *, slice_elements: int | None = None) -> None:
        if slice_elements is not None and (slice_elements <= 0 or slice_elements % ALIGNMENT):
            raise ValueError(f"slice_elements is {slice_elements}: use a multiple of {ALIGNMENT}")
        self._optimizer = optimizer
        self._members = steppable_members(optimizer)
        self._slice_elements = slice_elements
        # The parameters before the step, where the model's are the optimizer's own.
        self._backups: dict[torch.Tensor, torch.Tensor] = {}
        self._kept_bytes = self._scratch_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    @property
    def scratch_bytes(self) -> int:
        return self._scratch_bytes

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def apply(self) -> None:
        check_state(self._members)
        self._scratch_bytes = 0
        for member in self._members:
            parameters = list(main_parameters(member))
            for parameter in parameters:
                if not parameter.separate:
                    self._backups[parameter.tensor] = parameter.in_model.clone()
            for batch in batches(parameters, self._slice_elements):
                self._step_copies(member.optimizer, batch)
        self._kept_bytes = nbytes(self._backups.values())
        gather_model_parameters(self._optimizer)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def commit(self) -> None:
        for member in self._members:
            if self._backups:
                self._step_backups(member)
            else:
                member.optimizer.step()
        self._backups.clear()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def undo(self, *, publish: bool) -> None:
        forget_gathers(self._optimizer)
        for tensor, backup in self._backups.items():
            tensor.data.copy_(backup)
        self._backups.clear()
        if publish:
            write_model_parameters(self._members)
            gather_model_parameters(self._optimizer)

    def _step_copies(self, inner: Any, batch: list[Piece]) -> None:
        """Step copies of a few pieces of one group, and write what the model reads of them."""
        copies, states = [], {}
        for piece in batch:
            tensor = piece.parameter.tensor
            scratch = piece.of(tensor.data).clone()
            gradient = piece.of(tensor.grad)
            scratch.grad = gradient.clone() if writes_gradients(inner) else gradient
            copies.append(scratch)
            if tensor in inner.state:
                states[scratch] = {
                    key: piece.of(value).clone() if is_elementwise(tensor, value) else fresh(value)
                    for key, value in inner.state[tensor].items()
                }
        group = inner.param_groups[batch[0].parameter.group]
        settings = {key: fresh(value) for key, value in group.items() if key != "params"}
        with standing_in(inner, [{**settings, "params": copies}], states):
            inner.step()
        for piece, scratch in zip(batch, copies, strict=True):
            piece.of(piece.parameter.in_model).copy_(scratch)
        held = nbytes(copies) + sum(nbytes(state.values()) for state in states.values())
        if writes_gradients(inner):
            held += nbytes(scratch.grad for scratch in copies)
        self._scratch_bytes = max(self._scratch_bytes, held)

    def _step_backups(self, member: Any) -> None:
        """The step in place, with backups for those parameters that the model reads.

        These have the new values already, and forwards that ran since have saved them for their
        backward: autograd would refuse it after any change. Moments and counters are the real ones.
        """
        inner = member.optimizer
        stand_ins = {}
        for parameter in main_parameters(member):
            tensor = parameter.tensor
            stand_ins[tensor] = backup = self._backups.get(tensor, tensor)
            backup.grad = tensor.grad
        state = {stand_ins.get(tensor, tensor): kept for tensor, kept in inner.state.items()}
        originals = [group["params"] for group in inner.param_groups]
        try:
            for group, tensors in zip(inner.param_groups, originals, strict=True):
                group["params"] = [stand_ins.get(tensor, tensor) for tensor in tensors]
            with standing_in(inner, inner.param_groups, state):
                inner.step()
        finally:
            for group, tensors in zip(inner.param_groups, originals, strict=True):
                group["params"] = tensors


def batches(
    parameters: Sequence[MainParameter], elements: int | None = None
) -> Iterator[list[Piece]]:
    """Pieces that are stepped together: of one group, and at most so many elements.

    A parameter that is not contiguous stays whole, whatever its size. Without a number it is what
    suits the device.
    """
    if not parameters:
        return
    elements = elements or SLICE_ELEMENTS[parameters[0].tensor.device.type]
    batch: list[Piece] = []
    room = elements
    for parameter in parameters:
        size, start = parameter.tensor.numel(), 0
        other_group = bool(batch) and batch[0].parameter.group != parameter.group
        while start < size:
            fits = size - start
            if fits > room:
                fits = max(0, room) // ALIGNMENT * ALIGNMENT if _may_be_cut(parameter) else 0
            if batch and (other_group or not fits):
                yield batch
                batch, room, other_group = [], elements, False
                continue
            stop = start + fits if fits else size
            batch.append(Piece(parameter, start, stop))
            room -= stop - start
            start = stop
    if batch:
        yield batch


def _may_be_cut(parameter: MainParameter) -> bool:
    return bool(parameter.tensor.is_contiguous() and parameter.tensor.grad.is_contiguous())
