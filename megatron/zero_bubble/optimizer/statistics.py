"""What ranks tell each other about their gradients, and what follows from it.

The norm that decides and scales is one fold: each rank's own squared norm (fp32, as Megatron
computes it), added in float64 in the order of ranks, rounded to fp32 once. So its bits depend on
no backend's order of addition, and a rank that has all rows can compute it alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from megatron.zero_bubble import compat

__all__ = [
    "Decision",
    "Layout",
    "Verdict",
    "clips",
    "decide",
    "folded_norm",
    "for_megatron",
    "has_loss_scale",
    "is_finite",
    "not_finite",
    "own_square",
]

type Norm = float | torch.Tensor
"""As Megatron has it: a tensor of one fp32 with Transformer Engine, else a float.

A tensor is kept on the host, which decides by it; `for_megatron` moves it to the device.
"""


class Verdict(StrEnum):
    """What a step has to do with gradients that are ready."""

    STEP = "step"
    CLIP = "clip"
    SKIP = "skip"
    """A gradient is not finite, and the loss scale takes care of it."""
    TOO_LARGE = "too large"
    """The norm is above --grad-norm-skip-threshold."""
    NOT_FINITE = "not finite"
    """A gradient is not finite, and nothing takes care of it: an error."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict and what it rests on."""

    verdict: Verdict
    norm: Norm | None
    """None where Megatron computes none: gradients are not finite under a loss scale."""
    found_inf: tuple[bool, ...]
    """Of each sub-optimizer."""
    stop: bool
    """A rank has received a signal to exit, or sees its time used up."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which numbers a row has, and which ranks' rows count: a rank's row is a line of floats.

    ``[squared norm of each part..., found_inf of each sub-optimizer..., stop]``

    Sub-optimizers whose statistics span the same ranks make one part of the norm, as in Megatron;
    otherwise each is a part.
    """

    parts: tuple[tuple[int, ...], ...]
    """The sub-optimizers of each part."""
    members: tuple[tuple[int, ...], ...]
    """For each sub-optimizer the global ranks whose statistics it shares, ascending."""

    @classmethod
    def of(cls, optimizer: Any) -> Layout:
        """The layout of a ChainedOptimizer."""
        subs = optimizer.chained_optimizers
        members = tuple(
            tuple(sorted(dist.get_process_group_ranks(one.get_grad_stats_parallel_group())))
            for one in subs
        )
        if len(subs) == 1 or optimizer.grads_states_parallel_group_is_shared():
            return cls((tuple(range(len(subs))),), members)
        return cls(tuple((index,) for index in range(len(subs))), members)

    @property
    def width(self) -> int:
        return len(self.parts) + len(self.members) + 1

    def row(self, squares: Sequence[float], infs: Sequence[bool], stop: bool) -> list[float]:
        return [*squares, *map(float, infs), float(stop)]

    def squares(self, part: int, rows: torch.Tensor, known: Iterable[int]) -> list[float]:
        """The squared norms of a part, in the order of ranks. ``rows`` is [ranks, width]."""
        members = self.members[self.parts[part][0]]
        column = rows[:, part].tolist()
        ranks = set(known)
        return [column[rank] for rank in members if rank in ranks]

    def found_inf(self, sub: int, rows: torch.Tensor, known: Iterable[int]) -> bool:
        column = rows[:, len(self.parts) + sub].tolist()
        ranks = set(known)
        return any(column[rank] > 0 for rank in self.members[sub] if rank in ranks)

    def stops(self, rows: torch.Tensor, known: Iterable[int]) -> bool:
        column = rows[:, -1].tolist()
        return any(column[rank] > 0 for rank in known)


def own_square(subs: Sequence[Any]) -> torch.Tensor:
    """This rank's squared gradient norm over some sub-optimizers, [1] fp32, on the device.

    To be called without recording gradients.
    """
    gradients = [one for sub in subs for one in compat.gradients_for_norm(sub)]
    if not gradients:
        return torch.zeros(1, dtype=torch.float32, device="cuda")
    overflow = torch.zeros(1, dtype=torch.int, device="cuda")
    norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], False)
    square: torch.Tensor = norm**2.0
    return square.view(1)


def folded_norm(squares_of_parts: Sequence[Sequence[float]]) -> Norm:
    """The norm, from the squared norms of each part's ranks in the order of ranks."""
    # Not by `sum`, which compensates for rounding since Python 3.12: this addition is one that any
    # program can repeat, and a larger number never makes it smaller.
    norms = [_root(reduce(operator.add, squares, 0.0)) for squares in squares_of_parts]
    if len(norms) == 1:
        return norms[0]
    return math.sqrt(sum(one**2 for one in norms))


def _root(total: float) -> Norm:
    rounded = torch.tensor([total], dtype=torch.float64).to(torch.float32)
    # Megatron's two ways: on the device with Transformer Engine, on the host without it.
    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None:
        # Not behind forwards that have run ahead: the host is about to read it.
        with torch.cuda.stream(torch.cuda.Stream()):
            return rounded.to("cuda").pow(0.5).cpu()
    root: float = rounded.item() ** 0.5
    return root


def for_megatron(norm: Norm) -> Norm:
    """The norm where Megatron's own functions have it."""
    return norm.to("cuda") if isinstance(norm, torch.Tensor) else norm


def clips(clip_grad: float, norm: Norm) -> bool:
    """Whether gradients of this norm are scaled down, in the arithmetic that scales them."""
    return clip_grad > 0.0 and bool(clip_grad / (norm + 1.0e-6) < 1.0)


def decide(
    optimizer: Any,
    layout: Layout,
    rows: torch.Tensor,
    known: Sequence[int],
    *,
    strict: bool = False,
) -> Decision:
    """What the rows of the known ranks say.

    ``strict`` takes a gradient that is not finite for an error under a loss scale too. With all
    rows it is the step's result. With those of the first stages only, everything but STEP
    stays true whatever the others find, but for the norm.
    """
    config = optimizer.config
    infs = tuple(layout.found_inf(sub, rows, known) for sub in range(len(layout.members)))
    stop = layout.stops(rows, known)
    if any(infs):
        return Decision(Verdict.NOT_FINITE if strict else Verdict.SKIP, None, infs, stop)
    norm = folded_norm([layout.squares(part, rows, known) for part in range(len(layout.parts))])
    if not is_finite(norm) and not has_loss_scale(optimizer):
        verdict = Verdict.NOT_FINITE
    elif float(norm) > getattr(config, "grad_norm_skip_threshold", float("inf")):
        verdict = Verdict.TOO_LARGE
    elif clips(config.clip_grad, norm):
        verdict = Verdict.CLIP
    else:
        verdict = Verdict.STEP
    return Decision(verdict, norm, infs, stop)


def has_loss_scale(optimizer: Any) -> bool:
    """Whether gradients that are not finite are an ordinary event."""
    return any(getattr(one, "grad_scaler", None) for one in optimizer.chained_optimizers)


def is_finite(norm: Norm) -> bool:
    return bool(torch.isfinite(torch.as_tensor(norm)))


def not_finite(iteration: int, norm: Norm | None, squares: Mapping[int, float]) -> RuntimeError:
    """The error for a norm that is not finite, in the words of Megatron's own checks.

    Args:
        iteration: counted from 1.
        norm: what it is.
        squares: squared norm of each rank.
    """
    ranks = [str(rank) for rank, square in squares.items() if not math.isfinite(square)]
    where = f"gradients of ranks {', '.join(ranks)}" if ranks else "gradients"
    value = float("nan") if norm is None else float(norm)
    return RuntimeError(
        f"iteration {iteration}: Unexpected result {value} (message='the norm of the {where} is "
        "not finite; parameters and optimizer are as before the step')"
    )
