"""The flags of optimizer post-validation, and what is wrong with a combination of them."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from typing import Any

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.rules import Rule
from zero_bubble.placement import Placement

__all__ = ["add_post_validation_arguments", "check_post_validation", "settle_rerun_mode"]

FLAG = "--optimizer-post-validation"
KINDS = ("deferred", "snapshot", "inplace")
WINDOW, THRESHOLD = 20, 0.5
RERUN_OFF = "disabled"
logger = logging.getLogger(__name__)


def add_post_validation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, in a group of their own."""
    group = parser.add_argument_group("optimizer post-validation")
    group.add_argument(
        FLAG,
        "--enable-optimizer-post-validation",
        action="store_true",
        dest="optimizer_post_validation",
        help="Step the optimizer without waiting for the other stages: a stage steps with "
        "gradients that are not clipped and goes on with the next iteration's first forward "
        "passes. Once it learns the gradient norm of all stages, it keeps the step, or undoes it "
        "exactly and steps as a run without the flag. Needs a --pipeline-schedule of ours; "
        "switches --rerun-mode off.",
    )
    group.add_argument(
        "--canonical-grad-norm",
        action="store_true",
        help="Sum the ranks' squared gradient norms in the order of the ranks, in float64, and "
        "round once, as --optimizer-post-validation does: a run without it then has the same bits. "
        "The norm of Megatron's own all-reduce can differ in the last place. Works with every "
        "schedule, and without a pipeline.",
    )
    group.add_argument(
        "--rollback",
        choices=KINDS,
        default=None,
        help="How a step is undone. deferred (the default): the step writes only the parameters "
        "that forward passes read, main parameters and moments follow once it is known to be "
        "right; snapshot: what a step changes is copied before; inplace: AdamW's arithmetic is "
        "inverted, which is not exact and fails after large gradients (for comparison only).",
    )
    group.add_argument(
        "--rollback-snapshot-on-host",
        action="store_true",
        help="Keep the copies of --rollback snapshot in pinned memory of the host.",
    )
    group.add_argument(
        "--post-validation-window",
        type=int,
        default=None,
        metavar="K",
        help="Number of latest steps that --post-validation-threshold looks at; 0: step "
        f"optimistically however many are clipped. Default: {WINDOW}.",
    )
    group.add_argument(
        "--post-validation-threshold",
        type=float,
        default=None,
        metavar="F",
        help="Step synchronously while more than this fraction (0 to 1) of the latest steps were "
        f"clipped or skipped; 0: step optimistically however many are. Default: {THRESHOLD}.",
    )


def settle_rerun_mode(args: Any, default: str | None) -> None:
    """Switch Megatron's rerun engine off for post-validation, unless --rerun-mode was given.

    To be called right after parsing, with --rerun-mode None where it was not given; ``default`` is
    what Megatron takes then, None if it has no such flag.
    """
    if default is None or getattr(args, "rerun_mode", default) is not None:
        return  # a Megatron without it, or a mode that was asked for
    args.rerun_mode = default
    if getattr(args, "optimizer_post_validation", False):
        args.rerun_mode = RERUN_OFF
        if getattr(args, "rank", 0) == 0:
            logger.warning(
                "%s sets --rerun-mode %s: the rerun engine's check waits for all ranks in every "
                "iteration, and would run again what has run ahead",
                FLAG,
                RERUN_OFF,
            )


def check_post_validation(args: Any, placement: Placement | None) -> None:
    """Fill in the defaults of the companions, and stop at a combination that cannot work.

    ``placement`` is that of the schedule; None where Megatron's own schedule runs. To be called
    before Megatron's validation, as `arguments.validate`.

    Raises:
        ConfigurationError: says which flag, its value, and what would work.
    """
    if not getattr(args, "optimizer_post_validation", False):
        for flag, shown in _companions(args):
            raise ConfigurationError(
                f"{flag}{shown} is for {FLAG}, which is not given: add it, or leave {flag} out"
            )
        return
    _check_companions(args)
    if placement is None:
        raise ConfigurationError(
            f"{FLAG} needs one of this project's schedules, but --pipeline-schedule is megatron: "
            "choose another (zb-v, say) for a pipeline of two stages or more, or leave "
            f"{FLAG} out"
        )
    for rule in (*_RULES, *(_INPLACE_RULES if args.rollback == "inplace" else ())):
        if rule.broken(args):
            ours = f"{FLAG} with --rollback inplace" if rule in _INPLACE_RULES else FLAG
            raise ConfigurationError(rule.complaint(args, ours))
    if args.rollback == "inplace" and getattr(args, "rank", 0) == 0:
        logger.warning(
            "--rollback inplace undoes steps up to rounding: after the first one that is undone, "
            "losses are no longer those of a synchronous run"
        )
    _check_vision(args)
    _check_timers(args)
    _check_fp8(args)
    _check_tied_embeddings(args, placement)


def _companions(args: Any) -> Iterator[tuple[str, str]]:
    """(flag, its value as text) of each that is given and means nothing alone."""
    for attribute in (
        "rollback",
        "rollback_snapshot_on_host",
        "post_validation_window",
        "post_validation_threshold",
    ):
        value = getattr(args, attribute, None)
        if value is not None and value is not False:
            yield "--" + attribute.replace("_", "-"), "" if value is True else f" {value}"


def _check_companions(args: Any) -> None:
    if args.rollback is None:
        args.rollback = KINDS[0]
    if args.post_validation_window is None:
        args.post_validation_window = WINDOW
    if args.post_validation_threshold is None:
        args.post_validation_threshold = THRESHOLD
    if args.rollback_snapshot_on_host and args.rollback != "snapshot":
        raise ConfigurationError(
            f"--rollback-snapshot-on-host is for --rollback snapshot, but --rollback is "
            f"{args.rollback}: add --rollback snapshot, or leave --rollback-snapshot-on-host out"
        )
    if args.post_validation_window < 0:
        raise ConfigurationError(
            f"--post-validation-window {args.post_validation_window}: must be a number of steps, "
            "or 0 to step optimistically however many are clipped"
        )
    if not 0 <= args.post_validation_threshold <= 1:
        raise ConfigurationError(
            f"--post-validation-threshold {args.post_validation_threshold:g}: must be a fraction "
            "from 0 to 1, where 0 steps optimistically however many are clipped"
        )


def _check_vision(args: Any) -> None:
    kind = getattr(args, "vision_pretraining_type", None)
    if getattr(args, "vision_pretraining", False) and kind == "dino":
        raise ConfigurationError(
            f"{FLAG} does not work with --vision-pretraining-type dino: it changes weights after "
            f"the step, when forward passes have used them; leave {FLAG} out"
        )


def _check_timers(args: Any) -> None:
    level = getattr(args, "timing_log_level", 0)
    if level >= 1 and getattr(args, "barrier_with_L1_time", True):
        raise ConfigurationError(
            f"{FLAG} does not work with --timing-log-level {level}: such timers wait for all ranks "
            "in every iteration; add --no-barrier-with-level-1-timing, or use --timing-log-level 0"
        )


def _check_fp8(args: Any) -> None:
    recipe = getattr(args, "fp8_recipe", None)
    if getattr(args, "fp8", None) and recipe == "delayed":
        raise ConfigurationError(
            f"{FLAG} does not work with --fp8-recipe delayed: forward passes that are thrown away "
            "would stay in its history of maxima; use another recipe"
        )


def _check_tied_embeddings(args: Any, placement: Placement) -> None:
    tied = not getattr(args, "untie_embeddings_and_output_weights", True)
    first, last = (placement.owner(end)[0] for end in (0, placement.num_positions - 1))
    if not tied or first == last:
        return
    for flag, attribute, fine in (
        ("--num-distributed-optimizer-instances", "num_distributed_optimizer_instances", 1),
        (
            "--ddp-reduce-scatter-with-fp32-accumulation",
            "ddp_reduce_scatter_with_fp32_accumulation",
            False,
        ),
    ):
        value = getattr(args, attribute, fine)
        if value != fine:
            shown = "" if value is True else f" {value}"
            raise ConfigurationError(
                f"{FLAG} does not work with {flag}{shown} where the embeddings are tied and lie on "
                f"two stages ({first} and {last}), which reduce their gradients apart; use "
                "--pipeline-schedule zb-v, which has them on one stage, or add "
                "--untie-embeddings-and-output-weights"
            )


_STATISTICS = "it sums over all stages in every iteration; leave it out"
_NO_UNDO = "how its step is undone is not known here; leave it out"
_FP8 = "parameters have no form that a step could write and take back; leave it out"
_RULES = (
    Rule("--rerun-mode", "rerun_mode",
         "the rerun engine's check waits for all ranks in every iteration; leave it out, which "
         f"switches the engine off, or use --rerun-mode {RERUN_OFF}", (RERUN_OFF,)),
    Rule("--log-num-zeros-in-grad", "log_num_zeros_in_grad", _STATISTICS),
    Rule("--log-params-norm", "log_params_norm", _STATISTICS),
    Rule("--log-straggler", "log_straggler",
         "it gathers times from all ranks, of passes in Megatron's order; leave it out"),
    Rule("--log-max-attention-logit", "log_max_attention_logit",
         "the next iteration's forward passes have added theirs before it is read; leave it out"),
    Rule("--qk-clip", "qk_clip",
         "it changes weights after the step, when forward passes have used them; leave it out"),
    Rule("--optimizer", "optimizer",
         "how its step is undone is not known here; use --optimizer adam or --optimizer sgd",
         ("adam", "sgd")),
    Rule("--optimizer-cpu-offload", "optimizer_cpu_offload", _NO_UNDO),
    Rule("--optimizer-cuda-graph", "optimizer_cuda_graph",
         "a captured step cannot be taken in two parts; leave it out"),
    Rule("--use-precision-aware-optimizer", "use_precision_aware_optimizer", _NO_UNDO),
    Rule("--overlap-param-gather-with-optimizer-step", "overlap_param_gather_with_optimizer_step",
         "it gathers within the step, before that is known to be right; leave it out"),
    Rule("--reuse-grad-buf-for-mxfp8-param-ag", "reuse_grad_buf_for_mxfp8_param_ag",
         "the step would overwrite the gradients that a second one needs; leave it out"),
    Rule("--fp8-param-gather", "fp8_param_gather", _FP8),
    Rule("--fp4-param-gather", "fp4_param_gather", _FP8),
    Rule("--dataloader-save", "dataloader_save",
         "it saves the position of an iterator that has been read ahead; leave it out"),
    Rule("--perform-rl-step", "perform_rl_step",
         "the next batch does not exist before the step is over; leave it out"),
)  # fmt: skip
_INPLACE_RULES = (
    Rule("--optimizer", "optimizer",
         "only AdamW is inverted; use --rollback deferred or --rollback snapshot", ("adam",)),
    Rule("decoupled_weight_decay", "decoupled_weight_decay",
         "only AdamW is inverted, not Adam with L2 regularization; use --rollback deferred or "
         "--rollback snapshot", (True,)),
)  # fmt: skip
