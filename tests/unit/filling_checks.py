"""W's that hide the reductions of tensor-parallel B's, on two ranks (tensor_parallel_rank.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.runtime.layers import split_linears
from megatron.zero_bubble.runtime.weight_grad import Filler, WeightGradStore
from tests.unit.split_linear_checks import BATCH, DTYPES, IN, OUT, SEQUENCE, same, wrap

# Passes of microbatches in order; a B with the microbatch of the W that follows it.
PASSES = (
    *(("B", 0, None), ("B", 1, 0), ("W", 0, None)),
    *(("B", 2, 1), ("W", 1, None), ("W", 2, None)),
    *(("B", 3, 3), ("W", 3, None)),
)
MICROBATCHES = 4


class Block(torch.nn.Module):  # type: ignore[misc]
    """A column-parallel layer, whose B reduces, before a row-parallel one."""

    def __init__(self, dtype: torch.dtype, *, sequence_parallel: bool) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1,
            hidden_size=IN,
            num_attention_heads=2,
            use_cpu_initialization=True,
            params_dtype=dtype,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            sequence_parallel=sequence_parallel,
        )
        torch.manual_seed(3)
        common: dict[str, Any] = {
            "config": self.config,
            "init_method": self.config.init_method,
            "bias": False,
        }
        self.column = ColumnParallelLinear(IN, OUT, gather_output=False, **common)
        self.row = RowParallelLinear(OUT, IN, input_is_parallel=True, skip_bias_add=False, **common)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.row(torch.tanh(self.column(input)[0]))[0]
        return hidden


def filled(dtype: str, *, sequence_parallel: bool) -> None:
    """A B computes one gradient of the W that follows between start and end of its reduction; all
    gradients are those of Megatron's own layers."""
    blocks = [Block(DTYPES[dtype], sequence_parallel=sequence_parallel) for _ in range(2)]
    models = [wrap(one) for one in blocks]
    store = WeightGradStore()
    split_linears([models[1]], store)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    draw = torch.Generator().manual_seed(5)
    shape = (SEQUENCE // ranks if sequence_parallel else SEQUENCE, BATCH, IN)
    inputs = [torch.randn(shape, generator=draw).to(DTYPES[dtype]) for _ in range(MICROBATCHES)]

    expected = []
    for one in inputs:
        leaf = one.clone().requires_grad_()
        models[0](leaf).float().square().sum().backward()
        expected.append(leaf.grad)

    leaves, losses = [one.clone().requires_grad_() for one in inputs], []
    for leaf in leaves:
        with store.deferred(True):
            losses.append(models[1](leaf).float().square().sum())
    for kind, number, lender in PASSES:
        if kind == "W":
            store.run(0, number)
            continue
        with (
            store.deferred(True),
            store.collecting(0, number),
            nullcontext() if lender is None else store.lending(0, lender),
            _told() as told,
        ):
            losses[number].backward()
        fills = [] if lender is None else ["fill"]
        same(f"what B {number} does", ["reduce", *fills, "wait"], told)
        if lender is not None:
            same(f"left for W {lender}", 1, len(store.pending(0, lender)))
    for number, (leaf, gradient) in enumerate(zip(leaves, expected, strict=True)):
        same(f"gradient of input {number}", gradient, leaf.grad)
    same("weight gradients computed", 2 * MICROBATCHES, store.computed)
    for name, left in blocks[0].named_parameters():
        right = blocks[1].get_parameter(name)
        same(f"gradient of {name}", left.main_grad, right.main_grad)


@contextmanager
def _told() -> Iterator[list[str]]:
    """What happens meanwhile, in order: a reduction starts, a gradient fills it, it is waited for.

    Reductions of the layers' backward only, which are the asynchronous ones.
    """
    told: list[str] = []

    class Handle:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def wait(self) -> None:
            told.append("wait")
            self.inner.wait()

    def telling(reduce: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Any, **options: Any) -> Any:
            handle = reduce(*tensors, **options)
            if not options.get("async_op"):
                return handle
            told.append("reduce")
            return Handle(handle)

        return call

    def fill(self: WeightGradStore, filler: Filler) -> None:
        told.append("fill")
        original(self, filler)

    original = WeightGradStore.fill
    with (
        mock.patch.object(WeightGradStore, "fill", fill),
        mock.patch.object(torch.distributed, "all_reduce", telling(torch.distributed.all_reduce)),
        mock.patch.object(
            megatron_layers,
            "dist_reduce_scatter_func",
            telling(megatron_layers.dist_reduce_scatter_func),
        ),
    ):
        yield told
