"""How many chunks a rank holds, and which layers: what Megatron's flags and our schedule say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.arrangement import Arrangement, arrange
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.layer_spread import describe, layout_of, padded, spread
from zero_bubble.placement import Placement

__all__ = ["chunks_asked_for", "set_layers"]

LAYOUT = "--pipeline-model-parallel-layout"
UNEVEN = {
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
    "hybrid_layer_pattern": "--hybrid-layer-pattern",
}
ACCOUNT = {
    "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
    "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
}
"""Megatron's arguments, and their flags, that say what a layout says."""
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What a flag of Megatron's says about the number of chunks of the whole model."""

    flag: str
    chunks: int

    def remedy(self, placement: Placement) -> str:
        """What to give instead for this placement, in the flag's own terms."""
        if self.flag.startswith(LAYOUT):
            return f"give it {placement.num_positions} parts, or leave it out"
        counts = set(map(len, placement.positions))
        if self.flag.startswith(VIRTUAL) and len(counts) == 1:
            return f"make it {counts.pop()}, or leave it out"
        return "leave it out"


def _said(args: Any) -> _Chunks | None:
    """What Megatron's flags say, of which at most one may be given."""
    stages = args.pipeline_model_parallel_size
    given: list[_Chunks] = []
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        given.append(_Chunks(f"{LAYOUT} {layout}", len(_parts(layout, args))))
    virtual = getattr(args, "num_virtual_stages_per_pipeline_rank", None)
    if virtual is not None:
        if virtual < 1:
            raise ConfigurationError(f"{VIRTUAL} {virtual}: must be at least 1")
        given.append(_Chunks(f"{VIRTUAL} {virtual}", virtual * stages))
    layers = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    # A checkpoint's arguments say how it was saved, not how this run is to be.
    if layers is not None and not getattr(args, "use_mp_args_from_checkpoint_args", False):
        flag = f"--num-layers-per-virtual-pipeline-stage {layers}"
        total = _num_layers(args) + sum(_ends_as_layers(args).values())
        if layers < 1 or total % (layers * stages):
            raise ConfigurationError(
                f"{flag} does not cut {total} layers into chunks for {stages} stages: use "
                f"{VIRTUAL}, which spreads any number of layers"
            )
        given.append(_Chunks(flag, total // layers))
    if len(given) > 1:
        raise ConfigurationError(
            f"{given[0].flag} and {given[1].flag} both say which chunks there are: give one of them"
        )
    return given[0] if given else None


def chunks_asked_for(args: Any) -> int | None:
    """Chunks a stage that Megatron's flags ask for; None if they do not say.

    Raises:
        ConfigurationError: a number that does not come out even over the stages.
    """
    said = _said(args)
    if said is None:
        return None
    stages: int = args.pipeline_model_parallel_size
    chunks, rest = divmod(said.chunks, stages)
    if rest:
        raise ConfigurationError(
            f"{said.flag} makes {said.chunks} chunks, which do not come out even over "
            f"--pipeline-model-parallel-size {stages}"
        )
    if not said.flag.startswith(LAYOUT):
        # Before a schedule of that many chunks is built.
        _check_enough_layers(args, said.flag, stages, said.chunks)
    return chunks


def _check_enough_layers(args: Any, flag: str, stages: int, chunks: int) -> None:
    layers = _num_layers(args)
    if layers + sum(_ends_as_layers(args).values()) < chunks:
        raise ConfigurationError(
            f"--num-layers {layers} is too few for {flag} on {stages} stages, which "
            f"has {chunks} chunks: use at least {chunks} layers, fewer stages, or a "
            f"{LAYOUT} with chunks that have no layer"
        )


def set_layers(args: Any, flag: str, placement: Placement) -> None:
    """Tell Megatron which layers each chunk of the placement has, by its own layout argument.

    A layout that is given is kept. Otherwise layers are spread (`layer_spread.spread`), and the
    choice is printed; but one chunk a stage with layers that divide, or with Megatron's own flags
    for uneven stages, is left to Megatron. ``zero_bubble_positions`` is set on the arguments, and
    so is kept in checkpoints.

    Raises:
        ConfigurationError: flags that contradict the placement, or too few layers.
    """
    arrangement = arrange(placement)
    said = _said(args)
    if said is not None and said.chunks != placement.num_positions:
        raise ConfigurationError(
            f"{flag} has {placement.num_positions} chunks in all, but {said.flag} makes "
            f"{said.chunks}: {said.remedy(placement)}"
        )
    loader = getattr(args, "dataloader_save", None)
    if loader is not None and arrangement.first_rank != 0:
        raise ConfigurationError(
            f"{flag} does not work with --dataloader-save {loader}: Megatron saves the state of "
            "the loader on the first rank, and here the last one reads the data; leave it out"
        )
    args.zero_bubble_positions = [list(held) for held in arrangement.positions]
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if isinstance(layout, str):
        _refuse_beside_layout(args, layout)
        parts = _parts(layout, args)
    else:
        layout = _chosen_layout(args, flag, arrangement)
        parts = [] if layout is None else layout.split("|")
    # Each of these is another way to say what a layout says, of which Megatron takes one.
    args.num_virtual_stages_per_pipeline_rank = None
    args.num_layers_per_virtual_pipeline_stage = None
    if layout is None:
        return
    if os.environ.get("RANK", "0") == "0":
        print(
            f"zero-bubble: placement {placement.name}: {describe(parts, arrangement)}; as "
            f"{LAYOUT} {layout!r} says in the order of the model",
            flush=True,
        )
    args.pipeline_model_parallel_layout = padded(layout, arrangement)
    args.account_for_embedding_in_pipeline_split = False
    args.account_for_loss_in_pipeline_split = False
    if arrangement.chunks_a_rank > 1:
        # Without it Megatron refuses two stages, for its own messages, which do not run here.
        args.overlap_p2p_comm = True


def _chosen_layout(args: Any, flag: str, arrangement: Arrangement) -> str | None:
    placement = arrangement.placement
    positions, ends = placement.num_positions, _ends_as_layers(args)
    # Megatron numbers layers by rank and chunk.
    own = arrangement.is_megatrons and arrangement.chunks_a_rank == 1
    for name, dashed in UNEVEN.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if own:
            return None
        raise ConfigurationError(
            f"{flag} has the placement {placement.name}, of which {dashed} {value} does not tell "
            f"which layers each chunk has: use {LAYOUT}, in the order of the model"
        )
    layers = _num_layers(args)
    _check_enough_layers(args, flag, placement.num_stages, positions)
    if own and (layers + sum(ends.values())) % positions == 0:
        return None
    return layout_of(spread(layers, arrangement, **ends), _num_predictions(args))


def _refuse_beside_layout(args: Any, layout: str) -> None:
    for name, dashed in (UNEVEN | ACCOUNT).items():
        value = getattr(args, name, None)
        if value is not None and value is not False:
            shown = dashed if value is True else f"{dashed} {value}"
            raise ConfigurationError(
                f"{LAYOUT} {layout} says which layers each chunk has: leave {shown} out"
            )


def _parts(layout: str, args: Any) -> list[str]:
    """The parts of a layout, one letter for each thing in a part, by Megatron's reading of it.

    Raises:
        ConfigurationError: it cannot be read, does not begin and end as a model does, or has
            another number of layers than the model.
    """
    num_layers, predictions = _num_layers(args), _num_predictions(args)
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    flag = f"{LAYOUT} {layout}"
    try:
        rows = PipelineParallelLayerLayout.parse_str_to_list(layout)
    except AssertionError as error:
        raise ConfigurationError(f"{flag}: {error}") from error
    letters = {
        LayerType.embedding: "E",
        LayerType.decoder: "t",
        LayerType.mtp: "m",
        LayerType.loss: "L",
    }
    parts = ["".join(letters.get(kind, "?") for kind in row) for row in rows]
    whole, end = "".join(parts), "m" * predictions + "L"
    if whole.count("m") != predictions:
        raise ConfigurationError(
            f"{flag} has {whole.count('m')} layers of multi-token prediction (m), but "
            f"--mtp-num-layers is {predictions}: make the two equal"
        )
    if predictions and not parts[-1].endswith(end):
        raise ConfigurationError(
            f"{flag}: here multi-token prediction (m) runs in the last part only, right before "
            f"the loss; let the layout end with {end}"
        )
    if whole != "E" + "t" * whole.count("t") + end:
        raise ConfigurationError(
            f"{flag}: a model begins with the embedding and ends with the loss; write one E at the "
            "beginning and one L at the end"
        )
    if whole.count("t") != num_layers:
        raise ConfigurationError(
            f"{flag} has {whole.count('t')} layers (t), but --num-layers is {num_layers}: make the "
            "two equal"
        )
    return parts


def _num_layers(args: Any) -> int:
    for name in ("num_layers", "encoder_num_layers"):
        layers: int | None = getattr(args, name, None)
        if layers is not None:
            return layers
    raise ConfigurationError("--num-layers is missing")


def _num_predictions(args: Any) -> int:
    """Layers of multi-token prediction."""
    return getattr(args, "mtp_num_layers", None) or 0


def _ends_as_layers(args: Any) -> dict[str, bool]:
    return {
        "embedding": bool(getattr(args, "account_for_embedding_in_pipeline_split", False)),
        "loss": bool(getattr(args, "account_for_loss_in_pipeline_split", False)),
    }
