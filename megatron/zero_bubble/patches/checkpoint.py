"""A checkpoint that fits only the layout it was saved with is refused under another one.

Layers have their number in the model as key in a checkpoint, so the model itself can be loaded on
any ranks. Two formats cannot: the distributed optimizer's default (its keys are the buffers of a
rank) and files for each rank (``--ckpt-format torch``). Megatron notices some of these cases by the
sizes of tensors, and where sizes agree it loads one layer's state into another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.launch import stop
from megatron.zero_bubble.patches.patching import Patch, apply

__all__ = ["Layout", "install", "layout_of", "refuse_other_layout", "unportable_format"]

FILES_OF_RANKS = "torch"
"""Megatron's --ckpt-format with a file for each rank."""


def install() -> None:
    """Patch the function that has the checkpoint's arguments first, before tensors are read."""
    apply(
        Patch(
            "megatron.training.checkpointing",
            "_load_base_checkpoint",
            "a checkpoint that fits only another layout is refused",
            _refusing,
        )
    )


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_base_checkpoint(load_dir: Any, args: Any, *rest: Any, **options: Any) -> Any:
        loaded = original(load_dir, args, *rest, **options)
        state, _, release, kind = loaded
        # Until Megatron has validated them, arguments are about to come from the checkpoint.
        validated = hasattr(args, "data_parallel_size")
        saved = state.get("args") if validated and state is not None else None
        if saved is not None:
            kind_name = getattr(kind, "name", None)
            try:
                unportable = unportable_format(args, saved, state, kind_name, release=release)
                if unportable is not None:
                    refuse_other_layout(args, saved, str(load_dir), unportable)
            except ConfigurationError as error:
                stop(error)
        return loaded

    return load_base_checkpoint


def unportable_format(
    args: Any, saved: Any, state: dict[str, Any], kind: str | None, *, release: bool
) -> str | None:
    """The format that ties what would be loaded to the ranks it was saved on; None if none does.

    Args:
        args: this run's arguments.
        saved: the checkpoint's.
        state: what the checkpoint says outside its tensors.
        kind: name of Megatron's ``CheckpointType``.
        release: whether it is a model without training state.
    """
    from megatron.core.dist_checkpointing import load_content_metadata
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if kind == "LEGACY":
        return FILES_OF_RANKS
    if release or args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", False):
        return None
    content = load_content_metadata(preloaded_state_dict=state)
    sharding: str | None
    if content is not None:
        sharding = content.get("distrib_optim_sharding_type")
    elif getattr(saved, "use_distributed_optimizer", False):
        # From before Megatron wrote it down.
        parallel = getattr(saved, "ckpt_fully_parallel_save", False)
        sharding = "fully_sharded_model_space" if parallel else "dp_zero_gather_scatter"
    else:
        sharding = None
    portable = DistributedOptimizer.checkpoint_fully_reshardable_formats
    return None if sharding in portable else sharding


BUCKETS = "--zero-bubble-bucket-all-stages"


def refuse_other_layout(args: Any, saved: Any, load_dir: str, unportable: str) -> None:
    """Stop if this run holds the model on other ranks or in other chunks than the checkpoint.

    Where both are Megatron's own, what to do is left to Megatron.

    Raises:
        ConfigurationError: names both layouts, and how to load the checkpoint nevertheless.
    """
    positions = (getattr(one, "zero_bubble_positions", None) for one in (saved, args))
    if all(one is None for one in positions):
        return
    was, now = layout_of(saved), layout_of(args)
    flag = "--load" if load_dir == getattr(args, "load", None) else "--pretrained-checkpoint"
    if was == now:
        if unportable != FILES_OF_RANKS:
            _refuse_other_buckets(args, saved, f"{flag} {load_dir}", unportable)
        return
    schedule = getattr(saved, "pipeline_schedule", None)
    command = "the command that saved it"
    if schedule is not None:
        command += f" (--pipeline-schedule {schedule})"
    convert = (
        f"To convert it, repeat {command} with --load {load_dir} --ckpt-convert-format torch_dist "
        "--ckpt-convert-save NEW --dist-ckpt-optim-fully-reshardable, which saves without "
        f"training, and use {flag} NEW/torch_dist here"
    )
    if unportable == FILES_OF_RANKS:
        what = "it consists of files for each rank (--ckpt-format torch)"
        remedies = convert
    else:
        what = f"its optimizer state is in the format {unportable}"
        remedies = (
            f"{convert}; a run that trains with --dist-ckpt-optim-fully-reshardable saves such "
            "checkpoints at once. Without the optimizer state it can be loaded as it is: add "
            "--no-load-optim or --finetune"
        )
    raise ConfigurationError(
        f"{flag} {load_dir} was saved with {was.words(now)}, this run has {now.words(was)}, and "
        f"{what}, which fits only the layout it was saved with. {remedies}"
    )


def _refuse_other_buckets(args: Any, saved: Any, load: str, unportable: str) -> None:
    had, has = (getattr(one, "zero_bubble_bucket_all_stages", False) for one in (saved, args))
    if had != has:
        raise ConfigurationError(
            f"{load} was saved {'with' if had else 'without'} {BUCKETS}, and its optimizer state "
            f"is in the format {unportable}, which is laid out by buckets: "
            f"{'add' if had else 'leave out'} {BUCKETS}. A run that trains with "
            "--dist-ckpt-optim-fully-reshardable saves checkpoints that fit both"
        )


type Chunk = tuple[str, ...]
"""What a chunk consists of: numbers of layers, and names of what is not a layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which parts of the model each rank holds. Equal layouts have equal buffers on each rank."""

    tensor_ranks: int
    ranks: tuple[tuple[Chunk, ...], ...]
    """By pipeline rank and virtual chunk."""
    placement: str = field(compare=False)

    def words(self, other: Layout) -> str:
        """The layout for people, in as many words as tell it from another one."""
        words = [f"PP {len(self.ranks)}", f"placement {self.placement}"]
        if self.tensor_ranks != other.tensor_ranks:
            words.insert(0, f"TP {self.tensor_ranks}")
        elif (len(self.ranks), self.placement) == (len(other.ranks), other.placement):
            counts = ("+".join(map(str, map(_num_layers, held))) for held in self.ranks)
            words.append(f"layers {' | '.join(counts)} on the ranks")
        return ", ".join(words)


def _num_layers(chunk: Chunk) -> int:
    return sum(part.isdecimal() for part in chunk)


def layout_of(args: Any) -> Layout:
    """The layout that Megatron's arguments mean, as a run has them or a checkpoint keeps them."""
    stages: int = getattr(args, "pipeline_model_parallel_size", 1)
    parts = _parts(args, stages)
    positions = getattr(args, "zero_bubble_positions", None)
    if positions is None:
        positions = [list(range(rank, len(parts), stages)) for rank in range(stages)]
    return Layout(
        getattr(args, "tensor_model_parallel_size", 1),
        tuple(
            tuple(() if position is None else parts[position] for position in held)
            for held in positions
        ),
        _placement(positions),
    )


def _placement(positions: Sequence[Sequence[int | None]]) -> str:
    stages, chunks = len(positions), max(map(len, positions))
    held = [list(one) for one in positions]
    if held == [list(range(rank, stages * chunks, stages)) for rank in range(stages)]:
        return "linear" if chunks == 1 else f"interleaved ({chunks} chunks a stage)"
    v = [[stage, 2 * stages - 1 - stage] for stage in range(stages)]
    return "v" if held in (v, v[::-1]) else str(held)


def _parts(args: Any, stages: int) -> list[Chunk]:
    """What each chunk consists of, in the order of the model."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        kinds = PipelineParallelLayerLayout.parse_str_to_list(str(layout))
        return _numbered([[kind.name for kind in row] for row in kinds])
    chunks = getattr(args, "virtual_pipeline_model_parallel_size", None) or 1
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is not None:  # it has the cuts in it
        return [(f"{pattern} {position}",) for position in range(stages * chunks)]
    rows = [["decoder"] * count for count in _layer_counts(args, stages, chunks)]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return _numbered(rows)


def _numbered(rows: Sequence[Sequence[str]]) -> list[Chunk]:
    layers = iter(range(sum(map(len, rows))))
    return [tuple(str(next(layers)) if kind == "decoder" else kind for kind in row) for row in rows]


def _layer_counts(args: Any, stages: int, chunks: int) -> list[int]:
    """Layers of each chunk in the order of the model, by Megatron's flags other than a layout."""
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    last = getattr(args, "decoder_last_pipeline_num_layers", None)
    embedding = bool(getattr(args, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(args, "account_for_loss_in_pipeline_split", False))
    fixed = {rank: count for rank, count in ((0, first), (stages - 1, last)) if count is not None}
    others = max(1, stages - len(fixed))
    each = (args.num_layers + embedding + loss - sum(fixed.values())) // others
    counts = [fixed.get(rank, each) // chunks for rank in range(stages)] * chunks
    counts[0] -= embedding
    counts[-1] -= loss
    return counts
