"""What test_recomputation.py asks, for a process in CPU mode.

The model is a row of layers with dropout, each in Megatron's own ``checkpoint``; the reference runs
it without ours.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random as megatron_random

from megatron.zero_bubble.runtime.recomputation import Recomputations, recomputable

MICROBATCHES, LAYERS, SIZE = 3, 3, 8


class Layers(torch.nn.Module):  # type: ignore[misc]
    """``runs`` counts how often a layer has run, by layer."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weights = torch.nn.ParameterList(
            torch.randn(SIZE, SIZE, generator=generator) for _ in range(LAYERS)
        )
        self.checkpoint = checkpoint
        self.runs = [0] * LAYERS
        self.made: list[weakref.ref[torch.Tensor]] = []

    def layer(self, number: int, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Draws from both of Megatron's generators; the second output is no tensor."""
        self.runs[number] += 1
        hidden = torch.nn.functional.dropout(input @ self.weights[number], 0.3)
        with megatron_random.get_cuda_rng_tracker().fork():
            hidden = torch.nn.functional.dropout(hidden.sigmoid(), 0.2)
        output = input + hidden
        self.made.append(weakref.ref(output))
        return output, None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for number in range(LAYERS):
            input, _ = self.checkpoint(
                lambda given, number=number: self.layer(number, given), False, input
            )
        return input


def _seed() -> None:
    torch.manual_seed(5)
    megatron_random.model_parallel_cuda_manual_seed(5)


def _inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(4, SIZE, generator=generator).requires_grad_() for _ in range(MICROBATCHES)]


def _train(order: Sequence[str], ours: bool) -> dict[str, Any]:
    """Run passes such as F0, R0, B0; what came of it, random states included."""
    checkpoint = megatron_random.checkpoint
    model = Layers(recomputable(checkpoint) if ours else checkpoint)
    recomputations, inputs = Recomputations(), _inputs()
    outputs: dict[int, torch.Tensor] = {}
    runs_after = {}
    _seed()
    for one in order:
        kind, microbatch = one[0], int(one[1:])
        if kind == "F":
            with recomputations.collecting(0, microbatch) if ours else nullcontext():
                outputs[microbatch] = model(inputs[microbatch])
        elif kind == "R":
            recomputations.run(0, microbatch)
        else:
            outputs.pop(microbatch).square().sum().backward()
        runs_after[one] = sum(model.runs)
    values = [one.grad for one in (*model.weights, *inputs)]
    states = [torch.get_rng_state(), *megatron_random.get_cuda_rng_tracker().get_states().values()]
    gc.collect()
    return {
        "values": values,
        "states": states,
        "runs_after": runs_after,
        "alive": sum(one() is not None for one in model.made),
    }


def compare(order: Sequence[str]) -> None:
    """An order with R's gives the bits of the same order without them, on Megatron's checkpoint."""
    expected = _train([one for one in order if one[0] != "R"], ours=False)
    actual = _train(order, ours=True)
    for name in ("values", "states"):
        for index, (left, right) in enumerate(zip(expected[name], actual[name], strict=True)):
            assert torch.equal(left, right), f"{name} {index}"
    assert actual["alive"] == expected["alive"] == 0
    # R runs the layers, B then none; where there is no R, B runs them.
    before = 0
    for one in order:
        runs = actual["runs_after"][one] - before
        repeated = one[0] == "B" and f"R{one[1:]}" not in order
        assert runs == (LAYERS if one[0] in "FR" or repeated else 0), one
        before = actual["runs_after"][one]


def keeps_no_outputs() -> None:
    """Between R and B the layers' outputs, whose values are those of F, are not held again."""
    model = Layers(recomputable(megatron_random.checkpoint))
    recomputations = Recomputations()
    _seed()
    with recomputations.collecting(0, 0):
        output = model(_inputs()[0])
    model.made.clear()
    recomputations.run(0, 0)
    gc.collect()
    assert len(model.made) == LAYERS
    assert all(one() is None for one in model.made)
    output.sum().backward()


def left_to_megatron() -> None:
    """Outside of an F with an R, and where inputs are spread over ranks, nothing is ours."""
    calls = []

    def original(function: Any, distribute: bool, *inputs: Any) -> Any:
        calls.append(distribute)
        return function(*inputs)

    checkpoint, recomputations = recomputable(original), Recomputations()
    one = torch.ones(1, requires_grad=True)
    checkpoint(torch.square, False, one)
    with recomputations.collecting(0, 0):
        checkpoint(torch.square, True, one)
        with torch.no_grad():
            checkpoint(torch.square, False, one)
        checkpoint(torch.square, False, one.detach())  # behind frozen parameters
    assert calls == [False, True, False, False]
    recomputations.run(0, 0)
