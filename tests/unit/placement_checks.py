"""What test_placement_patches.py asks of the patches of Megatron, in a process in CPU mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.zero_bubble.arrangement import arrange
from megatron.zero_bubble.patches import placement
from zero_bubble.placement import Placement, interleaved, v_shape


@contextmanager
def chunks_a_rank(number: int) -> Iterator[None]:
    before = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    parallel_state.set_virtual_pipeline_model_parallel_world_size(number)
    try:
        yield
    finally:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(before)


@contextmanager
def arranged(positions: list[list[int]]) -> Iterator[None]:
    placement.use(arrange(Placement(tuple(map(tuple, positions)))))
    try:
        yield
    finally:
        placement.use(None)


def layer_ids(layout: Any, ranks: int, chunks: int) -> list[list[list[int]]]:
    with chunks_a_rank(chunks):
        return [
            [
                layout.get_layer_id_list(LayerType.decoder, vp_stage=chunk, pp_rank=rank)
                for chunk in range(chunks)
            ]
            for rank in range(ranks)
        ]


def layers_of_a_v(layout: str, stages: int) -> list[list[list[int]]]:
    """By pipeline rank and virtual chunk, as Megatron asks for them."""
    return layer_ids(placement.PlacedLayout(layout, arrange(v_shape(stages))), stages, 2)


def layers_of(layout: str, positions: list[list[int]]) -> list[list[list[int]]]:
    arrangement = arrange(Placement(tuple(map(tuple, positions))))
    placed = placement.PlacedLayout(layout, arrangement)
    return layer_ids(placed, len(positions), arrangement.chunks_a_rank)


def interleaved_is_megatrons_own(layout: str, stages: int, chunks: int) -> None:
    """Where the arrangement is Megatron's, placing by it gives what Megatron gives."""
    placed = placement.PlacedLayout(layout, arrange(interleaved(stages, chunks)))
    own = PipelineParallelLayerLayout(layout, stages)
    assert layer_ids(placed, stages, chunks) == layer_ids(own, stages, chunks)
    assert placed.layout == own.layout
    assert placed.flatten_layout == own.flatten_layout


def ranks_of_embeddings(positions: list[list[int]] | None) -> tuple[list[int], list[int]]:
    """Of a pipeline of ranks 10, 11, ...: where word and position embeddings are."""
    ranks = [10 + rank for rank in range(len(positions or [[0], [1], [2]]))]
    words = placement._embedding_ranks(parallel_state.default_embedding_ranks)
    places = placement._beginning_ranks(parallel_state.default_position_embedding_ranks)
    if positions is None:
        return words(ranks), places(ranks)
    with arranged(positions):
        return words(ranks), places(ranks)


def beginnings(positions: list[list[int]]) -> list[list[bool]]:
    """By pipeline rank: whether it holds the beginning; then whether each virtual chunk is it."""
    ranks = range(len(positions))
    original = parallel_state.is_pipeline_first_stage
    begins = placement._rank_begins(original)
    answers = []
    with arranged(positions), chunks_a_rank(2):
        for rank in ranks:
            parallel_state.set_pipeline_model_parallel_rank(rank)
            answers.append(
                [begins(), *(begins(ignore_virtual=False, vp_stage=chunk) for chunk in (0, 1))]
            )
    parallel_state.set_pipeline_model_parallel_rank(None)
    return answers


def batch_arguments(first: bool, last: bool) -> dict[str, Any]:
    """What Megatron's function is called with on a rank of four."""
    seen: dict[str, Any] = {}
    patched = placement._whole_batch(lambda batch, **options: seen.update(options))
    patched(
        {},
        pipeline_model_parallel_size=4,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    return seen


def reader_is_asked_for_all(positions: list[list[int]]) -> list[bool]:
    """By pipeline rank: whether a function that reads the data is to give tokens and labels."""
    asked: list[bool] = []

    def reader(data_iterator: Any, mtp_on_this_rank: bool = False) -> None:
        asked.append(mtp_on_this_rank)

    patched = placement._whole_batch(reader)
    first = placement._rank_begins(parallel_state.is_pipeline_first_stage)
    begins = mock.patch.object(parallel_state, "is_pipeline_first_stage", first)
    with arranged(positions), begins, pipeline_of(len(positions)):
        for rank in range(len(positions)):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            patched(iter(()))
    return asked


@contextmanager
def pipeline_of(ranks: int) -> Iterator[None]:
    parallel_state.set_pipeline_model_parallel_world_size(ranks)
    try:
        yield
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)


class Chunk(torch.nn.Module):  # type: ignore[misc]
    """The part of a language model that the patches look at."""

    def __init__(self, *, pre_process: bool, post_process: bool, value: float) -> None:
        super().__init__()
        self.pre_process, self.post_process = pre_process, post_process
        self.share_embeddings_and_output_weights = True
        self.config = SimpleNamespace(pipeline_model_parallel_size=2)
        self.weight = torch.nn.Parameter(torch.full((3, 2), value))
        self.weight.main_grad = torch.full((3, 2), value)

    def shared_embedding_or_output_weight(self) -> torch.nn.Parameter:
        return self.weight


def tied_weights(positions: list[list[int]]) -> dict[str, list[float]]:
    """First values of both copies on a rank with both ends, after set-up and after the sum."""
    begin = Chunk(pre_process=True, post_process=False, value=2.0)
    end = Chunk(pre_process=False, post_process=True, value=0.5)
    set_up = placement._start_tied_weights_equal(lambda self: None)
    add = placement._sum_tied_gradients(lambda *given: None)
    with arranged(positions):
        set_up(begin)
        set_up(end)
        add([begin, end], begin.config, None, None)
    both = (begin.weight, end.weight)
    return {
        "weights": [one.data[0, 0].item() for one in both],
        "gradients": [one.main_grad[0, 0].item() for one in both],
    }


def tensors_that_a_rank_holds_twice() -> dict[str, Any]:
    """What becomes of them where data-parallel ranks share a checkpoint."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

    from megatron.zero_bubble.patches import tied_checkpoint

    def sharded(key: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.zeros(2), replica_id=(0, 0, 0))

    def all_main(state: dict[str, Any], *_: Any) -> None:
        for one in state.values():
            one.replica_id = 0

    state = {"begin": sharded("weight"), "end": sharded("weight"), "other": sharded("other")}
    tied_checkpoint._once(all_main)(state)
    written = {name: one.replica_id for name, one in state.items()}

    loaded = {_sharded_tensor_shard_id(one): torch.ones(2) for one in state.values()}

    def fill_in(into: dict[str, Any], tensors: Any) -> None:
        for name, one in into.items():
            into[name] = tensors[_sharded_tensor_shard_id(one)]

    tied_checkpoint._each_its_own(fill_in).__func__(state, loaded)
    state["begin"].add_(1)  # as Adam does to its moments
    return {"written": written, "read": {name: one.tolist() for name, one in state.items()}}


def on_an_older_megatron() -> list[str]:
    """What is said of a V, an interleaved and no placement where Megatron lacks a place."""
    from megatron.zero_bubble.errors import ConfigurationError

    said = []
    placement._missing.append("megatron.somewhere.something")
    try:
        for one in (arrange(v_shape(2)), arrange(interleaved(2, 2)), None):
            try:
                placement.use(one)
                said.append("")
            except ConfigurationError as error:
                said.append(str(error))
    finally:
        placement._missing.clear()
        placement.use(None)
    return said
