"""Megatron builds the chunks of any placement, and knows which rank holds the model's beginning.

The end of the model stays where Megatron expects it, on the last rank: see `arrangement.py`. Where
ranks and chunks are numbered as Megatron numbers them (linear, interleaved), nothing here acts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model, get_pg_rank

from megatron.zero_bubble import compat
from megatron.zero_bubble.arrangement import Arrangement
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.patches.patching import (
    TESTED_VERSIONS,
    Patch,
    apply,
    installed_version,
)

__all__ = ["arrangement_of_run", "install", "use"]

_arrangements: list[Arrangement] = []
"""The run's one arrangement, if a schedule of ours runs."""

_CORE = "megatron.core"


_missing: list[str] = []
"""What this Megatron lacks of what placements that it does not know need."""


def use(arrangement: Arrangement | None) -> None:
    """Build the model in this arrangement, or as Megatron does.

    Raises:
        ConfigurationError: an older Megatron cannot build it.
    """
    if arrangement is not None and not arrangement.is_megatrons and _missing:
        raise ConfigurationError(
            f"the schedule's placement, {arrangement.placement.name}, needs {_missing[0]}, which "
            f"{installed_version()} does not have: install megatron-core {TESTED_VERSIONS[-1]}, or "
            "choose a schedule with linear or interleaved placement"
        )
    _arrangements[:] = [] if arrangement is None else [arrangement]


def arrangement_of_run() -> Arrangement | None:
    """The arrangement that the model is built in; None where Megatron's own schedule runs."""
    return _arrangements[0] if _arrangements else None


def install() -> None:
    """Patch where Megatron places layers, and where it asks for the rank of the beginning.

    A Megatron that lacks one of these places can run the placements it knows (see `use`).
    """
    first = "the model may begin on another rank than the first"
    for module, attribute, reason, make in (
        (
            f"{_CORE}.transformer.pipeline_parallel_layer_layout",
            "PipelineParallelLayerLayout.from_str",
            "a chunk of any placement gets its layers, and their numbers",
            _placed_layout,
        ),
        (f"{_CORE}.pipeline_parallel.utils", "is_pp_first_stage", first, _group_begins),
        (f"{_CORE}.parallel_state", "is_pipeline_first_stage", first, _rank_begins),
        (f"{_CORE}.parallel_state", "default_embedding_ranks", first, _embedding_ranks),
        (f"{_CORE}.parallel_state", "default_position_embedding_ranks", first, _beginning_ranks),
        (
            compat.training_utils(),
            "is_first_or_last_pipeline_stage",
            "rank 0 prepares the data for all, whichever rank reads it",
            _reads_or_prepares_data,
        ),
        (
            compat.batch_home(),
            "get_batch_on_this_tp_rank",
            "a rank with both ends of the model needs tokens and labels",
            _whole_batch,
        ),
        (
            f"{_CORE}.models.common.language_module.language_module",
            "LanguageModule.setup_embeddings_and_output_layer",
            "tied embeddings on one rank start equal without a message",
            _start_tied_weights_equal,
        ),
        (
            f"{_CORE}.distributed.finalize_model_grads",
            "_allreduce_word_embedding_grads",
            "tied embeddings on one rank sum their gradients without a message",
            _sum_tied_gradients,
        ),
    ):
        patch = Patch(module, attribute, reason, make)
        try:
            apply(patch)
        except ConfigurationError:
            _missing.append(patch.name)


def _moved() -> Arrangement | None:
    """The run's arrangement, if it is another than Megatron's own."""
    arrangement = arrangement_of_run()
    return None if arrangement is None or arrangement.is_megatrons else arrangement


class PlacedLayout(PipelineParallelLayerLayout):  # type: ignore[misc]
    """A layout whose parts, in the order of the model, lie where an arrangement puts them."""

    layout: list[list[list[LayerType]]]
    """By pipeline rank and virtual chunk."""

    def __init__(self, layout: str, arrangement: Arrangement) -> None:
        super().__init__(layout, len(arrangement.ranks))
        self._positions = arrangement.positions
        chunks = self.virtual_pipeline_model_parallel_size
        parts = [rank[chunk] for chunk in range(chunks) for rank in self.layout]
        self._parts = parts
        self.layout = [
            [[] if position is None else parts[position] for position in held]
            for held in arrangement.positions
        ]

    def get_layer_offset(
        self,
        layer_type: LayerType = LayerType.decoder,
        vp_stage: int | None = None,
        pp_rank: int | None = None,
    ) -> int:
        """Number of layers before a chunk, in the order of the model."""
        if pp_rank is None:
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        position = self._positions[pp_rank][vp_stage or 0]
        return sum(part.count(layer_type) for part in self._parts[: position or 0])


def _placed_layout(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def from_str(layout: str, pipeline_model_parallel_size: int) -> Any:
        arrangement = _moved()
        if arrangement is None:
            return original(layout, pipeline_model_parallel_size)
        return PlacedLayout(layout, arrangement)

    return staticmethod(from_str)


def _group_begins(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_pp_first_stage(pp_group: Any) -> bool:
        arrangement = _moved()
        if arrangement is None:
            return original(pp_group)
        rank: int = get_pg_rank(pp_group)
        return rank == arrangement.first_rank

    return is_pp_first_stage


def _rank_begins(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
        arrangement = _moved()
        if arrangement is None:
            return original(ignore_virtual, vp_stage)
        if not ignore_virtual and vp_stage not in (None, 0):
            return False
        rank: int = parallel_state.get_pipeline_model_parallel_rank()
        return rank == arrangement.first_rank

    return is_pipeline_first_stage


def _embedding_ranks(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
        arrangement = _moved()
        if arrangement is None:
            return original(pp_ranks)
        return sorted({pp_ranks[arrangement.first_rank], pp_ranks[-1]})

    return default_embedding_ranks


def _beginning_ranks(original: Callable[..., list[int]]) -> Callable[..., list[int]]:
    def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
        arrangement = _moved()
        if arrangement is None:
            return original(pp_ranks)
        return [pp_ranks[arrangement.first_rank]]

    return default_position_embedding_ranks


def _reads_or_prepares_data(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
        # Megatron writes the index of the samples, and decides whether there is something to
        # train on, on the first rank of the job, which is to be one that builds the data sets.
        prepares = _moved() is not None and not vp_stage and torch.distributed.get_rank() == 0
        return prepares or original(vp_stage)

    return is_first_or_last_pipeline_stage


def _whole_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    if compat.reads_the_data(original):
        return _whole_batch_of_reader(original)

    @functools.wraps(original)
    def get_batch_on_this_tp_rank(*given: Any, **options: Any) -> Any:
        if options.get("is_pipeline_first_stage") and options.get("is_pipeline_last_stage"):
            # What a rank with the whole model gets.
            options["pipeline_model_parallel_size"] = 1
        return original(*given, **options)

    return get_batch_on_this_tp_rank


def _whole_batch_of_reader(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_batch_on_this_tp_rank(data_iterator: Any, mtp_on_this_rank: bool = False) -> Any:
        both_ends = (
            _moved() is not None
            and parallel_state.is_pipeline_first_stage()
            and parallel_state.is_pipeline_last_stage()
        )
        # What a rank gets that predicts several tokens, which takes tokens and labels.
        return original(data_iterator, mtp_on_this_rank or both_ends)

    return get_batch_on_this_tp_rank


def _both_ends_here(config: Any) -> bool:
    """Whether this rank holds both ends of the model in two chunks."""
    arrangement = _moved()
    return (
        arrangement is not None
        and arrangement.first_rank == len(arrangement.ranks) - 1
        and config.pipeline_model_parallel_size > 1
    )


def _has_two_embeddings(model: Any) -> bool:
    """Whether the embedding is needed at the end too: by a tied output layer, or by multi-token
    prediction, which embeds the tokens that it has predicted."""
    predicts = getattr(model.config, "mtp_num_layers", None)
    return bool(model.share_embeddings_and_output_weights or predicts)


def _start_tied_weights_equal(original: Callable[..., None]) -> Callable[..., None]:
    embeddings: list[torch.nn.Parameter] = []  # of the chunk with the embedding, built before

    @functools.wraps(original)
    def setup_embeddings_and_output_layer(self: Any) -> None:
        original(self)
        if not (_has_two_embeddings(self) and _both_ends_here(self.config)):
            return
        weight = self.shared_embedding_or_output_weight()
        if self.pre_process:
            embeddings[:] = [weight]
        elif self.post_process:
            # Megatron's copy of the embedding starts as zeros, to which it adds over a group of
            # ranks what the other copy is.
            weight.data.copy_(embeddings.pop().data)

    return setup_embeddings_and_output_layer


def _sum_tied_gradients(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def allreduce_word_embedding_grads(model: Any, config: Any, *rest: Any) -> None:
        original(model, config, *rest)
        if not _both_ends_here(config):
            return
        begin = _end_of_model(model, "pre_process")
        end = _end_of_model(model, "post_process")
        if begin is None or end is None or not _has_two_embeddings(begin):
            return
        weights = [one.shared_embedding_or_output_weight() for one in (begin, end)]
        attribute = "main_grad" if hasattr(weights[0], "main_grad") else "grad"
        gradients = [getattr(weight, attribute) for weight in weights]
        if any(gradient is None for gradient in gradients):  # frozen
            return
        # Accumulated apart until here, and added once, like Megatron's copies on two ranks: then
        # the sum has the same bits.
        gradients[0].add_(gradients[1])
        gradients[1].copy_(gradients[0])

    return allreduce_word_embedding_grads


def _end_of_model(model: Sequence[Any], which: str) -> Any | None:
    for chunk in model:
        inner = get_attr_wrapped_model(chunk, which, return_model_obj=True)
        if getattr(inner, which):
            return inner
    return None
