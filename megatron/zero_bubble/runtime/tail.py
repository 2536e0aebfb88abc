"""The last W's of an iteration by the buckets of their gradients, so that these are reduced early.

`zero_bubble.tail` says in which order shares of W's run; here, what a share is.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel

from megatron.zero_bubble.runtime.weight_grad import WeightGradStore
from zero_bubble.program import Program
from zero_bubble.tail import reorder_row

__all__ = ["Shares", "Tail", "shares_by_bucket"]

logger = logging.getLogger(__name__)

_MOST = 8
"""More shares hide little more of the reductions, and each is a pass for the host to start."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Into how many shares the W's of a stage are cut, and which one a weight is in."""

    parts: int
    of: dict[torch.nn.Parameter, int]


@dataclass(slots=True)
class Tail:
    """Orders the last W's of this stage, in all programs that it runs."""

    store: WeightGradStore
    enabled: bool = True
    _programs: dict[int, Program] = field(default_factory=dict)
    """By number of microbatches."""
    _shares: Shares | None = None

    def clear(self) -> None:
        """Other programs follow."""
        self._programs.clear()

    def reordered(self, program: Program, models: Sequence[torch.nn.Module], stage: int) -> Program:
        """A training program with this stage's last W's ordered by bucket, if other ranks add to
        their gradients.

        Not for the first batch with W's: only then it is known which weights they compute, and
        Megatron does not reduce its gradients early either.
        """
        if not self.enabled:
            return program
        key = program.num_microbatches
        if key not in self._programs:
            if not (self.store.known and _is_replicated()):
                return program
            self._programs[key] = self._reordered(program, models, stage)
        return self._programs[key]

    def _reordered(
        self, program: Program, models: Sequence[torch.nn.Module], stage: int
    ) -> Program:
        if self._shares is None:
            self._shares = shares_by_bucket(models, self.store.known)
            if self._shares is None:
                return program
            self.store.share_of = self._shares.of
        rows = list(program.instructions)
        rows[stage] = reorder_row(rows[stage], self._shares.parts)
        if rows[stage] != program.instructions[stage]:
            logger.info(
                "stage %d: the last W's run by the buckets of their gradients, in %d shares",
                stage,
                self._shares.parts,
            )
        return replace(program, instructions=tuple(rows))


def _is_replicated() -> bool:
    size: int = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    return size > 1


def shares_by_bucket(
    models: Sequence[torch.nn.Module], split: Collection[torch.nn.Parameter]
) -> Shares | None:
    """Shares for a stage whose gradients are reduced as their buckets get complete.

    A bucket is complete with the last of its weights, so a share holds whole ones, in the order in
    which the backward pass completes them, and shares are about equally large. A chunk with fewer
    buckets than the stage has shares is cut between its weights.

    Args:
        models: the stage's chunks, as the training loop holds them (wrapped).
        split: weights whose gradients are computed in W's.

    Returns:
        None if reductions do not overlap with W's.
    """
    chunks = []
    for model in models:
        ddp = next(
            (one for one in model.modules() if isinstance(one, DistributedDataParallel)), None
        )
        if ddp is not None and ddp.ddp_config.overlap_grad_reduce:
            chunks.append(_by_bucket(ddp, split))
    parts = min(_MOST, max(map(len, chunks), default=0))
    if not parts:
        return None
    shares: dict[torch.nn.Parameter, int] = {}
    for buckets in chunks:
        units = buckets if len(buckets) >= parts else [[one] for row in buckets for one in row]
        shares.update(_dealt(units, parts))
    return Shares(parts, shares)


def _by_bucket(
    ddp: DistributedDataParallel, split: Collection[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """The split weights of each bucket that is reduced, in the order of the backward pass."""
    found: dict[int, list[torch.nn.Parameter]] = {}
    for parameter in reversed([one for one in ddp.parameters() if one in split]):
        group = ddp.param_to_bucket_group.get(parameter)
        if group is None:
            continue
        # A bucket comes where its last weight comes.
        weights = found.pop(id(group), [])
        found[id(group)] = [*weights, parameter]
    return list(found.values())


def _dealt(
    units: Sequence[Sequence[torch.nn.Parameter]], parts: int
) -> dict[torch.nn.Parameter, int]:
    """Units in a row, each in the share that the middle of it falls into."""
    sizes = [sum(one.numel() for one in unit) for unit in units]
    total, before = max(1, sum(sizes)), 0
    shares: dict[torch.nn.Parameter, int] = {}
    for unit, size in zip(units, sizes, strict=True):
        share = min(parts - 1, (2 * before + size) * parts // (2 * total))
        shares.update(dict.fromkeys(unit, share))
        before += size
    return shares
