"""A small machine that runs one stage's instructions and knows no schedule by name."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.zero_bubble.errors import PipelineError
from megatron.zero_bubble.runtime.recording import Recording
from megatron.zero_bubble.runtime.transport import Receipt, Transport
from zero_bubble.program import Finalize, Flow, HandOver, Instruction, Receive, Run, Send
from zero_bubble.schedule import Kind, Pass

__all__ = ["Compute", "Event", "Interpreter", "Observer"]


class Compute(Protocol):
    """What a stage computes. Tensors are None where the model begins or ends."""

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(output to keep for the backward pass, message for the next chunk)."""

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """B of a chunk that is split, else the fused backward; the gradient of the input."""

    def recompute(self, chunk: int, microbatch: int) -> None:
        """R: once more what F did not keep for B."""

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        """W, or one of the shares that it is cut into."""

    def buffer(self, flow: Flow) -> torch.Tensor:
        """An empty tensor for a message of this flow."""

    def finalize(self) -> None:
        """Reduce the gradients, all passes being done."""


class Observer(Protocol):
    """Told of every instruction, on the host, before and after."""

    def before(self, instruction: Instruction) -> None: ...
    def after(self, instruction: Instruction) -> None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """An executed instruction. Host times in ns; ``waited_ns`` of them were for a message."""

    instruction: Instruction
    begin_ns: int
    end_ns: int
    waited_ns: int


@dataclass(slots=True)
class Interpreter:
    """Runs a stage's instructions; all its state is that of one iteration."""

    stage: int
    compute: Compute
    transport: Transport
    split_chunks: frozenset[int] = frozenset()
    """Chunks whose fused backward, should the program have one, runs as B and then W."""
    keep_for_backward: bool = True
    observer: Observer | None = None
    recording: Recording | None = None
    """Notes when passes run on the device; None costs nothing."""
    log: list[Event] = field(default_factory=list)
    _posted: dict[tuple[Flow, int, int], Receipt] = field(default_factory=dict)
    _arrived: dict[tuple[Flow, int, int], torch.Tensor] = field(default_factory=dict)
    _produced: dict[tuple[Flow, int, int], torch.Tensor] = field(default_factory=dict)
    _kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = field(
        default_factory=dict
    )
    _waited_ns: int = 0

    def run(self, instructions: Sequence[Instruction]) -> None:
        """Execute all of a batch."""
        self.execute(instructions)
        self.finish()

    def execute(self, instructions: Sequence[Instruction]) -> None:
        """Execute a part of a batch. PipelineError says on which pass and channel a wait failed."""
        for instruction in instructions:
            if self.observer is not None:
                self.observer.before(instruction)
            self._waited_ns = 0
            begin = time.perf_counter_ns()
            try:
                self._execute(instruction)
            except PipelineError as error:
                raise PipelineError(
                    f"stage {self.stage}, {_where(instruction)}: {error}"
                ) from error
            except Exception as error:
                error.add_note(f"zero-bubble: raised on stage {self.stage}, {_where(instruction)}")
                raise
            end = time.perf_counter_ns()
            self.log.append(Event(instruction, begin, end, self._waited_ns))
            if self.observer is not None:
                self.observer.after(instruction)

    def finish(self) -> None:
        """Wait until all messages have left."""
        try:
            self.transport.drain()
        except PipelineError as error:
            raise PipelineError(f"stage {self.stage}, after its last pass: {error}") from error

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Run(what, part, parts):
                if self.recording is None:
                    self._passes(what, part, parts)
                else:
                    self.recording.begin()
                    self._passes(what, part, parts)
                    self.recording.end(what, parts)
            case Receive(channel, microbatch, chunk):
                buffer = self.compute.buffer(channel.flow)
                self._posted[channel.flow, chunk, microbatch] = self.transport.receive(
                    channel, buffer
                )
            case Send(channel, microbatch, chunk):
                self.transport.send(channel, self._produced.pop((channel.flow, chunk, microbatch)))
            case HandOver(flow, microbatch, source, target):
                self._arrived[flow, target, microbatch] = self._produced.pop(
                    (flow, source, microbatch)
                )
            case Finalize():
                if self.recording is not None:
                    self.recording.begin()
                self.compute.finalize()
                if self.recording is not None:
                    self.recording.end("finalize")

    def _passes(self, one: Pass, part: int, parts: int) -> None:
        match one.kind:
            case Kind.F:
                self._forward(one.chunk, one.microbatch)
            case Kind.B:
                self._backward(one.chunk, one.microbatch)
            case Kind.R:
                self.compute.recompute(one.chunk, one.microbatch)
            case Kind.W:
                self.compute.weight(one.chunk, one.microbatch, part, parts)
            case Kind.BW:
                self._backward(one.chunk, one.microbatch)
                if one.chunk in self.split_chunks:
                    self.compute.weight(one.chunk, one.microbatch)

    def _forward(self, chunk: int, microbatch: int) -> None:
        input = self._take(Flow.FORWARD, chunk, microbatch)
        if input is not None and self.keep_for_backward:
            input.requires_grad_()
        output, message = self.compute.forward(chunk, microbatch, input)
        if self.keep_for_backward:
            self._kept[chunk, microbatch] = (input, output)
        if message is not None:
            self._produced[Flow.FORWARD, chunk, microbatch] = message

    def _backward(self, chunk: int, microbatch: int) -> None:
        output_grad = self._take(Flow.BACKWARD, chunk, microbatch)
        input, output = self._kept.pop((chunk, microbatch))
        input_grad = self.compute.backward(chunk, microbatch, input, output, output_grad)
        if input_grad is not None:
            self._produced[Flow.BACKWARD, chunk, microbatch] = input_grad

    def _take(self, flow: Flow, chunk: int, microbatch: int) -> torch.Tensor | None:
        receipt = self._posted.pop((flow, chunk, microbatch), None)
        if receipt is None:
            return self._arrived.pop((flow, chunk, microbatch), None)
        begin = time.perf_counter_ns()
        message = self.transport.wait(receipt)
        self._waited_ns += time.perf_counter_ns() - begin
        if self.recording is not None:
            self.recording.ready()
        return message


def _where(instruction: Instruction) -> str:
    if isinstance(instruction, Run):
        one = instruction.what
        return f"pass {one} ({one.kind} of microbatch {one.microbatch}, chunk {one.chunk})"
    return f"instruction {instruction}"
