"""A placement in Megatron's terms: pipeline ranks, and the virtual chunks that each of them holds.

Megatron knows one placement: model chunk v of pipeline rank r is part v * p + r of the model. Three
things tie it to that order: the loss is computed by the last chunk of the last rank (which logs
it), the embedding is in the first chunk of a rank, and layers are counted by chunk and rank. So

- stages are numbered onto ranks such that the stage with the loss is the last rank: stage s of a V
  is rank p-1-s, and both ends of the model are on rank p-1;
- a rank's chunks take Megatron's virtual chunks in the order of the model, the end of the model
  always the last one. A rank with fewer chunks than others has empty ones.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from zero_bubble.placement import Placement

__all__ = ["Arrangement", "arrange"]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where the chunks of a placement are in Megatron.

    ``ranks[stage]`` is the pipeline rank of a stage, ``virtual[stage][chunk]`` the number under
    which Megatron's list of model chunks holds a chunk of the stage.
    """

    placement: Placement
    ranks: tuple[int, ...]
    virtual: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int | None, ...], ...] = field(init=False)
    """By pipeline rank and virtual chunk: the position in the model, None for an empty chunk."""

    def __post_init__(self) -> None:
        table: list[list[int | None]] = [[None] * self.chunks_a_rank for _ in self.ranks]
        for stage, held in enumerate(self.placement.positions):
            for chunk, position in enumerate(held):
                table[self.ranks[stage]][self.virtual[stage][chunk]] = position
        object.__setattr__(self, "positions", tuple(map(tuple, table)))

    @property
    def chunks_a_rank(self) -> int:
        """Megatron's virtual pipeline size."""
        return max(map(len, self.placement.positions))

    @property
    def first_rank(self) -> int:
        """The pipeline rank that holds the model's beginning. Its end is on the last rank."""
        return self.ranks[self.placement.owner(0)[0]]

    @property
    def is_megatrons(self) -> bool:
        """Whether Megatron's own numbering of ranks and chunks says the same."""
        p = len(self.ranks)
        return self.positions == tuple(
            tuple(range(rank, p * self.chunks_a_rank, p)) for rank in range(p)
        )

    def stage_of(self, rank: int) -> int:
        """The stage that a pipeline rank runs."""
        return self.ranks.index(rank)

    def by_stage(self, of_rank: Sequence[int]) -> tuple[int, ...]:
        """What is listed by pipeline rank, by stage."""
        return tuple(of_rank[rank] for rank in self.ranks)


@functools.cache
def arrange(placement: Placement) -> Arrangement:
    """The arrangement of a placement."""
    p = placement.num_stages
    end = placement.num_positions - 1
    loss_stage = placement.owner(end)[0]
    if loss_stage == 0:
        ranks = tuple(reversed(range(p)))
    else:
        # Neighbours stay neighbours: a placement from a file may end anywhere.
        ranks = tuple((stage + p - 1 - loss_stage) % p for stage in range(p))
    most = max(map(len, placement.positions))

    def virtual(held: Sequence[int]) -> tuple[int, ...]:
        in_order = {position: number for number, position in enumerate(sorted(held))}
        if end in in_order:
            in_order[end] = most - 1
        return tuple(in_order[position] for position in held)

    return Arrangement(placement, ranks, tuple(map(virtual, placement.positions)))
