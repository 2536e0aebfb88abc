"""What happens when the adaptor is imported: CPU mode, the version check, the patches."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from megatron.zero_bubble import ending
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.patches import cpu

__all__ = ["cannot_import", "device_flag", "install", "stop"]

USAGE_ERROR = 2  # argparse's own
DEVICE_FLAG = "--zero-bubble-device"
SPEAKER_FIRST_SECONDS = 5.0


def install() -> None:
    """Install everything, once a process; a version that cannot work ends it with one message."""
    ending.install()
    try:
        choice = device_flag(sys.argv[1:])
        if choice is not None:
            os.environ[cpu.DEVICE_VARIABLE] = choice
        if cpu.wanted() and not cpu.installed():
            _check_first()
        cpu.install()
        _install_patches()
    except ImportError as error:
        stop(cannot_import(error))
    except ValueError as error:
        stop(error)


def _check_first() -> None:
    for early in ("megatron.core", "megatron.training"):
        if early in sys.modules:
            raise ConfigurationError(
                f"{early} was imported before megatron.zero_bubble.adaptor, which is too late for "
                "CPU mode: make `import megatron.zero_bubble.adaptor` the first import"
            )


def device_flag(arguments: Sequence[str]) -> str | None:
    """The value of --zero-bubble-device, needed before Megatron's parser can be imported."""
    for position, argument in enumerate(arguments):
        if argument.startswith(DEVICE_FLAG + "="):
            return argument.partition("=")[2]
        if argument == DEVICE_FLAG and position + 1 < len(arguments):
            return arguments[position + 1]
    return None


def cannot_import(error: ImportError, who: str = "zero-bubble") -> ConfigurationError:
    """What to tell a user whose Megatron is missing, incomplete, or of another version."""
    from megatron.zero_bubble.patches import patching

    package = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and package not in ("", "megatron"):
        # Before 0.19 Megatron imports yaml, which its wheel does not require.
        return ConfigurationError(
            f"{patching.installed_version()} needs the Python package {package}, which is missing: "
            "install it" + (" (pip install pyyaml)" if package == "yaml" else "")
        )
    return ConfigurationError(
        f"{who} does not fit {patching.installed_version()} ({error}): install megatron-core "
        f"{patching.TESTED_VERSIONS[-1]}"
    )


def stop(error: Exception) -> NoReturn:
    """End the process as argparse does; one message a machine, not one a rank."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"zero-bubble: error: {error}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all ranks when the first one goes: let the one that speaks be that one.
        time.sleep(SPEAKER_FIRST_SECONDS)
    raise SystemExit(USAGE_ERROR)


def _install_patches() -> None:
    from megatron.zero_bubble.patches import patching

    patching.check_version()
    patching.check_relied_on()
    # The training loop's from-imports must exist to be mended.
    import megatron.training.training  # noqa: F401

    from megatron.zero_bubble.patches import (
        arguments,
        buckets,
        checkpoint,
        datasets,
        delayed_weights,
        optimizer,
        placement,
        recomputation,
        schedule,
        tied_checkpoint,
        training_loop,
    )

    for part in (
        arguments,
        buckets,
        checkpoint,
        datasets,
        delayed_weights,
        optimizer,
        placement,
        recomputation,
        schedule,
        tied_checkpoint,
        training_loop,
    ):
        part.install()
