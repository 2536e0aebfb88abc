"""Both copies of a tied embedding go through a checkpoint, where one rank holds both.

Megatron's copies are on two ranks of a pipeline, under one key of the checkpoint. Where
data-parallel ranks share the writing and reading, it takes for granted that a rank has a key once.
Under a V the last rank has this one twice: it would write it twice, and read one tensor for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.utils import _sharded_tensor_shard_id

from megatron.zero_bubble.patches.patching import Patch, apply

__all__ = ["install"]

NOT_MAIN = 1
"""The replica id that Megatron gives to what a rank does not write."""


def install() -> None:
    """Patch the two places where data-parallel ranks divide a checkpoint among themselves."""
    module = "megatron.core.dist_checkpointing.strategies.fully_parallel"
    apply(
        Patch(
            module,
            "distribute_main_replicas_with_precomputed_distribution",
            "a rank that holds a tensor twice writes it once",
            _once,
        )
    )
    apply(
        Patch(
            module,
            "FullyParallelLoadStrategyWrapper.fill_in_deferred_sharded_tensors",
            "a rank that holds a tensor twice gets two tensors",
            _each_its_own,
        )
    )


def _once(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def distribute(sharded_state_dict: Any, *rest: Any, **options: Any) -> None:
        original(sharded_state_dict, *rest, **options)
        written = set()
        for one in _sharded_tensors(sharded_state_dict):
            if is_main_replica(one.replica_id):
                key = _sharded_tensor_shard_id(one)
                if key in written:
                    one.replica_id = NOT_MAIN
                written.add(key)

    return distribute


def _each_its_own(original: Callable[..., None]) -> Any:
    @functools.wraps(original)
    def fill_in_deferred_sharded_tensors(sharded_state_dict: Any, loaded_tensors: Any) -> None:
        original(sharded_state_dict, loaded_tensors)
        given: set[int] = set()

        def own(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in given:
                return value.clone()
            given.add(id(value))
            return value

        dict_list_map_inplace(own, sharded_state_dict)

    return staticmethod(fill_in_deferred_sharded_tensors)


def _sharded_tensors(sharded_state_dict: Any) -> Iterator[ShardedTensor]:
    return (one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor))
