"""What differs between the versions of Megatron that we support, a function each.

Each function looks at what the installed Megatron has, never at its number. Nothing of ours is
imported here, so that a plain Megatron can be trained by the same script.
"""

from __future__ import annotations

import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

__all__ = [
    "add_moe_statistics",
    "batch_home",
    "batch_of_this_rank",
    "evaluation_microbatch_size",
    "gradients_for_norm",
    "moe_statistics",
    "new_moe_statistics",
    "parse_arguments",
    "pretrain_gpt",
    "reads_the_data",
    "set_moe_statistics",
    "training_utils",
]


def training_utils() -> str:
    """Module of the training loop's small functions. Since 0.18 it is one of a package."""
    module = "megatron.training.utils"
    is_package = hasattr(importlib.import_module(module), "__path__")
    return f"{module}.common_utils" if is_package else module


def batch_home() -> str:
    """Module of ``get_batch_on_this_tp_rank``. Since 0.18 it is in the core."""
    core = "megatron.core.utils"
    in_core = hasattr(importlib.import_module(core), "get_batch_on_this_tp_rank")
    return core if in_core else training_utils()


def reads_the_data(get_batch: Callable[..., Any]) -> bool:
    """Whether ``get_batch_on_this_tp_rank`` takes the data's iterator; since 0.18, a batch."""
    return "data_iterator" in inspect.signature(get_batch).parameters


def evaluation_microbatch_size(args: Namespace) -> int:
    """Samples in a microbatch of an evaluation. Since 0.18 it has a flag of its own."""
    size: int = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    return size


def gradients_for_norm(optimizer: Any) -> list[torch.Tensor]:
    """A sub-optimizer's gradients whose norm clips. Since 0.19 parameters may have another norm."""
    name = "get_grads_for_grad_norm"
    get = getattr(optimizer, name, None) or optimizer.get_main_grads_for_grad_norm
    gradients: list[torch.Tensor] = get()
    return gradients


def _moe_logging() -> Any | None:
    """Since 0.18 a module has the statistics of experts, as an object; before, a dictionary."""
    try:
        return importlib.import_module("megatron.core.transformer.moe.moe_logging")
    except ModuleNotFoundError:
        return None


def moe_statistics() -> Any:
    """What routers have reported and no log has shown."""
    module = _moe_logging()
    if module is not None:
        return module.get_moe_metrics_tracker()
    from megatron.core.transformer.moe import moe_utils

    return moe_utils.get_moe_layer_wise_logging_tracker()


def new_moe_statistics() -> Any:
    """For a run of which no router has reported anything."""
    module = _moe_logging()
    return {} if module is None else module.MoEMetricsTracker()


def set_moe_statistics(statistics: Any) -> None:
    """From now on routers report to these."""
    module = _moe_logging()
    if module is not None:
        module.set_moe_metrics_tracker(statistics)
        return
    from megatron.core.transformer.moe import moe_utils

    moe_utils._MOE_LAYER_WISE_LOGGING_TRACKER = statistics


def add_moe_statistics(statistics: Any, more: Any) -> None:
    """Add what routers have reported to others."""
    if _moe_logging() is None:
        for name, entry in more.items():
            zeros = torch.zeros_like(entry["values"])
            values = statistics.setdefault(name, {"values": zeros})["values"]
            values += entry["values"]
            statistics[name] |= entry | {"values": values}
        return
    for name, entry in more.metrics.items():
        statistics.ensure_initialized(name, len(entry.values), entry.values.device)
        present = statistics.metrics[name]
        present.values += entry.values
        present.reduce_group, present.avg_group = entry.reduce_group, entry.avg_group
        present.needs_dp_avg = entry.needs_dp_avg


def parse_arguments() -> Namespace:
    """The run's arguments. Since 0.18 they are validated, and those that ``get_args`` answers.

    Before, ``pretrain`` parses them once more, and it is then that they are validated.
    """
    from megatron.training import arguments

    parse = getattr(arguments, "parse_and_validate_args", arguments.parse_args)
    args: Namespace = parse()
    return args


def pretrain_gpt(
    args: Namespace, datasets: Callable[..., Any], forward: Callable[..., Any]
) -> None:
    """Train a GPT model. Since 0.19 Megatron has the model's builder; 0.18 takes a container."""
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils, pretrain

    kind = ModelType.encoder_or_decoder
    if hasattr(argument_utils, "gpt_config_from_args"):
        model_config = argument_utils.gpt_config_from_args(args)
        container = argument_utils.pretrain_cfg_container_from_args(args, model_config)
        pretrain(container, datasets, kind, forward)
    elif hasattr(argument_utils, "pretrain_cfg_container_from_args"):
        container = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(container, datasets, _build_gpt, kind, forward)
    else:
        pretrain(datasets, _build_gpt, kind, forward)


def _build_gpt(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """A chunk of the model, of the layers that 0.19's own builder takes by default."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    kind = {"use_transformer_engine": config.transformer_impl == "transformer_engine"}
    norms = {"normalization": config.normalization, "qk_l2_norm": config.qk_l2_norm}
    layers: Any
    if config.num_moe_experts is not None:
        layers = gpt_layer_specs.get_gpt_decoder_block_spec(
            config, **kind, **norms, vp_stage=vp_stage
        )
    else:
        layers = _layer_spec(config)
    prediction = None
    if config.mtp_num_layers is not None:
        last_layer = gpt_layer_specs.get_gpt_decoder_layer_specs(config, **kind, **norms)[-1]
        prediction = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, last_layer, **kind, vp_stage=vp_stage
        )
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=prediction,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def _layer_spec(config: Any) -> Any:
    """Of a layer without experts; all of them are alike."""
    from megatron.core.models.gpt import gpt_layer_specs

    options = {
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
        "qk_l2_norm": config.qk_l2_norm,
    }
    if config.transformer_impl == "transformer_engine":
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(**options)
    return gpt_layer_specs.get_gpt_layer_local_spec(normalization=config.normalization, **options)


def batch_of_this_rank(
    sample: dict[str, Any], micro_batch_size: int, sequence: int
) -> dict[str, Any]:
    """A microbatch on all ranks that share its chunk, cut to this rank's part of the sequence.

    Args:
        sample: what the first tensor-parallel rank has read; on the others, its keys.
        micro_batch_size: samples.
        sequence: tokens in a sample.
    """
    from megatron.core import parallel_state, utils
    from megatron.training import get_args

    first = parallel_state.get_tensor_model_parallel_src_rank()
    group = parallel_state.get_tensor_model_parallel_group()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if hasattr(utils, "get_batch_on_this_tp_rank"):
        sample = utils.get_batch_on_this_tp_rank(
            sample,
            False,  # packed sequences: `is_sft` in 0.18, `has_cu_seqlens` since 0.19
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=False,
            broadcast_src_rank=first,
            broadcast_group=group,
            cp_size=parallel_state.get_context_parallel_world_size(),
            tp_rank=rank,
            micro_batch_size=micro_batch_size,
            seq_length=sequence,
            # Multi-token prediction needs the tokens where the labels are.
            mtp_on_this_rank=bool(getattr(get_args(), "mtp_num_layers", None)),
        )
    else:  # 0.17's reads the data itself, and by its flags waits for a mask that there is not
        _broadcast(sample, (micro_batch_size, sequence), first, group, is_first=rank == 0)
    cut = utils.get_batch_on_this_cp_rank
    hybrid = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(cut).parameters else {}
    batch: dict[str, Any] = cut(
        sample, cp_group=parallel_state.get_context_parallel_group(), **hybrid
    )
    return batch


def _broadcast(
    sample: dict[str, Any], shape: tuple[int, int], first: int, group: Any, *, is_first: bool
) -> None:
    whole = torch.int64
    for key, dtype in (
        ("tokens", whole),
        ("labels", whole),
        ("loss_mask", torch.float32),
        ("position_ids", whole),
    ):
        if not is_first:
            sample[key] = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
        torch.distributed.broadcast(sample[key], first, group=group)
