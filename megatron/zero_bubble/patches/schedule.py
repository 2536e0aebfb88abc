"""Training and evaluation run our schedule where a flag asks for one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.zero_bubble.arguments import schedule_for_job
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.launch import stop
from megatron.zero_bubble.patches.optimizer import (
    current_post_validation,
    tell_of_steps,
    validate_steps_of,
)
from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.patches.placement import arrangement_of_run
from megatron.zero_bubble.profile.automatic import attend
from megatron.zero_bubble.runtime.session import Session

__all__ = ["current_session", "install"]

_sessions: list[Session] = []
"""The run's one session, once a batch has asked for it."""


def install() -> None:
    """Patch the two places where Megatron's training loop picks its schedule."""
    apply(
        Patch(
            "megatron.core.pipeline_parallel.schedules",
            "get_forward_backward_func",
            "--pipeline-schedule picks the order of passes, in training and evaluation",
            _choosing,
        )
    )


def current_session() -> Session | None:
    """The session of this process; None while Megatron's own schedule runs."""
    return _sessions[0] if _sessions else None


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_forward_backward_func(*given: Any, **options: Any) -> Any:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.training import get_args

        arrangement = arrangement_of_run()
        if arrangement is None:
            return original(*given, **options)
        if not _sessions:
            args = get_args()
            limit = args.zero_bubble_wait_limit or 60.0 * args.distributed_timeout_minutes
            chunks = arrangement.chunks_a_rank
            session = Session(
                partial(schedule_for_job, args, args.pipeline_schedule, chunks=chunks),
                arrangement,
                wait_limit=limit,
            )
            session.store.lends = args.zero_bubble_tp_overlap
            session.tail.enabled = args.zero_bubble_reorder_tail
            _sessions.append(session)
            if args.optimizer_post_validation:
                validate_steps_of(session, args, limit)
            try:
                monitor = attend(
                    session,
                    args,
                    named=partial(schedule_for_job, args),
                    microbatches=get_num_microbatches,
                    counts=_counts,
                )
            except ConfigurationError as error:
                stop(error)
            tell_of_steps(monitor)
        return _sessions[0].forward_backward

    return get_forward_backward_func


def _counts() -> dict[str, int]:
    """Optimizer steps by outcome; none where they are Megatron's own."""
    validation = current_post_validation()
    return {} if validation is None else validation.counts
