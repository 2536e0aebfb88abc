"""Bytes that a stage keeps for its backward passes, counted while it trains.

Three things are kept between passes: what autograd saves in F, a chunk's input and output between
its F and its B, and what B leaves for W. `ActivationCounter` counts their storages, each once
however many tensors refer to it, parameters and buffers left out. `CountedCompute` counts around
each pass. `PassMemory` notes the count before and after: M_B and M_W of a chunk, and the peak.

Not counted: what a pass allocates and frees within itself, messages that wait to be sent or to be
computed with, and tensors that a custom autograd function keeps by other ways than
``save_for_backward``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megatron.zero_bubble.runtime.interpreter import Compute
from zero_bubble.program import Flow, Instruction, Run
from zero_bubble.schedule import Kind, Pass

__all__ = ["ActivationCounter", "CountedCompute", "Hold", "PassMemory", "PassRecord", "Pending"]


class Hold:
    """Keeps a tensor, and its storage counted, until it is released or dropped."""

    __slots__ = ("__weakref__", "release", "tensor")

    def __init__(self, tensor: torch.Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        # Autograd drops what it saved without a word; that is when this runs.
        self.release = weakref.finalize(self, release)
        self.release.atexit = False


@dataclass(slots=True)
class _Storage:
    nbytes: int
    part: str
    holders: int = 0


class ActivationCounter:
    """Counts the bytes of held storages.

    Args:
        excluded: tensors whose storages do not count: parameters and buffers. None is left out
            that is not given. The counter keeps them alive.

    Bytes are counted by part of the model as well (`mark`). A storage belongs to the part that held
    it first, to "" if that was no marked module.
    """

    def __init__(self, excluded: Iterable[torch.Tensor] = ()) -> None:
        # With their storages, for the key of one that is gone would soon be another's.
        self._excluded = {_key(tensor): tensor.untyped_storage() for tensor in excluded}
        self._storages: dict[int, _Storage] = {}
        self._held: defaultdict[str, int] = defaultdict(int)
        self._parts = [""]
        self._part_of_parameter: dict[int, str] = {}

    @property
    def held(self) -> int:
        """Bytes held now."""
        return sum(self._held.values())

    def held_in(self, part: str) -> int:
        """Bytes held now that belong to a part."""
        return self._held[part]

    def mark(self, module: torch.nn.Module, part: str) -> None:
        """What this module's forward saves, and the W's of its parameters, belong to ``part``."""
        for parameter in module.parameters():
            self._part_of_parameter[id(parameter)] = part

        def enter(*_: Any) -> None:
            self._parts.append(part)

        def leave(*_: Any) -> None:
            self._parts.pop()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def part_of(self, parameter: torch.nn.Parameter) -> str:
        """The part that the parameter's module was marked as belonging to."""
        return self._part_of_parameter.get(id(parameter), "")

    def hold(self, tensor: torch.Tensor, part: str | None = None) -> Hold | None:
        """Count the tensor's storage while the result lives; None if it is excluded.

        ``part`` defaults to that of the marked module which is running.
        """
        key = _key(tensor)
        if key in self._excluded:
            return None
        storage = self._storages.get(key)
        if storage is None:
            nbytes = tensor.untyped_storage().nbytes()
            storage = _Storage(nbytes, self._parts[-1] if part is None else part)
            self._storages[key] = storage
            self._held[storage.part] += nbytes
        storage.holders += 1
        # Detached: a hold on a function's own output must not keep the function alive.
        return Hold(tensor.detach(), lambda: self._release(key))

    def _release(self, key: int) -> None:
        storage = self._storages[key]
        storage.holders -= 1
        if not storage.holders:
            del self._storages[key]
            self._held[storage.part] -= storage.nbytes

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While open, what autograd saves is held, for as long as autograd keeps it."""

        def pack(tensor: torch.Tensor) -> Hold | torch.Tensor:
            return self.hold(tensor) or tensor.detach()  # detached, as what is held is

        def unpack(packed: Hold | torch.Tensor) -> torch.Tensor:
            return packed.tensor if isinstance(packed, Hold) else packed

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield


def _key(tensor: torch.Tensor) -> int:
    """Of the tensor's storage; unique as long as the storage lives."""
    key: int = tensor.untyped_storage()._cdata
    return key


class Pending(Protocol):
    """What one layer leaves for W; `runtime.weight_grad.Pending` is such a thing."""

    @property
    def parameters(self) -> tuple[torch.nn.Parameter, ...]: ...
    @property
    def held(self) -> tuple[torch.Tensor, ...]: ...


@dataclass(slots=True)
class CountedCompute:
    """A `runtime.interpreter.Compute` that counts what another one's passes keep.

    Args:
        inner: computes.
        counter: counts.
        pending: what the B of (chunk, microbatch) left for its W (`WeightGradStore.pending`).
        split_chunks: those that leave anything.
        part: of the model, to which chunks' inputs and outputs belong; the model's own output, the
            loss, belongs to none.
    """

    inner: Compute
    counter: ActivationCounter
    pending: Callable[[int, int], Iterable[Pending]]
    split_chunks: Container[int] = ()
    part: str = ""
    _between_f_and_b: dict[tuple[int, int], list[Hold | None]] = field(default_factory=dict)
    _between_b_and_w: dict[tuple[int, int], list[Hold | None]] = field(default_factory=dict)

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with self.counter.saving():
            output, message = self.inner.forward(chunk, microbatch, input)
        holds = [self.counter.hold(output, self.part if message is not None else "")]
        if input is not None:
            holds.append(self.counter.hold(input, self.part))
        self._between_f_and_b[chunk, microbatch] = holds
        return output, message

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        with self.counter.saving():  # recomputation within B saves here
            gradient = self.inner.backward(chunk, microbatch, input, output, output_grad)
        if chunk in self.split_chunks:
            self._hold_pending(chunk, microbatch)
        del self._between_f_and_b[chunk, microbatch]
        return gradient

    def recompute(self, chunk: int, microbatch: int) -> None:
        with self.counter.saving():
            self.inner.recompute(chunk, microbatch)

    def _hold_pending(self, chunk: int, microbatch: int) -> None:
        self._between_b_and_w[chunk, microbatch] = [
            self.counter.hold(tensor, self.counter.part_of(one.parameters[0]))
            for one in self.pending(chunk, microbatch)
            for tensor in one.held
        ]

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        # W drops a layer's tensors as it goes: they must not live on in a count.
        self._between_b_and_w.pop((chunk, microbatch), None)
        self.inner.weight(chunk, microbatch, part, parts)
        if parts > 1:
            self._hold_pending(chunk, microbatch)

    def buffer(self, flow: Flow) -> torch.Tensor:
        return self.inner.buffer(flow)

    def finalize(self) -> None:
        self.inner.finalize()


@dataclass(frozen=True, slots=True)
class PassRecord:
    """Bytes held before and after a pass."""

    what: Pass
    before: int
    after: int


@dataclass(slots=True)
class PassMemory:
    """An `runtime.interpreter.Observer` that notes ``held()`` before and after each pass.

    These are the moments that count in `zero_bubble.simulate`: there, memory is taken as F starts
    and freed as B and W end, so that the most is held after some pass.
    """

    held: Callable[[], int]
    records: list[PassRecord] = field(default_factory=list)
    _before: int = 0

    def before(self, instruction: Instruction) -> None:
        self._before = self.held()

    def after(self, instruction: Instruction) -> None:
        if isinstance(instruction, Run):
            self.records.append(PassRecord(instruction.what, self._before, self.held()))

    @property
    def peak(self) -> int:
        """Most bytes held after a pass; 0 without any."""
        return max((one.after for one in self.records), default=0)

    def amounts(self, chunk: int, microbatch: int = 0) -> tuple[int, int]:
        """(M_B, M_W) of a chunk, in bytes: what a microbatch adds in F, and has left after B.

        LookupError if F or B (or BW) of it has not run.
        """
        change = {
            one.what.kind: one.after - one.before
            for one in self.records
            if (one.what.chunk, one.what.microbatch) == (chunk, microbatch)
        }
        backward = change[Kind.B] if Kind.B in change else change[Kind.BW]
        return change[Kind.F], change[Kind.F] + backward
