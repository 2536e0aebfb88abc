"""Bytes kept for the backward: counts of small graphs, beside sums made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron.zero_bubble.profile.activations import (
    ActivationCounter,
    CountedCompute,
    PassMemory,
    PassRecord,
    Pending,
)
from megatron.zero_bubble.runtime.interpreter import Interpreter
from tests.unit.orders import parse
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, linear
from zero_bubble.program import Flow
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import simulate

SIZE = 6
UNIT = 8 * SIZE  # bytes of a tensor of SIZE doubles
ONE_NUMBER = 8


def leaf() -> torch.Tensor:
    return torch.rand(SIZE, dtype=torch.float64, requires_grad=True)


def test_a_saved_tensor_counts_until_its_backward() -> None:
    counter, x = ActivationCounter(), leaf()
    with counter.saving():
        loss = (2 * x).sin().sum()  # sin saves 2x; the others save nothing
    assert counter.held == UNIT
    loss.backward()
    assert counter.held == 0
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * (2 * x.detach()).cos(), rtol=0, atol=0)


def test_a_storage_counts_once_and_until_its_last_user_is_gone() -> None:
    counter, x = ActivationCounter(), leaf()
    with counter.saving():
        sine, cosine = x.sin().sum(), x.view(2, 3).t().cos().sum()
    assert counter.held == UNIT
    sine.backward()
    assert counter.held == UNIT
    cosine.backward()
    assert counter.held == 0


def test_a_view_counts_as_the_storage_that_it_keeps() -> None:
    counter = ActivationCounter()
    large = torch.rand(10, SIZE, dtype=torch.float64, requires_grad=True)
    with counter.saving():
        kept = large[3].sin()
    assert counter.held == 10 * UNIT
    del kept
    assert counter.held == 0


def test_a_function_that_saves_its_output_dies_with_it() -> None:
    """Without the garbage collector, that is: a hold must not make a cycle."""
    counter, x = ActivationCounter(), leaf()
    with counter.saving():
        output = x.exp()
    assert counter.held == UNIT
    del output
    assert counter.held == 0


def test_parameters_do_not_count_nor_do_views_of_them() -> None:
    weight, x = torch.nn.Parameter(torch.rand(SIZE, dtype=torch.float64)), leaf()
    counter = ActivationCounter([weight])
    with counter.saving():
        loss = (x.sin() * weight.detach().view(-1) * weight).sum()
    # x for sin, and for the second weight's gradient what it is multiplied by.
    assert counter.held == 2 * UNIT
    loss.backward()
    assert counter.held == 0
    torch.testing.assert_close(weight.grad, x.detach().sin() * weight.detach())


def test_what_was_excluded_is_never_taken_for_a_later_tensor() -> None:
    """A storage that is freed leaves its address to the next of its size."""
    counter = ActivationCounter([torch.rand(SIZE, dtype=torch.float64)])
    holds = []
    for count in range(1, 20):
        holds.append(counter.hold(torch.rand(SIZE, dtype=torch.float64)))
        assert counter.held == count * UNIT


def test_parts_are_those_of_the_marked_module_that_runs() -> None:
    class Sine(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin()

    counter, marked, x = ActivationCounter(), Sine(), leaf()
    counter.mark(marked, "marked")
    with counter.saving():
        first = x.cos()  # x: no part
        second = marked(first)  # first: marked
        third = torch.cat([second, second]).sin()  # no part, two units
        again = marked(x)  # x has its part already
    assert (counter.held_in("marked"), counter.held_in(""), counter.held) == (
        UNIT,
        3 * UNIT,
        4 * UNIT,
    )
    del third, again
    assert (counter.held_in("marked"), counter.held_in("")) == (UNIT, UNIT)


def test_a_marked_module_that_fails_is_left() -> None:
    counter, module = ActivationCounter(), torch.nn.Linear(2, 2)
    counter.mark(module, "marked")
    assert counter.part_of(module.weight) == "marked"
    with pytest.raises(RuntimeError):
        module(torch.zeros(3))
    hold = counter.hold(leaf())
    assert hold is not None
    assert counter.held_in("") == UNIT
    hold.release()
    hold.release()  # once is enough, twice is harmless
    assert counter.held == 0


class _Scale(torch.autograd.Function):  # type: ignore[misc]
    """``weight * x`` whose backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, left: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        ctx.left.append(Left((torch.nn.Parameter(weight),), (x.detach(), gradients[0])))
        return gradients[0] * weight, None, None


@dataclass(frozen=True)
class Left:
    parameters: tuple[torch.nn.Parameter, ...]
    held: tuple[torch.Tensor, ...]


@dataclass
class ScaleCompute:
    """Chunks of ``sin(exp(scale * (2 * x)))``, the last one's summed to a loss; W's only drop."""

    chunks: int
    scale: torch.Tensor = field(default_factory=lambda: torch.ones(SIZE, dtype=torch.float64))
    left: dict[tuple[int, int], list[Any]] = field(default_factory=dict)

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        left = self.left[chunk, microbatch] = []
        doubled = 2 * (leaf() if input is None else input)  # saves nothing
        output = _Scale.apply(doubled, self.scale, left).exp().sin()
        if chunk == self.chunks - 1:
            return output.sum(), None
        return output, output.detach()

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        torch.autograd.backward(output, output_grad)
        return None if input is None else input.grad

    def recompute(self, chunk: int, microbatch: int) -> None:
        raise AssertionError("everything is kept")

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        del self.left[chunk, microbatch]

    def pending(self, chunk: int, microbatch: int) -> Iterable[Pending]:
        return self.left[chunk, microbatch]

    def buffer(self, flow: Flow) -> torch.Tensor:
        raise AssertionError("a single stage receives nothing")

    def finalize(self) -> None:
        pass


def test_m_b_m_w_and_peak_of_a_stage() -> None:
    """Between F and B the doubled input, exp's result and the loss; for W the doubled input and the
    gradient of the product."""
    m_b, m_w = 2 * UNIT + ONE_NUMBER, 2 * UNIT
    schedule = parse(linear(1), 3, "0F0 0F1 0I0 0F2 0I1 0W0 0W1 0I2 0W2")
    memory, counter = counted(schedule)
    after = [m_b, 2 * m_b, m_b + m_w, 2 * m_b + m_w, m_b + 2 * m_w, m_b + m_w, m_b, m_w, 0]
    assert [one.after for one in memory.records] == after
    assert memory.records[1] == PassRecord(Pass(Kind.F, 1), m_b, 2 * m_b)
    assert [memory.amounts(0, microbatch) for microbatch in range(3)] == [(m_b, m_w)] * 3
    costs = Costs.uniform(linear(1), 1, 1, 1, m_b=m_b, m_w=m_w)
    assert (memory.peak,) == simulate(schedule, costs).peak_memory == (2 * m_b + m_w,)
    assert counter.held == 0


def test_a_fused_backward_leaves_nothing() -> None:
    memory, counter = counted(parse(linear(1), 1, "0F0 0B0"), split=False)
    assert memory.amounts(0) == (2 * UNIT + ONE_NUMBER, 0)
    assert counter.held == 0


def test_what_a_chunk_hands_over_on_its_stage_counts_once() -> None:
    """The turn of a V: the output of chunk 0 is the input of chunk 1, and both keep it."""
    schedule = parse(Placement(((0, 1),)), 1, "0F0 1F0 1I0 1W0 0I0 0W0")
    memory, counter = counted(schedule)
    # Chunk 0 keeps its doubled input, exp's result and its output; chunk 1 the first two of its
    # own, and the loss. W needs the doubled input and a gradient.
    assert memory.amounts(0) == (3 * UNIT, 2 * UNIT)
    assert memory.amounts(1) == (2 * UNIT + ONE_NUMBER, 2 * UNIT)
    assert memory.peak == 5 * UNIT + ONE_NUMBER
    assert counter.held == 0


def test_input_and_output_count_though_autograd_saves_neither() -> None:
    compute, counter = ScaleCompute(3), ActivationCounter()
    counting = CountedCompute(compute, counter, compute.pending, range(3), part="exchanged")
    input = leaf()
    output, message = counting.forward(1, 0, input)
    assert message is not None
    assert counter.held_in("exchanged") == 2 * UNIT
    assert counter.held_in("") == 3 * UNIT  # doubled input, exp's result, scale
    counting.backward(1, 0, input, output, torch.ones_like(output))
    assert (counter.held_in("exchanged"), counter.held_in("")) == (0, 2 * UNIT)
    _, message = counting.forward(2, 0, leaf())
    assert message is None
    assert counter.held_in("exchanged") == UNIT  # a loss is none that stages exchange


class NoTransport:
    """Of a pipeline of one stage."""

    def drain(self) -> None:
        pass


def counted(schedule: Schedule, *, split: bool = True) -> tuple[PassMemory, ActivationCounter]:
    """What was noted of a single stage."""
    chunks = range(schedule.placement.num_chunks(0))
    compute = ScaleCompute(len(chunks))
    counter = ActivationCounter([compute.scale])
    memory = PassMemory(lambda: counter.held)
    counting = CountedCompute(compute, counter, compute.pending, chunks if split else ())
    transport: Any = NoTransport()
    Interpreter(0, counting, transport, observer=memory).run(lower(schedule).instructions[0])
    return memory, counter
