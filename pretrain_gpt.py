"""Pretrain a GPT model with Megatron and zero-bubble pipeline schedules.

    torchrun --nproc-per-node 2 pretrain_gpt.py --pipeline-model-parallel-size 2 ...

All of Megatron's flags work as usual; ours are listed in the documentation. The model follows
`--transformer-impl` (Transformer Engine or Megatron's local layers) and the MoE flags. Data is
what `--data-path` names, or random with `--mock-data`. For files made by `tools/prepare_text.py`
(bytes as tokens, 256 between documents) the tokenizer is
`--tokenizer-type NullTokenizer --vocab-size 257`: it takes the last number as end of document.
"""

import megatron.zero_bubble.adaptor  # noqa: F401  (must come before any other Megatron import)

# isort: split

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.models.gpt import GPTModel
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.utils import (
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)

from megatron.zero_bubble import compat

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
# Flags of Megatron that need another data set or attention mask than this script's.
UNSUPPORTED = ("reset_attention_mask", "dataloader_inter_document_masking", "sft", "fim_data")


def check_arguments(args: Namespace) -> None:
    """Refuse the flags this script would otherwise ignore."""
    for name in UNSUPPORTED:
        if getattr(args, name, False):
            raise ValueError(
                f"--{name.replace('_', '-')} is not supported by pretrain_gpt.py, which trains on "
                "plain documents with a causal mask: drop the flag"
            )


def build_datasets(
    num_samples: tuple[int, int | None, int | None], vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """The training, validation and test data for the chunks that read them, None for the others.

    Args:
        num_samples: how many samples each of the three must give; None is one epoch.
        vp_stage: the chunk of this rank, where the schedule gives it several.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=False,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # the attention makes the causal mask itself
    )
    check_documents(config, num_samples)

    def reads_data() -> bool:
        tensor_rank = parallel_state.get_tensor_model_parallel_rank()
        return tensor_rank == 0 and bool(is_first_or_last_pipeline_stage(vp_stage))

    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(dataset_class, num_samples, reads_data, config)
    train, validation, test = builder.build()
    return train, validation, test


def check_documents(config: GPTDatasetConfig, num_samples: Sequence[int | None]) -> None:
    """Stop where Megatron would look for ever for samples in a split without documents."""
    if config.blend is None or config.mock:
        return
    for prefix in config.blend[0]:
        if not Path(f"{prefix}.idx").is_file():
            refuse(
                f"--data-path {prefix}: there is no file {prefix}.idx; name what comes before .bin "
                "and .idx (tools/prepare_text.py makes both)"
            )
        data = GPTDataset.build_low_level_dataset(prefix, config)
        documents = GPTDataset.numel_low_level_dataset(data)
        names = ("training", "validation", "test")
        for name, share, wanted in zip(names, config.split_matrix, num_samples, strict=True):
            if share is None or wanted == 0:
                continue
            first, last = (round(bound * float(documents)) for bound in share)
            if first == last:
                refuse(
                    f"--split {config.split} leaves no document of the {documents} in {prefix} for "
                    f"{name}: use more documents, or --split 1,0,0 --eval-iters 0"
                )


def refuse(message: str) -> NoReturn:
    """End the run as a wrong flag does."""
    from megatron.zero_bubble.launch import stop

    stop(ValueError(message))


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]], micro_batch_size: int
) -> dict[str, Any]:
    """The next microbatch, cut to this rank's slice of the sequence: (microbatch, sequence).

    One rank of each tensor-parallel group reads and broadcasts. Tokens and labels both go out on
    any stage that needs one of them, so a stage may hold the first and the last chunk at once.
    """
    args = get_args()
    batch: dict[str, Any] = dict.fromkeys(BATCH_KEYS)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    if tensor_rank == 0:
        sample = next(data_iterator)
        batch |= {key: value.cuda(non_blocking=True) for key, value in sample.items()}
    return compat.batch_of_this_rank(batch, micro_batch_size, args.seq_length)


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of the tokens that count.

    Args:
        loss_mask: 1 for each token that counts, else 0; shaped (microbatch, sequence).
        output: the loss of each token, of the same shape.

    Returns:
        The summed loss, the number of tokens that counted (Megatron divides), and both in one
        tensor, for the log.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda value: not bool(torch.isfinite(value)),
            message="the loss is not a finite number",
            tolerance=0.0,
            fatal=True,
        )
    report = torch.stack([loss.detach(), num_tokens.float()])
    return loss, num_tokens, {"lm loss": report}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]], model: GPTModel
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one microbatch through one model chunk.

    Returns:
        The chunk's output (the loss of each token on the last chunk) and the loss function.
    """
    args, timers = get_args(), get_timers()
    timers("batch-generator", log_level=2).start()
    batch: dict[str, Any] = dict.fromkeys(BATCH_KEYS)
    # Chunks in the middle work on what the chunk before them sent.
    if get_attr_wrapped_model(model, "pre_process") or get_attr_wrapped_model(
        model, "post_process"
    ):
        evaluates = compat.evaluation_microbatch_size(args)
        size = args.micro_batch_size if model.training else evaluates
        batch = get_batch(data_iterator, size)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def main() -> None:
    """Parse the command line and train."""
    args = compat.parse_arguments()
    check_arguments(args)
    # Megatron then calls it on every rank, and reads_data decides who builds.
    build_datasets.is_distributed = True  # type: ignore[attr-defined]
    compat.pretrain_gpt(args, build_datasets, forward_step)


# Saving a checkpoint starts a process that imports this file again.
if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:  # how Megatron leaves at --exit-interval
        if end.code:
            raise
    # Or threads of the backend may meet an interpreter that is going away, and abort the process.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
