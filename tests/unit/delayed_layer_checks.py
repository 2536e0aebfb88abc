"""What test_delayed_layers.py asks, in a process where Megatron finds a stand-in for Transformer
Engine: its layers under Megatron's own wrappers, delayed against not delayed."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.extensions import transformer_engine as wrappers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from megatron.zero_bubble.arrangement import arrange
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.patches import arguments as our_arguments
from megatron.zero_bubble.patches import delayed_weights, placement
from megatron.zero_bubble.runtime.layers import split_linears
from megatron.zero_bubble.runtime.session import Session
from megatron.zero_bubble.runtime.weight_grad import WeightGradStore
from tests.unit import stand_in_te
from tests.unit.split_linear_checks import (
    BATCH,
    DTYPES,
    GPT_LINEARS,
    HIDDEN,
    IN,
    MICROBATCHES,
    OUT,
    SEQUENCE,
    VOCABULARY,
    Microbatch,
    all_w_last,
    counting_ready,
    gpt_data,
    gpt_forward_step,
    gradient,
    same,
    split,
    unsplit,
    waiting,
)
from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass, Schedule

EXPERTS = 3


class Layer(torch.nn.Module):  # type: ignore[misc]
    """One layer of the stand-in, used as Megatron's wrappers use it: ``(output, None)``.

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
                self.inner: Any = stand_in_te.Linear(IN, OUT, **options)
            case "norm and linear":
                self.inner = stand_in_te.LayerNormLinear(IN, OUT, **options)
            case "grouped":
                self.inner = stand_in_te.GroupedLinear(EXPERTS, IN, OUT, **options)
        for parameter in self.inner.biases():
            torch.nn.init.normal_(parameter)
        self.splits = [[SEQUENCE * BATCH - 5, 0, 5]] if kind == "grouped" else []

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
    weights = ours.module.inner.weights()

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


def shares() -> None:
    """A grouped layer's gradient, which is one product, runs in the last share of its weights."""
    layer = Layer("grouped", torch.float32, bias="none", fused=False, delayed=True)
    store = WeightGradStore()
    split_linears([layer], store)
    first, *_, last = layer.inner.weights()
    store.share_of = dict.fromkeys(layer.inner.weights(), 0) | {last: 2}
    with store.collecting(0, 0):
        layer(torch.randn(SEQUENCE, BATCH, IN, requires_grad=True))[0].sum().backward()
    for part, waits in ((0, 1), (1, 1), (2, 0)):
        store.run(0, 0, part, 4)
        same(f"left after share {part}", waits, len(store.pending(0, 0)))
        same(f"computed in share {part}", not waits, first.grad is not None)


def what_is_held() -> None:
    """Input and gradient of the output are counted as held; nothing is lent to a B."""
    layer = Layer("linear", torch.float32, bias="inside", fused=False, delayed=True)
    store = WeightGradStore()
    split_linears([layer], store)
    for microbatch in range(2):  # from the second on weights are known, and might be lent
        with store.collecting(0, microbatch), store.lending(0, microbatch):
            layer(torch.randn(SEQUENCE, BATCH, IN, requires_grad=True))[0].sum().backward()
            same("lent", None, store.take())
    (pending,) = store.pending(0, 0)
    rows = SEQUENCE * BATCH
    same("held", [(rows, IN), (rows, OUT)], [tuple(one.shape) for one in pending.held])


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
    replaced = Layer("linear", torch.float32, bias="inside", fused=False, delayed=True)
    replaced.inner.bias = torch.nn.Parameter(torch.zeros(OUT))
    try:
        split_linears([replaced], WeightGradStore())
    except ConfigurationError as error:
        same("remedy", True, str(error).endswith("leave out --use-cpu-initialization"))
    else:
        raise AssertionError("nobody objected to the bias")


@contextmanager
def schedules_of_ours() -> Iterator[None]:
    """As in a run with a schedule of ours: Megatron's config lets weight gradients be delayed."""
    original = TransformerConfig.__post_init__
    if original.__qualname__ == "TransformerConfig.__post_init__":
        delayed_weights.install()
    placement.use(arrange(linear(1)))
    try:
        yield
    finally:
        placement.use(None)


def the_config() -> None:
    """Megatron's own check stands where its own schedule runs, and all other checks always."""
    with schedules_of_ours():
        same("delayed", True, config(torch.float32, delay_wgrad_compute=True).delay_wgrad_compute)
        copied = dataclasses.replace(config(torch.float32, delay_wgrad_compute=True))
        same("delayed in a copy", True, copied.delay_wgrad_compute)
        same("not delayed", False, config(torch.float32).delay_wgrad_compute)
        _refused("Only one of", delay_wgrad_compute=True, bf16=True, fp16=True)
    _refused("overlap_moe_expert_parallel_comm", delay_wgrad_compute=True)


def the_arguments() -> None:
    """Megatron's config gets it from the arguments, after Megatron has validated them."""
    seen = []

    def original(args: argparse.Namespace) -> argparse.Namespace:
        seen.append(args.delay_wgrad_compute)
        return args

    for delays in (True, False):
        args = argparse.Namespace(delay_wgrad_compute=False)

        def validate(args: argparse.Namespace, delays: bool = delays) -> None:
            same("as the user has given it", False, args.delay_wgrad_compute)
            args.zero_bubble_delays = delays

        with mock.patch.object(our_arguments, "validate", validate):
            for _ in range(2):
                our_arguments._ours_first(original)(args)
                same("after validation", delays, args.delay_wgrad_compute)
    same("while Megatron validates", [False] * 4, seen)


def _refused(why: str, **options: Any) -> None:
    try:
        config(torch.float32, **options)
    except (AssertionError, ValueError) as error:
        same(f"refused for {why}: {error}", True, why in str(error))
    else:
        raise AssertionError(f"not refused for {why}")


def build_gpt(
    dtype: torch.dtype, *, overlap: bool, fused: bool, delayed: bool
) -> DistributedDataParallel:
    """A small GPT of Megatron's Transformer Engine layers, the same in every call."""
    model_parallel_cuda_manual_seed(11)
    torch.manual_seed(11)
    options = config(dtype, gradient_accumulation_fusion=fused, delay_wgrad_compute=delayed)
    layers = get_gpt_layer_with_transformer_engine_spec()
    layers.submodules.self_attention.submodules.core_attention = DotProductAttention
    model = GPTModel(options, layers, VOCABULARY, SEQUENCE).to(dtype)
    same("a wrapper", True, isinstance(model.decoder.layers[0].mlp.linear_fc2, wrappers.TELinear))
    wrapped = wrap(model, delayed=delayed, overlap=overlap)
    options.no_sync_func = wrapped.no_sync
    return wrapped


def backward_in_one(stages: int, microbatches: int) -> Schedule:
    row = [Pass(kind, one) for one in range(microbatches) for kind in (Kind.F, Kind.BW)]
    return Schedule(linear(stages), microbatches, (tuple(row),))


@contextmanager
def fused_kernels() -> Iterator[None]:
    """A stand-in for Apex's, with which the output layer is fused as well."""

    def accumulate(input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.add_(grad_output.float().t() @ input.float())

    before = megatron_layers._grad_accum_fusion_available
    megatron_layers._grad_accum_fusion_available = True
    megatron_layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate
    )
    try:
        yield
    finally:
        megatron_layers._grad_accum_fusion_available = before
        del megatron_layers.fused_weight_gradient_mlp_cuda


def whole_gpt(*, dtype: str, overlap: bool, fused: bool, split: bool = True) -> None:
    """A GPT through a session against Megatron's own loop with layers that do not delay.

    With overlapped reduction, each parameter is reported ready once, in the last microbatch.
    """
    with schedules_of_ours(), fused_kernels():
        reference, ours = (
            build_gpt(DTYPES[dtype], overlap=overlap, fused=fused, delayed=delayed)
            for delayed in (False, True)
        )
        build = all_w_last if split else backward_in_one
        session = Session(build, arrange(linear(1)), wait_limit=60)
        runs = [
            (reference, schedules.forward_backward_no_pipelining),
            (ours, session.forward_backward),
        ]
        for batch in range(2):  # DDP learns in the first how often a parameter gets ready
            _one_batch(batch, runs, overlap=overlap)
    report = split_linears([ours.module], WeightGradStore())
    same("layers split", GPT_LINEARS, sorted(report.split))
    same("layers whole", (), report.whole)
    same(
        "weight gradients computed",
        len(GPT_LINEARS) * MICROBATCHES if split else None,
        session.store.computed if split else None,
    )


def _one_batch(batch: int, runs: list[tuple[Any, Any]], *, overlap: bool) -> None:
    ready, losses = [], []
    for model, run in runs:
        model.zero_grad_buffer()
        with counting_ready(model) as counts:
            losses.append(
                run(
                    model=[model],
                    data_iterator=[gpt_data()],
                    forward_step_func=gpt_forward_step,
                    num_microbatches=MICROBATCHES,
                    seq_length=SEQUENCE,
                    micro_batch_size=BATCH,
                )
            )
        model.finish_grad_sync()
        ready.append({name: n for (name, last), n in counts.items() if last})
    (reference, _), (ours, _) = runs
    same(f"losses of batch {batch}", *[[one["loss"].item() for one in part] for part in losses])
    names = [name for name, _ in ours.module.named_parameters()]
    same("ready in the last microbatch", dict.fromkeys(names, 1) if overlap else {}, ready[1])
    for (name, one), other in zip(
        reference.module.named_parameters(), ours.module.parameters(), strict=True
    ):
        same(f"gradient of {name} in batch {batch}", one.main_grad, other.main_grad)
        same(f"{name} learns", True, bool(one.main_grad.any()))


def out_of_order() -> None:
    """The first microbatch's W may overwrite, and has to be the first."""

    def w_backwards(stages: int, microbatches: int) -> Schedule:
        row = all_w_last(stages, microbatches).passes[0]
        return Schedule(
            linear(stages), microbatches, (row[: 2 * microbatches] + row[: -microbatches - 1 : -1],)
        )

    with schedules_of_ours():
        model = build_gpt(torch.float32, overlap=False, fused=False, delayed=True)
        session = Session(w_backwards, arrange(linear(1)), wait_limit=60)
        try:
            session.forward_backward(
                model=[model],
                data_iterator=[gpt_data()],
                forward_step_func=gpt_forward_step,
                num_microbatches=MICROBATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
            )
        except ConfigurationError as error:
            same("the message", True, str(error).startswith("0W1 comes after a later"))
        else:
            raise AssertionError("it ran")
