"""Which layers a schedule that splits B and W can split, as flags say it."""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.rules import Rule

__all__ = ["check_layers"]

LOCAL, ENGINE = "local", "transformer_engine"
OLDEST = (2, 8)
"""Transformer Engine's first to delay weight gradients with overlapped reduction, and without
fused accumulation (it came in 2.3; Megatron asks for 2.8 and 2.7 in these cases)."""

_LEAVE_OUT = "leave it out"
_ENGINE_RULES = (
    Rule("--tp-comm-overlap", "tp_comm_overlap",
         f"Transformer Engine does not delay what overlaps by user buffers; {_LEAVE_OUT}"),
    Rule("--use-transformer-engine-op-fuser", "use_transformer_engine_op_fuser",
         f"fused operations are not split; {_LEAVE_OUT}"),
    Rule("--use-cpu-initialization", "use_cpu_initialization",
         f"Megatron then replaces biases whose gradients are delayed; {_LEAVE_OUT}"),
    Rule("--overlap-dispatch-backward-with-experts-wgrad",
         "overlap_dispatch_backward_with_experts_wgrad",
         f"weight gradients of experts are delayed already; {_LEAVE_OUT}"),
)  # fmt: skip


def check_layers(args: Any, flag: str, *, disorder: str | None) -> bool:
    """Whether the layers' own delayed weight gradient is to be switched on.

    Args:
        flag: ours, which asks for a schedule that splits.
        disorder: what is not in the order of microbatches in that schedule, if anything is.

    Raises:
        ConfigurationError: layers that cannot be split, or features that need others.
    """
    if args.transformer_impl == LOCAL:
        _check_local(args, flag)
        return False
    local = f"add --transformer-impl {LOCAL}"
    if args.transformer_impl != ENGINE:
        raise ConfigurationError(
            f"{flag} splits the backward pass of Megatron's local layers and of Transformer "
            f"Engine's, but --transformer-impl is {args.transformer_impl}: {local}"
        )
    if (problem := _problem()) is not None:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigurationError(
            f"{flag} splits the backward pass of Transformer Engine's layers from {oldest} on, but "
            f"{problem}, and --transformer-impl is {ENGINE}: {local}"
        )
    for rule in _ENGINE_RULES:
        if rule.broken(args):
            raise ConfigurationError(rule.complaint(args, f"{flag} --transformer-impl {ENGINE}"))
    if disorder is not None:
        raise ConfigurationError(
            f"{flag} is not in the order of microbatches, which Transformer Engine's layers need "
            f"({disorder}): use another schedule, or {local}"
        )
    return True


def _check_local(args: Any, flag: str) -> None:
    """What only Transformer Engine's layers have."""
    from megatron.zero_bubble.patches import cpu  # torch, which arguments can be checked without

    given = {"--fp8-format": getattr(args, "fp8", None), "--fp4-format": getattr(args, "fp4", None)}
    if args.context_parallel_size > 1 and not cpu.installed():  # CPU mode has a stand-in
        given["--context-parallel-size"] = args.context_parallel_size
    for other, value in given.items():
        if value:
            raise ConfigurationError(
                f"{flag} splits the backward pass of Megatron's local layers, but {other} {value} "
                f"needs those of Transformer Engine: leave it out, or use --transformer-impl "
                f"{ENGINE}"
            )


def _problem() -> str | None:
    """What is wrong with the Transformer Engine that Megatron would import; None if nothing is."""
    try:
        package = importlib.import_module(ENGINE)
    except ModuleNotFoundError as error:
        return "it is not installed" if error.name == ENGINE else f"importing it fails ({error})"
    except (Exception, SystemExit) as error:  # without its libraries or a driver it raises anything
        return f"importing it fails ({type(error).__name__}: {error})"
    version = getattr(package, "__version__", None) or _version_of_package()
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers is None:
        return f"the version of the installed one is not known ({version or 'it has none'})"
    if (int(numbers[1]), int(numbers[2])) < OLDEST:
        return f"the installed one is {version}"
    return None


def _version_of_package() -> str:
    try:
        return metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return ""
