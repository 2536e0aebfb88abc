"""What test_delayed_layers.py asks of one layer, in a process that finds a stand-in for Transformer
Engine (or its real Python, see compiled_te.py): delayed against not delayed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import transformer_engine.pytorch as te
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.runtime.layers import split_linears
from megatron.zero_bubble.runtime.weight_grad import WeightGradStore
from tests.unit.split_linear_checks import (
    BATCH,
    DTYPES,
    HIDDEN,
    IN,
    MICROBATCHES,
    OUT,
    SEQUENCE,
    Microbatch,
    gradient,
    same,
    split,
    unsplit,
    waiting,
)

EXPERTS = 3


class Layer(torch.nn.Module):  # type: ignore[misc]
    """One layer of Transformer Engine, used as Megatron's wrappers use it: ``(output, None)``.

    ``bias``: "none"; "inside", where the layer adds it and computes its gradient with the weight's;
    "outside", where it comes back to be added, and has its gradient from autograd.
    """

    def __init__(
        self, kind: str, dtype: torch.dtype, *, bias: str, fused: bool, delayed: bool
    ) -> None:
        super().__init__()
        self.config = config(dtype)
        options: dict[str, Any] = {
            "bias": bias != "none",
            "return_bias": bias == "outside",
            "fuse_wgrad_accumulation": fused,
            "delay_wgrad_compute": delayed,
            "params_dtype": dtype,
        }
        torch.manual_seed(3)
        match kind:
            case "linear":
                self.inner: Any = te.Linear(IN, OUT, **options)
            case "norm and linear":
                self.inner = te.LayerNormLinear(IN, OUT, **options)
            case "grouped":
                self.inner = te.GroupedLinear(EXPERTS, IN, OUT, **options)
        for name, parameter in self.inner.named_parameters():
            if name.startswith("bias"):
                torch.nn.init.normal_(parameter)
        self.splits = [[SEQUENCE * BATCH - 5, 0, 5]] if kind == "grouped" else []

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        return [one for name, one in self.inner.named_parameters() if name.startswith("weight")]

    def forward(self, input: torch.Tensor) -> tuple[torch.Tensor, None]:
        output = self.inner(input, *self.splits)
        if not isinstance(output, tuple):
            return output, None
        output, bias = output
        if not self.splits:
            return output + bias, None
        parts = output.view(-1, OUT).split(self.splits[0])
        whole = torch.cat([part + one for part, one in zip(parts, bias, strict=True)])
        return whole.view(output.shape), None


def config(dtype: torch.dtype, **more: Any) -> TransformerConfig:
    return TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **({"bf16": dtype == torch.bfloat16} | more),
    )


def wrap(model: Any, *, delayed: bool, overlap: bool = False) -> DistributedDataParallel:
    """Under Megatron's DistributedDataParallel, told what the model's config says."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, delay_wgrad_compute=delayed
    )
    wrapped = DistributedDataParallel(model.config, ddp_config, model)
    wrapped.zero_grad_buffer()
    return wrapped


def compare(kind: str, *, dtype: str, bias: str, fused: bool, uses: int = 1) -> None:
    """Gradients are those of the layer that does not delay; weights wait for W, in DDP too."""
    models = []
    for delayed in (False, True):
        layer = Layer(kind, DTYPES[dtype], bias=bias, fused=fused, delayed=delayed)
        models.append(wrap(layer, delayed=delayed))
    reference, ours = models
    draw = torch.Generator().manual_seed(5)

    def random(size: int) -> torch.Tensor:
        return torch.randn(SEQUENCE, BATCH, size, generator=draw).to(DTYPES[dtype])

    batch = [
        Microbatch(tuple(random(IN) for _ in range(uses)), tuple(random(OUT) for _ in range(uses)))
        for _ in range(MICROBATCHES)
    ]
    store = WeightGradStore()
    same("layers split", ("module.inner",), split_linears([ours], store).split)
    weights = ours.module.weights

    def after_b() -> None:
        for weight in weights:
            same("main_grad after B", False, bool(weight.main_grad.any()))
            same("grad after B", None, weight.grad)
        same("weight gradients waiting", [uses] * MICROBATCHES, waiting(store))
        for (name, one), other in zip(reference.named_parameters(), ours.parameters(), strict=True):
            if "norm" in name or ("bias" in name and bias == "outside"):
                same(f"gradient of {name} after B", gradient(one), gradient(other))

    expected = unsplit(reference, batch)
    for number, pair in enumerate(zip(expected, split(ours, store, batch, after_b), strict=True)):
        same(f"gradient of input {number}", *pair)
    for (name, one), other in zip(reference.named_parameters(), ours.parameters(), strict=True):
        expert_without_rows = kind == "grouped" and name.endswith("1")
        same(f"{name} learns", not expert_without_rows, bool(one.main_grad.any()))
        same(f"gradient of {name} after W", one.main_grad, other.main_grad)
        same(f"what is left in {name}.grad", None, other.grad)
    same("weight gradients computed", uses * MICROBATCHES, store.computed)


def frozen(*, kind: str, bias: str, fused: bool, what: str) -> None:
    """Parameters that do not train get no gradient, and the others that of the undelayed layer.

    ``what``: how the names of the frozen ones begin.
    """
    models = []
    for delayed in (False, True):
        layer = Layer(kind, torch.float32, bias=bias, fused=fused, delayed=delayed)
        for name, parameter in layer.inner.named_parameters():
            parameter.requires_grad_(not name.startswith(what))
        models.append(wrap(layer, delayed=delayed))
    reference, ours = models
    batch = [
        Microbatch((torch.randn(SEQUENCE, BATCH, IN),), (torch.randn(SEQUENCE, BATCH, OUT),))
        for _ in range(MICROBATCHES)
    ]
    store = WeightGradStore()
    split_linears([ours], store)
    expected = unsplit(reference, batch)
    for number, pair in enumerate(zip(expected, split(ours, store, batch), strict=True)):
        same(f"gradient of input {number}", *pair)
    for (name, one), other in zip(reference.named_parameters(), ours.parameters(), strict=True):
        same(f"what is left in {name}.grad", None, other.grad)
        if one.requires_grad:
            same(f"gradient of {name}", one.main_grad, other.main_grad)


def shares() -> None:
    """A grouped layer's gradient, which is one product, runs in the last share of its weights."""
    layer = Layer("grouped", torch.float32, bias="none", fused=False, delayed=True)
    store = WeightGradStore()
    split_linears([layer], store)
    first, *_, last = layer.weights
    store.share_of = dict.fromkeys(layer.weights, 0) | {last: 2}
    with store.collecting(0, 0):
        layer(torch.randn(SEQUENCE, BATCH, IN, requires_grad=True))[0].sum().backward()
    for part, waits in ((0, 1), (1, 1), (2, 0)):
        store.run(0, 0, part, 4)
        same(f"left after share {part}", waits, len(store.pending(0, 0)))
        there = first.grad is not None and bool(first.grad.any())
        same(f"computed in share {part}", not waits, there)


def what_is_held(*, kind: str, fused: bool) -> None:
    """Of a use of the layer, input and gradient of the output are alive between B and W, and not
    what the input was made of; nothing is lent to a B."""
    layer = Layer(kind, torch.float32, bias="inside", fused=fused, delayed=True)
    model = wrap(layer, delayed=True)
    store = WeightGradStore()
    split_linears([model], store)
    leaves = []
    for microbatch in range(2):  # from the second on weights are known, and might be lent
        with store.collecting(0, microbatch), store.lending(0, microbatch):
            leaf = torch.randn(SEQUENCE, BATCH, IN, requires_grad=True)
            model(torch.tanh(leaf))[0].sum().backward()
            same("lent", None, store.take())
        leaves.append(weakref.ref(leaf))
        del leaf
    gc.collect()
    same("leaves alive", [None, None], [ref() for ref in leaves])
    (pending,) = store.pending(0, 0)
    rows = SEQUENCE * BATCH
    # Where the gradients go is a grouped layer's own memory, if it is not `main_grad`.
    made = EXPERTS * IN * OUT if kind == "grouped" and not fused else 0
    same("numbers held", rows * (IN + OUT) + made, sum(one.numel() for one in pending.held))
    same("nodes of the graph", set(), {one.grad_fn for one in pending.held} - {None})


def left_over_work_is_forgotten() -> None:
    """What an iteration that failed has left is not taken for the next one's."""
    layer = Layer("linear", torch.float32, bias="none", fused=False, delayed=True)
    store = WeightGradStore()
    split_linears([layer], store)
    for value in (5.0, 1.0):
        store.begin_iteration()
        with store.collecting(0, 0):
            input = torch.full((SEQUENCE, BATCH, IN), value, requires_grad=True)
            layer(input)[0].sum().backward()
    store.run(0, 0)
    expected = torch.full((OUT, IN), float(SEQUENCE * BATCH))
    same("the gradient", expected, layer.inner.weight.grad)


def the_rest_is_named() -> None:
    """A layer that does not delay is named, and one whose DDP does not know is refused."""
    layer = Layer("linear", torch.float32, bias="none", fused=False, delayed=False)
    report = split_linears([layer], WeightGradStore())
    same("split", (), report.split)
    same("whole", ("inner",), report.whole)
    delayed = Layer("linear", torch.float32, bias="none", fused=False, delayed=True)
    try:
        split_linears([wrap(delayed, delayed=False)], WeightGradStore())
    except ConfigurationError as error:
        same("named", True, "without delay_wgrad_compute" in str(error))
    else:
        raise AssertionError("nobody objected")
    for name in ("bias", "weight"):
        replaced = Layer("linear", torch.float32, bias="inside", fused=False, delayed=True)
        new = torch.nn.Parameter(getattr(replaced.inner, name).detach().clone())
        setattr(replaced.inner, name, new)
        try:
            split_linears([replaced], WeightGradStore())
        except ConfigurationError as error:
            same("named", True, str(error).startswith(f"{name} of "))
            same("remedy", True, str(error).endswith("leave out --use-cpu-initialization"))
        else:
            raise AssertionError(f"nobody objected to the {name}")
