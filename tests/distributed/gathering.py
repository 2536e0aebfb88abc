"""Parameters and optimizer state under names that do not depend on where a chunk lies.

A rank cuts what it holds into pieces (`pieces`, in the rank), pytest's process puts those of all
ranks together again (`assemble`). A layer is named by its number in the model, so that two runs
compare whatever their placement: ``decoder.layers.3.mlp.linear_fc1.weight/exp_avg``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["TRAINED", "Piece", "assemble", "named_parameters", "pieces"]

TRAINED = ("main", "exp_avg", "exp_avg_sq", "step")
"""What a parameter has beside its own value, when Adam trains it."""
LAYER = re.compile(r".*\bdecoder\.layers\.\d+(?=\.)")
EXPERT = re.compile(r"(.*)\.experts\.local_experts\.(\d+)(?=\.)")


class Piece(NamedTuple):
    """Consecutive elements of a flattened tensor: all of them, or what a distributed optimizer
    keeps on this data-parallel rank."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    values: Any
    """A flat tensor."""


def pieces(model: list[Any], optimizer: Any) -> Iterator[Piece]:
    """Everything this rank holds. TypeError for an optimizer whose parameters are not known."""
    import torch
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    several = parallel_state.get_tensor_model_parallel_world_size() > 1
    expert_rank = parallel_state.get_expert_tensor_parallel_rank()
    several_experts = parallel_state.get_expert_tensor_parallel_world_size() > 1
    suffix = f"@tp{rank}" if several else ""
    expert_suffix = f"@tp{expert_rank}" if several_experts else ""
    names: dict[Any, str] = {}
    for chunk in model:
        for name, parameter in named_parameters(chunk):
            names[parameter] = name + (expert_suffix if EXPERT.match(name) else suffix)
            kind = "value" if parameter.requires_grad else "frozen"
            yield _piece(f"{names[parameter]}/{kind}", parameter.shape, 0, parameter)
    for parameter, start, state, step in _trained(optimizer):
        name = names[parameter]
        for key, values in state.items():
            yield _piece(f"{name}/{key}", parameter.shape, start, values)
        yield _piece(f"{name}/step", (), 0, torch.as_tensor(step))


def assemble(ranks: Iterable[Iterable[Piece]]) -> dict[str, Any]:
    """The whole tensors by name, from the pieces of all ranks.

    AssertionError if ranks that hold the same elements differ, if elements are missing, or if a
    parameter lacks its optimizer state.
    """
    import torch

    parts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in itertools.chain.from_iterable(ranks):
        assert shapes.setdefault(piece.name, piece.shape) == piece.shape, piece.name
        seen = parts[piece.name].setdefault(piece.start, piece.values)
        assert torch.equal(seen, piece.values), f"replicas of {piece.name} differ"
    whole = {}
    for name, found in parts.items():
        ends = 0
        for start in sorted(found):
            assert start == ends, f"{name} has elements up to {ends}, then from {start}"
            ends += found[start].numel()
        total = math.prod(shapes[name])
        assert ends == total, f"{name} has {ends} elements of {total}"
        flat = torch.cat([found[start] for start in sorted(found)])
        whole[name] = flat.view(shapes[name])
    parameters = [name.removesuffix("/value") for name in whole if name.endswith("/value")]
    for parameter, key in itertools.product(parameters, TRAINED):
        assert f"{parameter}/{key}" in whole, f"{parameter} has no {key}"
    return whole


def _piece(name: str, shape: Iterable[int], start: int, values: Any) -> Piece:
    return Piece(name, tuple(shape), start, values.detach().reshape(-1).clone())


def named_parameters(chunk: Any) -> Iterator[tuple[str, Any]]:
    """(name in the model, parameter) of a chunk, without what wrappers put before the name.

    Layers and experts have their numbers in the model.
    """
    modules = dict(chunk.named_modules())
    for name, parameter in chunk.named_parameters():
        layer, expert = LAYER.match(name), EXPERT.match(name)
        if expert is not None:
            number = modules[expert[1]].local_expert_indices[int(expert[2])]
            name = f"{name[: expert.start(2)]}{number}{name[expert.end() :]}"
        if layer is not None:
            number = modules[layer[0]].layer_number - 1  # Megatron counts from 1
            name = f"decoder.layers.{number}{name[layer.end() :]}"
        while name.startswith("module."):
            name = name.removeprefix("module.")
        yield name, parameter


def _trained(optimizer: Any) -> Iterator[tuple[Any, int, dict[str, Any], int]]:
    """(parameter of the model, start within it, state, step) of each that this rank updates.

    The state is what the inner optimizer updates in the parameter's place (``main``), and the
    inner optimizer's own tensors for it, by name.
    """
    if optimizer is None:  # not one step was tried
        return
    if hasattr(optimizer, "chained_optimizers"):
        for member in optimizer.chained_optimizers:
            yield from _trained(member)
        return
    inner = optimizer.optimizer
    if inner is None:  # nothing to train on this rank
        return
    groups = inner.param_groups
    steps = {main: group.get("step", 0) for group in groups for main in group["params"]}
    for parameter, start, main in _pairs(optimizer):
        yield parameter, start, {"main": main, **inner.state.get(main, {})}, steps[main]


def _pairs(optimizer: Any) -> Iterator[tuple[Any, int, Any]]:
    """(parameter of the model, start within it, what the inner optimizer updates in its place)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    def flat(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
        return itertools.chain.from_iterable(groups)

    if isinstance(optimizer, DistributedOptimizer):
        models = flat(optimizer.model_float16_groups), flat(optimizer.model_fp32_groups)
        shards = flat(optimizer.shard_fp32_from_float16_groups), flat(optimizer.shard_fp32_groups)
        pairs = zip(itertools.chain(*models), itertools.chain(*shards), strict=True)
        for parameter, shard in pairs:
            yield parameter, optimizer._get_model_param_range_map(parameter)["param"].start, shard
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        copies = flat(optimizer.fp32_from_float16_groups)
        for parameter, main in zip(flat(optimizer.float16_groups), copies, strict=True):
            yield parameter, 0, main
        for parameter in flat(optimizer.fp32_from_fp32_groups):
            yield parameter, 0, parameter
    elif isinstance(optimizer, FP32Optimizer):
        for group in optimizer.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter
    else:
        raise TypeError(f"which parameters a {type(optimizer).__name__} updates is not known here")
