"""The optimizer's step: validated afterwards, and with a norm that all ranks add up alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.zero_bubble.optimizer.ordinary import runs_into_the_next, wants_to_stop
from megatron.zero_bubble.optimizer.post_validation import PostValidation, Settings, Stepped
from megatron.zero_bubble.optimizer.statistics import (
    Layout,
    Norm,
    folded_norm,
    for_megatron,
    has_loss_scale,
    is_finite,
    not_finite,
    own_square,
)
from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.profile.monitor import Monitor
from megatron.zero_bubble.runtime.session import Session

__all__ = ["current_post_validation", "install", "tell_of_steps", "validate_steps_of"]

_validations: list[PostValidation] = []
"""The run's one, with --optimizer-post-validation."""


_monitors: list[Monitor] = []
"""The run's one, if anything is measured."""


def install() -> None:
    """Patch the step and the norm of Megatron's chain of optimizers."""
    module = "megatron.core.optimizer.optimizer"
    apply(
        Patch(
            module,
            "ChainedOptimizer.step",
            "--optimizer-post-validation steps without waiting for later stages",
            _validated,
        )
    )
    apply(
        Patch(
            module,
            "ChainedOptimizer.get_grad_norm",
            "--canonical-grad-norm and --optimizer-post-validation add in the order of ranks",
            _canonical,
        )
    )


def current_post_validation() -> PostValidation | None:
    """The run's post-validation; None where steps are Megatron's own."""
    return _validations[0] if _validations else None


def tell_of_steps(monitor: Monitor | None) -> None:
    """From now on, this is told when the optimizer steps."""
    _monitors[:] = [] if monitor is None else [monitor]


def validate_steps_of(session: Session, args: Any, wait_limit: float) -> None:
    """From now on, steps are validated afterwards."""
    settings = Settings(
        rollback=args.rollback,
        on_host=args.rollback_snapshot_on_host,
        window=args.post_validation_window,
        threshold=args.post_validation_threshold,
        wait_limit=wait_limit,
    )
    _validations[:] = [
        PostValidation(
            session,
            settings,
            iteration=lambda: args.curr_iteration + 1,
            may_run_into_the_next=lambda: runs_into_the_next(args),
            wants_to_stop=lambda: wants_to_stop(args),
        )
    ]


def _validated(original: Callable[[Any], Stepped]) -> Callable[[Any], Stepped]:
    @functools.wraps(original)
    def step(self: Any) -> Stepped:
        validation = current_post_validation()
        monitor = _monitors[0] if _monitors else None
        if monitor is not None:
            monitor.step_begins()
        if validation is None:
            stepped = original(self)
        else:
            with torch.no_grad():
                stepped = validation.step(self, original)
        if monitor is not None:
            last = None if validation is None else validation.last
            monitor.step_ended(() if last is None else last.parts())
        return stepped

    return step


def _canonical(original: Callable[[Any], Norm]) -> Callable[[Any], Norm]:
    @functools.wraps(original)
    def get_grad_norm(self: Any) -> Norm:
        from megatron.training import get_args

        try:
            args = get_args()
        except AssertionError:  # an optimizer of Megatron's, outside its training loop
            return original(self)
        validated = current_post_validation() is not None
        if not (validated or args.canonical_grad_norm):
            return original(self)
        with torch.no_grad():
            parts = _squares_of_all_ranks(self)
        norm = folded_norm([list(squares.values()) for squares in parts])
        if validated and not has_loss_scale(self) and not is_finite(norm):
            # Found in place of the checks that `PostValidation` switches off.
            of_all = {rank: square for squares in parts for rank, square in squares.items()}
            raise not_finite(args.curr_iteration + 1, norm, of_all)
        return for_megatron(norm)

    return get_grad_norm


def _squares_of_all_ranks(optimizer: Any) -> list[dict[int, float]]:
    """Of each part of a synchronous step's norm, each rank's squared norm, in order of ranks."""
    subs = optimizer.chained_optimizers
    squares = []
    for part in Layout.of(optimizer).parts:
        own = own_square([subs[index] for index in part])
        group = subs[part[0]].get_grad_stats_parallel_group()
        of_all = torch.empty(group.size(), dtype=own.dtype, device=own.device)
        dist.all_gather_into_tensor(of_all, own, group=group)
        by_rank = zip(dist.get_process_group_ranks(group), of_all.tolist(), strict=True)
        squares.append(dict(sorted(by_rank)))
    return squares
