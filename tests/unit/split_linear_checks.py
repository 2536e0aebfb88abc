"""What test_split_linears.py asks, for a process in CPU mode (or ranks of one).

Every layer is compared with its unsplit twin: Megatron's own class with the same values.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers as megatron_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.arrangement import arrange
from megatron.zero_bubble.runtime.layers import split_linears
from megatron.zero_bubble.runtime.session import Session
from megatron.zero_bubble.runtime.weight_grad import WeightGradStore
from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass, Schedule

SEQUENCE, BATCH, IN, OUT = 12, 3, 40, 48
MICROBATCHES = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def same(what: str, expected: Any, actual: Any) -> None:
    """Equal in every bit; AssertionError names what is not."""
    if torch.is_tensor(expected) and torch.is_tensor(actual):
        equal = expected.dtype == actual.dtype and torch.equal(expected, actual)
    else:
        equal = type(expected) is type(actual) and expected == actual
    if not equal:
        raise AssertionError(f"{what}: expected {expected}, found {actual}")


def build_layer(
    kind: str,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    fused: bool = False,
    sequence_parallel: bool = False,
) -> torch.nn.Module:
    """A layer of this rank, with random values that are the same in every call."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        gradient_accumulation_fusion=fused,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=sequence_parallel,
    )
    torch.manual_seed(3)
    common = {"config": config, "init_method": config.init_method, "bias": bias}
    layer: torch.nn.Module
    if kind == "column":
        layer = ColumnParallelLinear(IN, OUT, gather_output=False, **common)
    else:
        layer = RowParallelLinear(IN, OUT, input_is_parallel=True, skip_bias_add=False, **common)
    if bias:
        torch.nn.init.normal_(layer.bias)
    return layer


def wrap(layer: torch.nn.Module, *, fp32_main_grad: bool = True) -> DistributedDataParallel:
    """The layer under Megatron's DistributedDataParallel, its main_grad's zero."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=fp32_main_grad)
    wrapped = DistributedDataParallel(layer.config, ddp_config, layer)
    wrapped.zero_grad_buffer()
    return wrapped


@dataclass(frozen=True)
class Microbatch:
    """Inputs and gradients of outputs of one microbatch, one for each use of the layer."""

    inputs: tuple[torch.Tensor, ...]
    output_grads: tuple[torch.Tensor, ...]


def microbatches(
    model: torch.nn.Module,
    inputs: Sequence[int],
    dtype: torch.dtype,
    *,
    uses: int = 1,
    transposed: bool = False,
) -> list[Microbatch]:
    """Random ones; ``inputs`` is an input's shape on this rank.

    ``transposed``: gradients of outputs lie batch first in memory, as behind an attention.
    """
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        shape = model(torch.zeros(inputs, dtype=dtype))[0].shape

    def output_grad() -> torch.Tensor:
        if transposed:
            sequence, batch, size = shape
            return torch.randn(batch, sequence, size, generator=draw).to(dtype).transpose(0, 1)
        return torch.randn(shape, generator=draw).to(dtype)

    return [
        Microbatch(
            tuple(torch.randn(inputs, generator=draw).to(dtype) for _ in range(uses)),
            tuple(output_grad() for _ in range(uses)),
        )
        for _ in range(MICROBATCHES)
    ]


def forward(model: torch.nn.Module, one: Microbatch) -> tuple[list[Any], torch.Tensor]:
    """Fresh leaves, and outputs whose backward pass starts from this microbatch's gradients."""
    leaves = [part.clone().requires_grad_() for part in one.inputs]
    outputs = [model(leaf)[0] for leaf in leaves]
    return leaves, sum(
        (output * grad).float().sum()
        for output, grad in zip(outputs, one.output_grads, strict=True)
    )


def unsplit(model: torch.nn.Module, batch: Sequence[Microbatch]) -> list[torch.Tensor]:
    """Megatron's own: F and the fused backward of each microbatch. The inputs' gradients."""
    gradients = []
    for one in batch:
        leaves, loss = forward(model, one)
        loss.backward()
        gradients += [leaf.grad for leaf in leaves]
    return gradients


def split(
    model: torch.nn.Module,
    store: WeightGradStore,
    batch: Sequence[Microbatch],
    between: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """All F's, all B's, ``between``, all W's. The inputs' gradients."""
    kept = []
    for one in batch:
        with store.deferred(True):
            kept.append(forward(model, one))
    for number, (_, loss) in enumerate(kept):
        with store.deferred(True), store.collecting(0, number):
            loss.backward()
    between()
    for number in range(len(batch)):
        store.run(0, number)
    return [leaf.grad for leaves, _ in kept for leaf in leaves]


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """Where its gradient is: main_grad under DistributedDataParallel, else .grad."""
    found: torch.Tensor | None = getattr(parameter, "main_grad", parameter.grad)
    return found


def compare(
    kind: str,
    *,
    dtype: str,
    bias: bool = True,
    ddp: bool = True,
    uses: int = 1,
    transposed: bool = False,
    fp32_main_grad: bool = True,
    fused: bool = False,
    zero_out_wgrad: bool = False,
    sequence_parallel: bool = False,
) -> None:
    """Gradients of inputs, bias and weight are those of the unsplit layer; W alone adds weights."""
    reference, ours = (
        build_layer(
            kind, DTYPES[dtype], bias=bias, fused=fused, sequence_parallel=sequence_parallel
        )
        for _ in range(2)
    )
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shape = (
        SEQUENCE // ranks if sequence_parallel and kind == "column" else SEQUENCE,
        BATCH,
        IN // ranks if kind == "row" else IN,
    )
    batch = microbatches(reference, shape, DTYPES[dtype], uses=uses, transposed=transposed)
    models = [wrap(one, fp32_main_grad=fp32_main_grad) if ddp else one for one in (reference, ours)]
    for layer in (reference, ours):
        if zero_out_wgrad:
            layer.weight.zero_out_wgrad = True
    store = WeightGradStore()
    report = split_linears([models[1]], store)
    same("number of layers split", 1, len(report.split))

    untouched = gradient(ours.weight)
    same("the start", True, untouched is None or not untouched.any())

    def after_b() -> None:
        now = gradient(ours.weight)
        same("the weight's gradient after B", True, now is None or not now.any())
        same("weight gradients waiting", [uses] * MICROBATCHES, waiting(store))
        if bias:
            same("the bias's gradient after B", gradient(reference.bias), gradient(ours.bias))

    expected = unsplit(models[0], batch)
    found = split(models[1], store, batch, after_b)
    for number, pair in enumerate(zip(expected, found, strict=True)):
        same(f"gradient of input {number}", *pair)
    same("number of weight gradients computed", uses * MICROBATCHES, store.computed)
    final = gradient(reference.weight)
    same("the reference learns something", True, final is not None and bool(final.any()))
    same("the weight's gradient after W", final, gradient(ours.weight))
    if ddp:
        same("what is left in .grad", None, ours.weight.grad)


def waiting(store: WeightGradStore) -> list[int]:
    """Number of weight gradients that wait, by microbatch."""
    return [len(store.pending(0, number)) for number in range(MICROBATCHES)]


def compare_fused(*, dtype: str, fp32_main_grad: bool, uses: int, zero_out_wgrad: bool) -> None:
    """`compare`, with both sides adding through a stand-in for Apex's fused kernels."""
    calls: Counter[torch.dtype] = Counter()

    def accumulate(
        total_input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        calls[main_grad.dtype] += 1
        main_grad.add_(grad_output.float().t() @ total_input.float())

    stand_in = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    before = megatron_layers._grad_accum_fusion_available
    megatron_layers._grad_accum_fusion_available = True
    megatron_layers.fused_weight_gradient_mlp_cuda = stand_in
    # Memory that nobody has written is then full of NaN, and its use shows.
    torch.use_deterministic_algorithms(True)
    try:
        compare(
            "column",
            dtype=dtype,
            fp32_main_grad=fp32_main_grad,
            fused=True,
            uses=uses,
            zero_out_wgrad=zero_out_wgrad,
        )
    finally:
        torch.use_deterministic_algorithms(False)
        megatron_layers._grad_accum_fusion_available = before
        del megatron_layers.fused_weight_gradient_mlp_cuda
    kernel_dtype = torch.float32 if fp32_main_grad else DTYPES[dtype]
    same("calls of the kernel", Counter({kernel_dtype: 2 * uses * MICROBATCHES}), calls)


def what_is_held(kind: str, *, strided: bool) -> None:
    """Between B and W only the layer's input and the gradient of its output are alive.

    ``strided``: that gradient is a view of a larger tensor, as behind a split along the last
    dimension.
    """
    layer = build_layer(kind, torch.float32)
    store = WeightGradStore()
    split_linears([layer], store)
    watched: dict[str, weakref.ref[torch.Tensor]] = {}

    def forward_and_backward() -> None:
        leaf = torch.randn(SEQUENCE, BATCH, IN, requires_grad=True)
        with store.deferred(True):
            hidden = torch.tanh(leaf)
            output = layer(hidden)[0]
        result = torch.cat([output, torch.ones_like(output)], dim=-1) if strided else output
        # Not output's own gradient, which is to be kept.
        outer = result if strided else torch.sigmoid(result)
        outer.register_hook(lambda grad: watched.update(gradient=weakref.ref(grad)))
        result = outer.square()
        for name, tensor in [("leaf", leaf), ("output", output), ("result", result)]:
            watched[name] = weakref.ref(tensor)
        watched["hidden"] = weakref.ref(hidden)
        with store.deferred(True), store.collecting(0, 0):
            result.sum().backward()

    forward_and_backward()
    gc.collect()
    for name in ("leaf", "output", "result", "gradient"):
        same(f"{name} is alive", False, watched[name]() is not None)
    (pending,) = store.pending(0, 0)
    held = list(pending.held)
    same("shapes", [(SEQUENCE, BATCH, IN), (SEQUENCE * BATCH, OUT)], [(*t.shape,) for t in held])
    for tensor in held:
        bytes_needed = tensor.numel() * tensor.element_size()
        same("bytes of storage", bytes_needed, tensor.untyped_storage().nbytes())
        same("node of the autograd graph", None, tensor.grad_fn)
    remaining = [weakref.ref(tensor) for tensor in held]
    del held, tensor, pending
    store.run(0, 0)
    gc.collect()
    same("alive after W", [None, None], [ref() for ref in remaining])
    same("the input is alive after W", None, watched["hidden"]())


def falls_back(case: str) -> None:
    """Where a layer cannot be split it does what its class does, and nothing waits for W."""
    reference, ours = (build_layer("column", torch.float32) for _ in range(2))
    store = WeightGradStore()
    if case == "frozen before":
        ours.weight.requires_grad_(False)
    split_linears([ours], store)
    if case == "frozen after":
        ours.weight.requires_grad_(False)
    if case.startswith("frozen"):
        reference.weight.requires_grad_(False)
    leaf = torch.randn(SEQUENCE, BATCH, IN, generator=torch.Generator().manual_seed(7))
    leaves = [leaf.clone().requires_grad_(case != "input without gradient") for _ in range(2)]
    with torch.set_grad_enabled(case != "evaluation"), store.deferred(case != "not deferring"):
        outputs = [layer(one)[0] for layer, one in zip((reference, ours), leaves, strict=True)]
    same("output", *outputs)
    same("autograd's node", *[type(one.grad_fn) for one in outputs])
    if case == "evaluation":
        return
    outputs[0].square().sum().backward()
    with store.deferred(True), store.collecting(0, 0):
        outputs[1].square().sum().backward()
    same("weight gradients waiting", 0, len(store.pending(0, 0)))
    same("gradient of the input", leaves[0].grad, leaves[1].grad)
    for (name, one), other in zip(reference.named_parameters(), ours.parameters(), strict=True):
        same(f"gradient of {name}", one.grad, other.grad)
    same("the weight has a gradient", not case.startswith("frozen"), ours.weight.grad is not None)


def splitting_again_changes_nothing() -> None:
    """A second `split_linears` neither splits twice nor forgets what it knows."""
    layer = build_layer("column", torch.float32)
    store = WeightGradStore()
    first = split_linears([layer], store)
    same("report", first, split_linears([layer], store))
    (batch,) = microbatches(layer, (SEQUENCE, BATCH, IN), torch.float32)[:1]
    split(layer, store, [batch])
    same("number of weight gradients computed", 1, store.computed)


HIDDEN, VOCABULARY = 16, 32


def build_gpt(dtype: torch.dtype, *, overlap: bool) -> DistributedDataParallel:
    """A small GPT under DistributedDataParallel, the same in every call."""
    model_parallel_cuda_manual_seed(11)
    torch.manual_seed(11)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).to(dtype)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap
    )
    wrapped = DistributedDataParallel(config, ddp_config, model)
    config.no_sync_func = wrapped.no_sync
    wrapped.zero_grad_buffer()
    return wrapped


def gpt_data() -> Iterator[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(13)
    for _ in range(MICROBATCHES):
        yield {
            name: torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=draw)
            for name in ("tokens", "labels")
        }


def gpt_forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
    one = next(data)
    positions = torch.arange(SEQUENCE).expand(BATCH, SEQUENCE)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    output = model(one["tokens"], positions, mask, labels=one["labels"])

    def loss_func(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_func


def all_w_last(stages: int, microbatches: int) -> Schedule:
    """One stage: every F, every B, then every W."""
    row = [Pass(kind, one) for kind in (Kind.F, Kind.B, Kind.W) for one in range(microbatches)]
    return Schedule(linear(stages), microbatches, (tuple(row),))


@contextmanager
def counting_ready(model: DistributedDataParallel) -> Iterator[Counter[tuple[str, bool]]]:
    """Counts calls of register_grad_ready, by parameter and whether it was the last microbatch."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    counts: Counter[tuple[str, bool]] = Counter()
    group_class = type(model.bucket_groups[0])
    original = group_class.register_grad_ready

    def register(self: Any, parameter: torch.nn.Parameter, *rest: Any) -> None:
        counts[names[parameter], self.is_last_microbatch] += 1
        original(self, parameter, *rest)

    group_class.register_grad_ready = register
    try:
        yield counts
    finally:
        group_class.register_grad_ready = original


def whole_gpt(*, dtype: str, overlap: bool) -> None:
    """A GPT through a session on one stage against Megatron's own loop over microbatches.

    With overlapped reduction, each parameter is reported ready once, in the last microbatch.
    """
    reference, ours = (build_gpt(DTYPES[dtype], overlap=overlap) for _ in range(2))
    session = Session(all_w_last, arrange(linear(1)), wait_limit=60)
    call = {
        "forward_step_func": gpt_forward_step,
        "num_microbatches": MICROBATCHES,
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }
    # DistributedDataParallel learns in the first batch how often a parameter gets ready.
    for batch in range(2):
        ready = []
        losses = []
        runs = [
            (reference, schedules.forward_backward_no_pipelining),
            (ours, session.forward_backward),
        ]
        for model, run in runs:
            model.zero_grad_buffer()
            with counting_ready(model) as counts:
                losses.append(run(model=[model], data_iterator=[gpt_data()], **call))
            model.finish_grad_sync()
            ready.append({name: n for (name, last), n in counts.items() if last})
        same(f"losses of batch {batch}", *[[one["loss"].item() for one in part] for part in losses])
        names = [name for name, _ in ours.module.named_parameters()]
        same("ready in the last microbatch", dict.fromkeys(names, 1) if overlap else {}, ready[1])
        same("ready as in Megatron's own", *ready)
        for (name, one), other in zip(
            reference.module.named_parameters(), ours.module.parameters(), strict=True
        ):
            same(f"gradient of {name} in batch {batch}", one.main_grad, other.main_grad)
        same(
            "gradients differ from zero",
            True,
            bool(ours.module.output_layer.weight.main_grad.any()),
        )
    report = split_linears([ours.module], WeightGradStore())
    same("layers split", GPT_LINEARS, sorted(report.split))
    same("layers whole", (), report.whole)
    same("weight gradients computed", len(GPT_LINEARS) * MICROBATCHES, session.store.computed)


GPT_LINEARS = sorted(
    [
        f"decoder.layers.{layer}.{part}"
        for layer in range(2)
        for part in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
    ]
    + ["output_layer"]
)
