"""The common start of the turns of tools/profile/one_gpu_pipeline.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tools.profile.one_gpu.start import Data, Start, digests, named_parameters


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear = torch.nn.Linear(3, 3)


class Chunk(torch.nn.Module):  # type: ignore[misc]
    """Layers with these numbers in the model, counted from 1, wrapped as Megatron does."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.module = torch.nn.Module()
        self.module.decoder = torch.nn.Module()
        self.module.decoder.layers = torch.nn.ModuleList(map(Layer, numbers))
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.zeros_(parameter)


class Optimizer:
    """Adam with main parameters, as far as a start needs it."""

    def __init__(self, models: list[Chunk]) -> None:
        self.parameters = [one for model in models for one in model.parameters()]
        self.main = [one.detach().clone() for one in self.parameters]
        inner = torch.optim.AdamW(self.parameters, lr=0.1)
        self.chained_optimizers = [SimpleNamespace(optimizer=inner)]

    def train(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.chained_optimizers[0].optimizer.step()

    def reload_model_params(self) -> None:
        self.main = [one.detach().clone() for one in self.parameters]


def started(*chunks: Chunk) -> tuple[Optimizer, dict[str, torch.Tensor]]:
    optimizer = Optimizer(list(chunks))
    start = Start(chunks, optimizer)
    optimizer.train()
    start.restore()
    named = {name: value for one in chunks for name, value in named_parameters(one)}
    return optimizer, {name: value.detach().clone() for name, value in named.items()}


def test_weights_do_not_depend_on_where_layers_are() -> None:
    _, whole = started(Chunk(1, 2, 3, 4))
    _, outer = started(Chunk(1), Chunk(4))
    assert sorted(outer) == sorted(one for one in whole if ".0." in one or ".3." in one)
    for name, value in outer.items():
        assert torch.equal(value, whole[name]), name
    first, last = (whole[f"decoder.layers.{one}.linear.weight"] for one in (0, 3))
    assert not torch.equal(first, last)
    assert not whole["decoder.layers.0.linear.bias"].any()


def test_an_optimizer_forgets_and_has_the_models_parameters() -> None:
    optimizer, _ = started(Chunk(1, 2))
    state: dict[str, Any]
    for state in optimizer.chained_optimizers[0].optimizer.state.values():
        assert all(not value.any() for value in state.values()), state.keys()
    for main, parameter in zip(optimizer.main, optimizer.parameters, strict=True):
        assert torch.equal(main, parameter)


def test_a_digest_sees_a_single_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        chunk = Chunk(1).to(dtype)
        before = digests([chunk])
        weight = chunk.module.decoder.layers[0].linear.weight
        whole = torch.int32 if dtype is torch.float32 else torch.int16
        with torch.no_grad():
            weight.view(whole)[2, 1] ^= 1
        after = digests([chunk])
        changed = [name for name in before if before[name] != after[name]]
        assert changed == ["decoder.layers.0.linear.weight"]


def test_data_begin_anew_with_each_turn() -> None:
    data = Data([iter(range(9)), None], 4)
    for _ in range(2):
        first, second = data.again()
        assert list(first) == [0, 1, 2, 3]
        assert second is None
    assert list(Data(iter("abc"), 2).again()) == ["a", "b"]
    assert Data(None, 2).again() is None
