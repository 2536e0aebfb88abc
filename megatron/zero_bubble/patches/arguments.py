"""Our flags join Megatron's, and are checked before Megatron's own checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.zero_bubble.arguments import (
    add_arguments,
    refuse_yaml,
    validate,
)
from megatron.zero_bubble.arrangement import arrange
from megatron.zero_bubble.launch import stop
from megatron.zero_bubble.patches import cpu, placement
from megatron.zero_bubble.patches.patching import Patch, apply
from megatron.zero_bubble.post_validation_arguments import settle_rerun_mode

__all__ = ["install"]


def install() -> None:
    """Wrap Megatron's parser, and its validation."""
    module = "megatron.training.arguments"
    apply(Patch(module, "parse_args", "adds --pipeline-schedule and its companions", _with_ours))
    apply(
        Patch(
            module,
            "validate_args",
            "checks --pipeline-schedule first, and sets the layers of each chunk",
            _ours_first,
        )
    )


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        rerun_mode = None

        def provider(parser: Any) -> Any:
            nonlocal rerun_mode
            parser = add_arguments(parser)
            if (rerun_mode := parser.get_default("rerun_mode")) is not None:
                parser.set_defaults(rerun_mode=None)  # else given and default look alike
            return extra_args_provider(parser) if extra_args_provider is not None else parser

        args = original(provider, ignore_unknown_args)
        settle_rerun_mode(args, rerun_mode)
        try:
            cpu.apply_argument_defaults(args)
            refuse_yaml(args)
        except ValueError as error:
            stop(error)
        return args

    return parse_args


def _ours_first(original: Callable[..., Any]) -> Callable[..., Any]:
    # Not when arguments are parsed: with --use-checkpoint-args sizes come from the checkpoint.
    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **options: Any) -> Any:
        if getattr(args, "zero_bubble_delays", False):
            args.delay_wgrad_compute = False  # set below, when they were validated before
        try:
            placement_of_run = validate(args)
            placement.use(None if placement_of_run is None else arrange(placement_of_run))
        except ValueError as error:
            stop(error)
        validated = original(args, *rest, **options)
        if args.zero_bubble_delays:
            # Not before: Megatron's own use of it has conditions that are not ours.
            args.delay_wgrad_compute = True
        return validated

    return validate_args
