"""Which iterations may run into the next one.

Not those after which something looks at the model, or the next batch is another kind of batch: what
has run ahead would have to be thrown away.
"""

from __future__ import annotations

import copy
import time
from typing import Any

__all__ = ["runs_into_the_next", "wants_to_stop"]

_SAVING = ("activations", "tokens_per_expert", "dgrads", "wgrads", "params")
"""What --save-*-interval saves of an iteration; hooks are set when the iteration begins."""


def runs_into_the_next(args: Any) -> bool:
    """Whether nothing comes between the present iteration of Megatron's loop and the next one."""
    done = args.curr_iteration + 1
    return not (
        done >= args.train_iters
        or _evaluates(args, done)
        or _saves(args, done)
        or _exits(args, done)
        or _looks(args, done)
        or (done + 1) in (getattr(args, "iterations_to_skip", None) or ())
        or any(_divides(getattr(args, f"save_{one}_interval", None), done + 1) for one in _SAVING)
        or _another_batch_size(args)
    )


def wants_to_stop(args: Any) -> bool:
    """Whether this rank has received a signal to exit, or its time is used up."""
    if args.exit_signal_handler:
        from megatron.training.global_vars import get_signal_handler

        # Its own function asks all ranks.
        if getattr(get_signal_handler(), "_signal_received", False):
            return True
    limit = args.exit_duration_in_mins
    if not limit:
        return False
    from megatron.training import training

    return bool((time.time() - training._TRAIN_START_TIME) / 60.0 > limit)


def _divides(interval: int | None, iteration: int) -> bool:
    return bool(interval) and iteration % interval == 0  # type: ignore[operator]


def _evaluates(args: Any, done: int) -> bool:
    start = getattr(args, "start_eval_at_iter", None)
    return (
        _divides(args.eval_interval, done)
        and bool(getattr(args, "do_valid", True))
        and (start is None or done >= start)
    )


def _saves(args: Any, done: int) -> bool:
    intervals = args.save_interval, getattr(args, "non_persistent_save_interval", None)
    return bool(args.save) and any(_divides(one, done) for one in intervals)


def _exits(args: Any, done: int) -> bool:
    phases = getattr(args, "phase_transition_iterations", None) or ()
    return _divides(args.exit_interval, done) or done in phases


def _looks(args: Any, done: int) -> bool:
    """Something compares or times all ranks after this iteration."""
    return (
        _divides(getattr(args, "check_weight_hash_across_dp_replicas_interval", None), done)
        or (bool(args.adlr_autoresume) and _divides(args.adlr_autoresume_interval, done))
        or _divides(getattr(args, "gpu_sniff_test_interval", None), done)
        or (args.timing_log_level > 0 and _divides(args.log_interval, done))
    )


def _another_batch_size(args: Any) -> bool:
    """Whether the next iteration has another number of microbatches.

    Megatron asks its calculator once the samples of this iteration count as consumed.
    """
    from megatron.core import num_microbatches_calculator as microbatches

    present = microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    next_one = copy.copy(present)
    consumed = args.consumed_train_samples + microbatches.get_current_running_global_batch_size()
    next_one.update(consumed, consistency_check=False, verbose=False)
    return bool(next_one.get() != present.get())
