"""What people turn on, and what each schedule promises for it: the registry behind the tests of
`test_features` and behind docs/support.md, which tools/support_table.py makes of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tests.distributed.configs import Config
from tests.distributed.feature import (
    IN_BACKWARD,
    LAYOUT,
    SCHEDULES,
    VALIDATED,
    Feature,
    Promise,
)

__all__ = ["DEFAULT", "FEATURES", "cases"]


def _config(*extra: str, **fields: object) -> Config:
    # Long enough for `auto` to measure, to search and to run what it found.
    return Config(**{"iterations": 7, "extra": extra, **fields})  # type: ignore[arg-type]


def _needs_gpu(title: str, flags: str, note: str = "", **rejected: Promise) -> Feature:
    """A row for what no CPU can run."""
    elsewhere = Promise("untested", why="not run here")
    return Feature(
        title,
        "Needs a GPU",
        Config(),
        promises=_everywhere(elsewhere) | rejected,
        flags_as_typed=flags,
        note=note,
    )


def _everywhere(promise: Promise) -> dict[str, Promise]:
    return dict.fromkeys(SCHEDULES, promise)


OVERLAP = "--overlap-grad-reduce"
GATHER = (OVERLAP, "--overlap-param-gather")
FULL = ("--recompute-granularity", "full", "--recompute-num-layers", "1", "--recompute-method")
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules")
EXPERTS = (*("--num-experts", "4", "--moe-router-topk", "2", "--swiglu", "--disable-bias-linear"),)
ALLTOALL = (*EXPERTS, "--moe-token-dispatcher-type", "alltoall")
ALLGATHER = (*EXPERTS, "--moe-token-dispatcher-type", "allgather")
MODERN = (
    *("--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"),
    *("--position-embedding-type", "rope", "--no-rope-fusion"),
    *("--group-query-attention", "--num-query-groups", "2"),
)
MTP = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")
# The scale starts so high that the first steps overflow and are skipped.
LOSS_SCALE = ("--initial-loss-scale", str(2.0**18))
SHARDED = {"dp": 2, "precision": "bf16", "distributed_optimizer": True}
BUCKET = ("--ddp-bucket-size", "4096")
NO_TE = Promise("rejected", "--fp8-format", "needs a GPU")

FEATURES: dict[str, Feature] = {
    # Data parallelism
    "overlap": Feature("Overlapped gradient reduction", "Data parallelism", _config(OVERLAP, dp=2)),
    "overlap_buckets": Feature(
        "Many small buckets", "Data parallelism", _config(OVERLAP, *BUCKET, dp=2)
    ),
    "overlap_unaligned": Feature(
        "Unaligned reduction",
        "Data parallelism",
        _config(OVERLAP, "--no-align-grad-reduce", dp=2),
    ),
    "distributed_optimizer": Feature(
        "Distributed optimizer", "Data parallelism", _config(**SHARDED)
    ),
    "overlap_gather": Feature(
        "Overlapped reduction and gathering", "Data parallelism", _config(*GATHER, **SHARDED)
    ),
    "overlap_gather_unaligned": Feature(
        "Unaligned gathering, small buckets",
        "Data parallelism",
        _config(*GATHER, *BUCKET, "--no-align-param-gather", **SHARDED),
    ),
    "overlap_validated": Feature(
        "Overlapped reduction, post-validation",
        "Data parallelism",
        _config(OVERLAP, dp=2, clip_grad=1.14),
        ours=VALIDATED,
    ),
    "overlap_gather_validated": Feature(
        "Overlapped reduction and gathering, post-validation",
        "Data parallelism",
        _config(*GATHER, clip_grad=1.14, **SHARDED),
        ours=VALIDATED,
    ),
    # Tensor parallelism
    "tensor": Feature("Tensor parallelism", "Tensor parallelism", _config(tp=2)),
    "sequence": Feature(
        "Sequence parallelism", "Tensor parallelism", _config("--sequence-parallel", tp=2)
    ),
    # Recomputation
    "recompute_uniform": Feature(
        "Full, uniform", "Recomputation", _config(*FULL, "uniform", dropout=0.1)
    ),
    "recompute_in_backward": Feature(
        "Full, uniform, within the backward pass",
        "Recomputation",
        _config(*FULL, "uniform", dropout=0.1),
        ours=IN_BACKWARD,
    ),
    "recompute_block": Feature(
        "Full, some layers of a stage", "Recomputation", _config(*FULL, "block", dropout=0.1)
    ),
    "recompute_attention": Feature(
        "Selective, core attention", "Recomputation", _config(*SELECTIVE, "core_attn", dropout=0.1)
    ),
    "recompute_mlp": Feature(
        "Selective, MLP",
        "Recomputation",
        # With biases Megatron's checkpoint returns one, and then never ends its own backward.
        _config(*SELECTIVE, "mlp", dropout=0.1, model=("--disable-bias-linear",)),
    ),
    "recompute_experts": Feature(
        "Selective, experts", "Recomputation", _config(*SELECTIVE, "moe", model=ALLTOALL)
    ),
    "recompute_shared_experts": Feature(
        "Selective, shared experts",
        "Recomputation",
        _config(
            *SELECTIVE,
            "shared_experts",
            model=(*ALLTOALL, "--moe-shared-expert-intermediate-size", "64"),
        ),
    ),
    "recompute_distributed": Feature(
        "Full, saved activations distributed",
        "Recomputation",
        _config(*FULL, "uniform", "--distribute-saved-activations", tp=2),
        promises={
            "auto": Promise(
                "rejected",
                "--distribute-saved-activations",
                "in CPU mode, where bytes are counted by what autograd saves",
            )
        },
    ),
    # Mixture of experts
    "experts_allgather": Feature(
        "Sequential experts, all-gather", "Mixture of experts", _config(model=ALLGATHER)
    ),
    "experts_alltoall": Feature(
        "Sequential experts, all-to-all", "Mixture of experts", _config(model=ALLTOALL)
    ),
    "expert_parallelism": Feature(
        "Expert parallelism",
        "Mixture of experts",
        _config("--expert-model-parallel-size", "2", dp=2, model=ALLTOALL),
    ),
    "expert_parallelism_sharded": Feature(
        "Expert parallelism, distributed optimizer, overlap",
        "Mixture of experts",
        _config("--expert-model-parallel-size", "2", *GATHER, model=ALLTOALL, **SHARDED),
    ),
    "expert_tensor_parallelism": Feature(
        "Expert tensor parallelism",
        "Mixture of experts",
        _config(
            *("--sequence-parallel", "--expert-tensor-parallel-size", "2"), tp=2, model=ALLTOALL
        ),
    ),
    "experts_not_tensor_parallel": Feature(
        "Expert parallelism in place of tensor parallelism",
        "Mixture of experts",
        _config(
            *("--sequence-parallel", "--expert-tensor-parallel-size", "1"),
            *("--expert-model-parallel-size", "2"),
            tp=2,
            model=ALLTOALL,
        ),
    ),
    "shared_experts": Feature(
        "Shared experts",
        "Mixture of experts",
        _config(model=(*ALLTOALL, "--moe-shared-expert-intermediate-size", "64")),
    ),
    "expert_loss": Feature(
        "Load-balancing loss",
        "Mixture of experts",
        _config("--moe-aux-loss-coeff", "0.01", "--moe-z-loss-coeff", "0.001", model=ALLTOALL),
    ),
    "grouped_experts": Feature(
        "Grouped experts",
        "Mixture of experts",
        _config("--moe-grouped-gemm", model=ALLTOALL),
        note="Transformer Engine's; Megatron's local layers build sequential ones for this flag",
        promises=_everywhere(Promise("rejected", "--moe-grouped-gemm", "needs a GPU")),
    ),
    # Context parallelism
    "context": Feature(
        "Context parallelism",
        "Context parallelism",
        _config(cp=2),
        note="With CPU mode's stand-in for attention; Transformer Engine's is not run here",
    ),
    # Models
    "mtp": Feature("Multi-token prediction", "Models", _config(model=MTP)),
    "mtp_tied": Feature(
        "Multi-token prediction, tied embeddings (as by default)",
        "Models",
        _config(model=MTP, tied=True),
        promises={
            "zb-v": Promise(
                "untested", why="not run here: Megatron cannot save such a model on several stages"
            )
        },
        note="Trains, and `--save` is refused: Megatron cannot save it on several stages",
    ),
    "mtp_validated": Feature(
        "Multi-token prediction, post-validation",
        "Models",
        _config(model=MTP, clip_grad=1.2),
        ours=VALIDATED,
    ),
    "modern": Feature("SwiGLU, RMSNorm, RoPE, GQA", "Models", _config(model=MODERN)),
    "tied": Feature("Tied embeddings (as by default)", "Models", _config(tied=True)),
    "per_token_loss": Feature(
        "Loss per token", "Models", _config("--calculate-per-token-loss", dp=2)
    ),
    "frozen_layer": Feature("A frozen layer", "Models", _config(frozen=r"^decoder\.layers\.2\.")),
    "frozen_embedding": Feature("Frozen embeddings", "Models", _config(frozen="embedding")),
    "frozen_first_stage": Feature(
        "A frozen first stage", "Models", _config(frozen=r"embedding|^decoder\.layers\.[01]\.")
    ),
    "frozen_recomputed": Feature(
        "A frozen first stage, recomputation",
        "Models",
        _config(*FULL, "uniform", frozen=r"embedding|^decoder\.layers\.[01]\."),
    ),
    "frozen_but_norms": Feature("All frozen but norms", "Models", _config(frozen="^(?!.*norm)")),
    # Precision
    "fp16": Feature("fp16 with a loss scale", "Precision", _config(*LOSS_SCALE, precision="fp16")),
    "bf16": Feature(
        "bf16, gradients in fp32",
        "Precision",
        _config("--accumulate-allreduce-grads-in-fp32", precision="bf16"),
    ),
    "bf16_gradients": Feature(
        "bf16, gradients in bf16",
        "Precision",
        _config("--grad-reduce-in-bf16", precision="bf16", dp=2),
    ),
    "fp8": Feature(
        "fp8",
        "Precision",
        _config("--fp8-format", "hybrid", precision="bf16"),
        note="Transformer Engine's; without it no schedule that splits takes the flag",
        promises=_everywhere(NO_TE),
    ),
    # Stages and microbatches
    "few_microbatches": Feature(
        "Fewer microbatches than stages", "Stages", _config(pp=4, microbatches=3)
    ),
    "one_microbatch": Feature("One microbatch", "Stages", _config(microbatches=1)),
    "stage_without_layers": Feature(
        "A stage without layers",
        "Stages",
        _config(LAYOUT, "E|ttttL"),
        layout_of_v="E|tt|tt|L",
    ),
    "stage_without_parameters": Feature(
        "A stage without parameters",
        "Stages",
        _config(LAYOUT, "Ett||ttL", pp=3, microbatches=4),
        promises={
            "zb-v": Promise(
                "untested",
                why="not run here: Megatron cannot load a checkpoint on such a stage",
            )
        },
    ),
    "uneven_stages": Feature(
        "Uneven stages",
        "Stages",
        _config(LAYOUT, "Et|tttL"),
        layout_of_v="Ett||t|tL",
    ),
    "clipping": Feature(
        "Gradients that are clipped, on a V",
        "Stages",
        _config(),
        of_v={"clip_grad": 1.0},
        promises={"zb-v": Promise("tolerance", why="the norm is added in another order")},
    ),
    # Needs a GPU
    "recompute_norm": _needs_gpu(
        "Selective recomputation of norms", " ".join((*SELECTIVE, "layernorm"))
    ),
    "nccl": _needs_gpu("NCCL", "--distributed-backend nccl"),
    "fused_accumulation": _needs_gpu("Fused gradient accumulation (the default on a GPU)", ""),
    "overlapped_tensor_communication": _needs_gpu(
        "Overlapped tensor-parallel communication",
        "--tp-comm-overlap",
        "With Transformer Engine's layers schedules that split refuse it",
    ),
    "transformer_engine": _needs_gpu(
        "Transformer Engine layers",
        "--transformer-impl transformer_engine",
        "With a stand-in for its kernels they train to the same bits "
        "(`tests/distributed/test_engine.py`)",
    ),
}


DEFAULT: tuple[tuple[str, str], ...] = (
    ("overlap_gather", "zb-h2"),
    ("sequence", "zb-v"),
    ("recompute_uniform", "zb-h1"),
    ("expert_parallelism", "zb-h1"),
    ("mtp", "zb-h2"),
    ("modern", "zb-h2"),
    ("fp16", "zb-h1"),
    ("few_microbatches", "zb-h1"),
    ("stage_without_parameters", "zb-h2"),
)
"""The default tier; the others are slow."""


def cases() -> Iterator[tuple[str, str]]:
    """Every (feature, schedule) that is tested."""
    for name, schedule in itertools.product(FEATURES, SCHEDULES):
        if FEATURES[name].promise(schedule).kind != "untested":
            yield name, schedule
