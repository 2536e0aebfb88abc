"""What test_delayed_layers.py asks of a whole model of Transformer Engine's layers under Megatron's
own wrappers, and of the config that builds them: in a process that finds a stand-in for Transformer
Engine (or its real Python, see compiled_te.py)."""

from __future__ import annotations

import argparse
import dataclasses
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallel
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
from tests.unit.delayed_layer_checks import config, wrap
from tests.unit.split_linear_checks import (
    BATCH,
    DTYPES,
    GPT_LINEARS,
    MICROBATCHES,
    SEQUENCE,
    VOCABULARY,
    all_w_last,
    counting_ready,
    gpt_data,
    gpt_forward_step,
    same,
)
from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass, Schedule


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


MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": {
        "num_moe_experts": 3,
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall",
        "add_bias_linear": False,
    },
    "recomputed": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}
DENSE = ("mlp.linear_fc1", "mlp.linear_fc2")
EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")


def build_gpt(
    dtype: torch.dtype, *, overlap: bool, fused: bool, delayed: bool, kind: str = "dense"
) -> DistributedDataParallel:
    """A small GPT of Megatron's Transformer Engine layers, the same in every call."""
    model_parallel_cuda_manual_seed(11)
    torch.manual_seed(11)
    options = config(
        dtype,
        gradient_accumulation_fusion=fused,
        delay_wgrad_compute=delayed,
        **MODELS[kind],
    )
    layers = get_gpt_layer_with_transformer_engine_spec(
        num_experts=options.num_moe_experts, moe_grouped_gemm=options.moe_grouped_gemm
    )
    layers.submodules.self_attention.submodules.core_attention = DotProductAttention
    model = GPTModel(options, layers, VOCABULARY, SEQUENCE).to(dtype)
    output = model.decoder.layers[0].self_attention.linear_proj
    same("a wrapper", True, isinstance(output, wrappers.TELinear))
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


def whole_gpt(
    *, dtype: str, overlap: bool, fused: bool, split: bool = True, kind: str = "dense"
) -> None:
    """A GPT through a session against Megatron's own loop with layers that do not delay.

    With overlapped reduction, each parameter is reported ready once, in the last microbatch.
    """
    with schedules_of_ours(), fused_kernels():
        reference, ours = (
            build_gpt(DTYPES[dtype], overlap=overlap, fused=fused, delayed=delayed, kind=kind)
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
    linears = GPT_LINEARS
    routers: tuple[str, ...] = ()
    if kind == "experts":
        of_experts = dict(zip(DENSE, EXPERTS, strict=True))
        linears = sorted(_renamed(name, of_experts) for name in linears)
        routers = tuple(f"decoder.layers.{layer}.mlp.router" for layer in range(2))
    same("layers split", linears, sorted(report.split))
    same("layers whole", routers, report.whole)
    if split:
        same("weight gradients computed", len(linears) * MICROBATCHES, session.store.computed)


def _renamed(name: str, others: Mapping[str, str]) -> str:
    for one, other in others.items():
        name = name.replace(one, other)
    return name


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
