"""What a stage's gradients need of other stages, by messages that keep nobody waiting.

Megatron has two collectives for it when a batch is over: the number of tokens that losses are
divided by goes from the stage of the loss to all, and the gradients of two tied embeddings are
added. A stage that is done would wait there for one that is not. Both are known earlier: the number
of tokens after the last F of the loss, and a tied gradient after the last B of its chunk, if no W
computes it. So they are sent then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model

from megatron.zero_bubble.runtime.transport import Receipt, Transport
from zero_bubble.placement import Placement
from zero_bubble.program import Channel, Flow

__all__ = ["AcrossStages", "Neighbourhood"]


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """Where a stage is."""

    placement: Placement
    stage: int
    ranks: tuple[int, ...]
    """Global rank of every stage of this pipeline."""
    backend: str
    device: torch.device
    wait_limit: float

    def transport(self, channels: Sequence[Channel], purpose: str) -> Transport:
        return Transport(
            channels,
            stage=self.stage,
            ranks=self.ranks,
            backend=self.backend,
            device=self.device,
            wait_limit=self.wait_limit,
            purpose=purpose,
        )


class AcrossStages:
    """The two exchanges, as far as a model needs them. All ranks make theirs together."""

    def __init__(
        self, here: Neighbourhood, models: Sequence[torch.nn.Module], config: Any, *, tied: bool
    ) -> None:
        self._alone = _group_of_one()
        self._tokens = _Tokens(here) if config.calculate_per_token_loss else None
        first, last = (_owner(here, end) for end in (0, -1))
        self._tied: _TiedGradient | None = None
        if tied and first[0] != last[0]:
            self._tied = _TiedGradient(here, (first, last), models)

    @property
    def whole_weight(self) -> torch.nn.Parameter | None:
        """The weight whose gradient must be complete when its last B is, if it is here."""
        return None if self._tied is None else self._tied.weight

    def groups(self, groups: ProcessGroupCollection) -> ProcessGroupCollection:
        """The groups with which Megatron's own reductions stay within the stage."""
        within = copy.copy(groups)
        within.pp = within.embd = self._alone
        return within

    def forward_done(self, num_tokens: torch.Tensor) -> None:
        """The last F of the loss is done; this many tokens have counted."""
        if self._tokens is not None:
            self._tokens.tell(num_tokens)

    def backward_done(self, chunk: int) -> None:
        """The last B of a chunk is done, and its result is on its way."""
        if self._tied is not None:
            self._tied.backward_done(chunk)

    def num_tokens(self, own: torch.Tensor) -> torch.Tensor:
        """The tokens that counted, on any stage; ``own`` is right where the loss is."""
        return own if self._tokens is None else self._tokens.get(own)

    def add_tied_gradients(self) -> None:
        """The gradient of a tied embedding becomes that of both uses."""
        if self._tied is not None:
            self._tied.add()

    def finish(self) -> None:
        """Wait until all messages of this batch have left."""
        for part in (self._tokens, self._tied):
            if part is not None:
                part.transport.drain()


class _Tokens:
    """The number of tokens of a batch, from the stage of the loss to each other stage."""

    def __init__(self, here: Neighbourhood) -> None:
        self._here, self._source = here, _owner(here, -1)[0]
        self._targets = [one for one in range(len(here.ranks)) if one != self._source]
        channels = [self._channel(one) for one in self._targets]
        self.transport = here.transport(channels, "zero-bubble tokens")

    def tell(self, num_tokens: torch.Tensor) -> None:
        for target in self._targets:
            self.transport.send(self._channel(target), num_tokens.view(1).clone())

    def get(self, own: torch.Tensor) -> torch.Tensor:
        if self._here.stage == self._source:
            return own
        receipt = self.transport.receive(
            self._channel(self._here.stage), torch.empty_like(own).view(1)
        )
        return self.transport.wait(receipt).view([])

    def _channel(self, target: int) -> Channel:
        return Channel(self._source, target, Flow.FORWARD)


class _TiedGradient:
    """The gradients of embedding and output layer, which are on two stages.

    Each end reduces its gradient over data-parallel ranks by itself, and sends it to the other.
    Both add the same two, so that the copies stay equal. A distributed optimizer has it in a bucket
    of its own, and reads a rank's shard of it; the rest may be wrong, as in Megatron. Without one
    Megatron reduces it within a larger bucket, where three ranks or more may be added in another
    order.
    """

    def __init__(
        self,
        here: Neighbourhood,
        ends: tuple[tuple[int, int], tuple[int, int]],
        models: Sequence[torch.nn.Module],
    ) -> None:
        (first, _), (last, _) = ends
        down, up = Channel(first, last, Flow.FORWARD), Channel(last, first, Flow.BACKWARD)
        self.transport = here.transport((down, up), "zero-bubble tied embeddings")
        self.weight: torch.nn.Parameter | None = None
        self._own: torch.Tensor | None = None
        self._other: Receipt | None = None
        for (stage, chunk), attribute, channels in zip(
            ends, ("pre_process", "post_process"), ((down, up), (up, down)), strict=True
        ):
            if stage == here.stage:
                self._chunk = chunk
                self._out, self._in = channels
                self._model, inner = _end_of_model(models, attribute)
                self.weight = inner.shared_embedding_or_output_weight()

    def backward_done(self, chunk: int) -> None:
        if self.weight is None or chunk != self._chunk or not self.weight.requires_grad:
            return
        self._own = self._reduced(self.weight.main_grad)
        self.transport.send(self._out, self._own)
        self._other = self.transport.receive(self._in, torch.empty_like(self._own))

    def add(self) -> None:
        if self.weight is None or self._own is None or self._other is None:
            return
        torch.add(self._own, self.transport.wait(self._other), out=self.weight.main_grad)
        self._own = self._other = None

    def _reduced(self, gradient: torch.Tensor) -> torch.Tensor:
        """The sum or mean over data-parallel ranks, as the gradient's bucket will have it."""
        group = self._model.param_to_bucket_group[self.weight]
        if group.grad_reduce_handle is not None:
            # Overlapped, and under way: the last B completed the whole bucket.
            group.grad_reduce_handle.wait()
            return gradient.clone()
        bucket = next(one for one in group.buckets if self.weight in one.params)
        config = self._model.ddp_config
        op = dist.ReduceOp.AVG if config.average_in_collective else dist.ReduceOp.SUM
        if config.use_distributed_optimizer and len(bucket.params) == 1:
            return self._reduced_as_bucket(bucket, op, group)
        reduced = gradient.clone()
        if bucket.gradient_scaling_factor != 1.0:
            reduced *= bucket.gradient_scaling_factor
        ranks = (
            group.intra_distributed_optimizer_instance_group
            if config.use_distributed_optimizer
            else group.data_parallel_group
        )
        dist.all_reduce(reduced, op=op, group=ranks)
        return reduced

    def _reduced_as_bucket(self, bucket: Any, op: Any, group: Any) -> torch.Tensor:
        """A distributed optimizer has a tied weight in a bucket of its own: that is what adds the
        values of many ranks in the order in which the bucket itself will be reduced."""
        assert self.weight is not None
        ranks = group.intra_distributed_optimizer_instance_group
        whole = bucket.grad_data.clone()
        if bucket.gradient_scaling_factor != 1.0:
            whole *= bucket.gradient_scaling_factor
        dist.reduce_scatter_tensor(
            whole.view(ranks.size(), -1)[ranks.rank()], whole, op=op, group=ranks
        )
        gradient = self.weight.main_grad
        start = gradient.storage_offset() - bucket.grad_data.storage_offset()
        return whole[start : start + gradient.numel()].view_as(gradient)


def _owner(here: Neighbourhood, end: int) -> tuple[int, int]:
    return here.placement.owner(end % here.placement.num_positions)


def _end_of_model(models: Sequence[torch.nn.Module], attribute: str) -> tuple[Any, Any]:
    """The chunk with an end of the model: as the training loop holds it, and unwrapped."""
    for model in models:
        inner = get_attr_wrapped_model(model, attribute, return_model_obj=True)
        if getattr(inner, attribute):
            return model, inner
    raise RuntimeError(f"no chunk of this rank has {attribute}")


def _group_of_one() -> dist.ProcessGroup:
    """A group of this rank alone, for collectives that are to reach nobody."""
    groups = [
        dist.new_group([rank], group_desc=f"zero-bubble rank {rank}")
        for rank in range(dist.get_world_size())
    ]
    return groups[dist.get_rank()]
