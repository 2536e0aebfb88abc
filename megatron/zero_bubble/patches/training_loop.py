"""What the training loop asks all stages for after a step that was validated.

Every rank knows the result of such a step, so that there is nothing to ask for. To ask would make
stages wait that have just been spared it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.zero_bubble import compat
from megatron.zero_bubble.patches.optimizer import current_post_validation
from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.patches.schedule import current_session

__all__ = ["install"]

_COUNTED = ("committed", "rolled_back", "clipped", "skipped", "synchronous", "mode_changes")


def install() -> None:
    """Patch the loop's reductions over stages, its barriers, and what must see no run-ahead."""
    utils = compat.training_utils()
    known = "after a validated step all ranks know the result"
    for module, attribute, reason, make in (
        (utils, "logical_and_across_model_parallel_group", known, _without_asking),
        (utils, "reduce_max_stat_across_model_parallel_group", known, _without_reducing),
        ("megatron.core.timers", "Timer.elapsed", "the log waits for nobody", _without_barrier),
        (
            "megatron.training.training",
            "checkpoint_and_decide_exit",
            "signals and the time limit are asked for with the step",
            _decided_with_the_step,
        ),
        (
            "megatron.training.checkpointing",
            "save_checkpoint",
            "a checkpoint knows nothing of forwards that have run ahead",
            _after_discarding,
        ),
        (
            "megatron.core.distributed.finalize_model_grads",
            "_allreduce_word_embedding_grads",
            "tied embeddings on two stages add their gradients by messages",
            _with_tied_gradients,
        ),
        (
            "megatron.training.training",
            "training_log",
            "the log tells how steps were validated",
            _with_counts,
        ),
    ):
        apply(Patch(module, attribute, reason, make))


def _alone() -> bool:
    """Whether the last step was validated, so that other stages may be elsewhere."""
    validation = current_post_validation()
    return validation is not None and validation.alone


def _without_asking(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def logical_and(input: bool, *rest: Any, **options: Any) -> bool:
        return bool(input) if _alone() else original(input, *rest, **options)

    return logical_and


def _without_reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce_max(stat: Any, *rest: Any, **options: Any) -> Any:
        if not _alone():
            return original(stat, *rest, **options)
        # The original's reduction is in fp32, and the log shows it.
        return None if stat is None else torch.tensor([float(stat)], dtype=torch.float32).item()

    return reduce_max


def _without_barrier(original: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(original)
    def elapsed(self: Any, reset: bool = True, barrier: bool = False) -> float:
        return original(self, reset=reset, barrier=barrier and not _alone())

    return elapsed


def _decided_with_the_step(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def checkpoint_and_decide_exit(*given: Any, **options: Any) -> bool:
        validation = current_post_validation()
        if validation is None or not validation.alone or validation.stop:
            return original(*given, **options)
        with _nobody_wants_to_stop():
            return original(*given, **options)

    return checkpoint_and_decide_exit


@contextmanager
def _nobody_wants_to_stop() -> Iterator[None]:
    from megatron.training import get_args

    args = get_args()
    before = args.exit_signal_handler, args.exit_duration_in_mins
    args.exit_signal_handler, args.exit_duration_in_mins = False, None
    try:
        yield
    finally:
        args.exit_signal_handler, args.exit_duration_in_mins = before


def _after_discarding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(*given: Any, **options: Any) -> Any:
        session = current_session()
        if session is not None:
            session.ahead.discard()
        return original(*given, **options)

    return save_checkpoint


def _with_tied_gradients(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def allreduce_word_embedding_grads(*given: Any, **options: Any) -> None:
        original(*given, **options)
        session = current_session()
        if session is not None and session.across_stages is not None:
            session.across_stages.add_tied_gradients()

    return allreduce_word_embedding_grads


def _with_counts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def training_log(*given: Any, **options: Any) -> Any:
        result = original(*given, **options)
        validation = current_post_validation()
        if validation is not None:
            _log_counts(validation.counts)
        return result

    return training_log


def _log_counts(counts: Any) -> None:
    from megatron.training import get_args, get_tensorboard_writer
    from megatron.training.utils import print_rank_last

    args = get_args()
    iteration = args.curr_iteration + 1
    writer = get_tensorboard_writer()
    if writer and iteration % args.tensorboard_log_interval == 0:
        for name in _COUNTED:
            writer.add_scalar(f"post-validation/{name.replace('_', '-')}", counts[name], iteration)
    if iteration % args.log_interval == 0:
        print_rank_last(
            " optimizer steps so far: "
            + " | ".join(f"{name.replace('_', ' ')}: {counts[name]}" for name in _COUNTED)
        )
