"""What a profile depends on: sizes, parallelism, software, hardware."""

from __future__ import annotations

import dataclasses
import platform
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.patches.patching import installed_version
from zero_bubble.profile.profile import Scalar

__all__ = ["describe_job"]

_SIZES = (
    "seq_length",
    "decoder_seq_length",
    "micro_batch_size",
    "global_batch_size",
    "world_size",
    "data_parallel_size",
    "padded_vocab_size",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "swiglu",
    "group_query_attention",
    "transformer_impl",
    "attention_backend",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "accumulate_allreduce_grads_in_fp32",
    "pipeline_model_parallel_layout",
    "zero_bubble_recompute",
    # Fields of a model's config by another name.
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_experts",
    "squared_relu",
    "quick_geglu",
    "bias_gelu_fusion",
    "bias_swiglu_fusion",
    "no_persist_layer_norm",
    "fp16_lm_cross_entropy",
    "create_attention_mask_in_dataloader",
)
"""Arguments that are not fields of a model's config, or not under its name."""
_IRRELEVANT = frozenset(
    {
        "barrier_with_L1_time",
        "calculate_per_token_loss",
        "init_method_std",
        "deterministic_mode",
        "timers",
    }
)


def describe_job(args: Any) -> dict[str, Scalar]:
    """Everything of Megatron's arguments that times or memory of passes may depend on, and where
    they were measured. Two jobs with equal descriptions have equal costs.
    """
    names = [*_SIZES, *(one.name for one in dataclasses.fields(TransformerConfig))]
    job: dict[str, Scalar] = {}
    for name in names:
        value = getattr(args, name, None)
        if name in _IRRELEVANT or value is None:
            continue
        if isinstance(value, bool | int | float | str):
            job[name] = value
        elif not callable(value):
            job[name] = str(getattr(value, "name", value))
    device = torch.empty(0, device="cuda").device
    job["device"] = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"cpu {platform.machine()} x {torch.get_num_threads()} threads"
    )
    job["torch"], job["megatron"] = str(torch.__version__), installed_version()
    return job
