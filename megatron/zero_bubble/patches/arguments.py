"""Our flags join Megatron's, and are checked before Megatron's own checks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron.zero_bubble.arguments import add_arguments, validate
from megatron.zero_bubble.launch import stop
from megatron.zero_bubble.patches import cpu
from megatron.zero_bubble.patches.patching import Patch, apply

__all__ = ["install"]


def install() -> None:
    """Wrap Megatron's parser."""
    apply(
        Patch(
            "megatron.training.arguments",
            "parse_args",
            "adds --pipeline-schedule and its companions",
            _with_ours,
        )
    )


def _with_ours(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> Any:
        def provider(parser: Any) -> Any:
            parser = add_arguments(parser)
            return extra_args_provider(parser) if extra_args_provider is not None else parser

        args = original(provider, ignore_unknown_args)
        try:
            cpu.apply_argument_defaults(args)
            validate(args)
        except ValueError as error:
            stop(error)
        return args

    return parse_args
