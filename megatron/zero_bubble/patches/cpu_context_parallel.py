"""A stand-in for context parallelism, so that CPU mode can train with it.

Megatron leaves attention over the parts of a sequence to Transformer Engine, which passes keys and
values round a ring of ranks while it computes. Megatron's own layers refuse it. Here each rank
gathers the keys and values of the whole sequence and gives them to Megatron's own attention: as
much memory and traffic as context parallelism is meant to save, but the same result, up to the
order of sums. CPU mode (`cpu.py`) is the only user.
"""

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

__all__ = ["allow_context_parallel", "chunks_of", "positions_of"]


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two of a sequence's ``2 * size`` chunks that a rank has: an early one, which looks at few
    others, and a late one, which looks at many."""
    return rank, 2 * size - 1 - rank


def positions_of(rank: int, size: int, length: int) -> torch.Tensor:
    """Places in the sequence of the ``length`` tokens of a rank, [length]."""
    chunk = length // 2
    first, second = (torch.arange(chunk) + chunk * one for one in chunks_of(rank, size))
    return torch.cat((first, second))


def allow_context_parallel(attention: Any) -> None:
    """Let Megatron's local ``DotProductAttention`` work on a part of the sequence."""
    build, forward = attention.__init__, attention.forward

    @functools.wraps(build)
    def build_for_part(self: Any, config: Any, *args: Any, **options: Any) -> None:
        if config.context_parallel_size == 1:
            build(self, config, *args, **options)
            return
        whole = copy.copy(config)
        whole.context_parallel_size = 1
        build(self, whole, *args, **options)
        self.config = config

    @functools.wraps(forward)
    def forward_of_part(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **options: Any,
    ) -> Any:
        if self.config.context_parallel_size > 1:
            group = _group(self)
            if attention_mask is None:
                attention_mask = _causal_mask(group, query.shape[0])
            both = torch.cat((key, value), dim=-1)
            whole = _WholeSequence.apply(both, group)
            key, value = whole.split((key.shape[-1], value.shape[-1]), dim=-1)
            key, value = key.contiguous(), value.contiguous()
        return forward(self, query, key, value, attention_mask, *args, **options)

    attention.__init__, attention.forward = build_for_part, forward_of_part


def _group(attention: Any) -> Any:
    given = getattr(attention.pg_collection, "cp", None)
    return parallel_state.get_context_parallel_group() if given is None else given


def _causal_mask(group: Any, length: int) -> torch.Tensor:
    """What this rank's tokens must not look at, [1, 1, length, all]."""
    rows = positions_of(group.rank(), group.size(), length)
    columns = torch.arange(length * group.size())
    return (columns[None, :] > rows[:, None])[None, None]


class _WholeSequence(torch.autograd.Function):  # type: ignore[misc]
    """A part of the sequence on each rank, [part, ...] -> all of it on each, in its own order."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.order = group, _order(group, part.shape[0])
        gathered = part.new_empty((part.shape[0] * group.size(), *part.shape[1:]))
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=group)
        whole = torch.empty_like(gathered)
        whole[ctx.order] = gathered
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        by_rank = gradients[0][ctx.order]
        part = by_rank.new_empty((by_rank.shape[0] // ctx.group.size(), *by_rank.shape[1:]))
        dist.reduce_scatter_tensor(part, by_rank, group=ctx.group)
        return part, None


def _order(group: Any, length: int) -> torch.Tensor:
    """Of the tokens of all ranks, one rank after the other, their places in the sequence."""
    parts = [positions_of(rank, group.size(), length) for rank in range(group.size())]
    return torch.cat(parts)
