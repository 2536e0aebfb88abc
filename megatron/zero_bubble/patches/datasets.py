"""Megatron from a wheel does not try to compile what the wheel ships compiled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.zero_bubble.patches.patching import Patch, apply

__all__ = ["install"]


def install() -> None:
    """Patch the compilation of the dataset helpers, which ends the process where it fails."""
    apply(
        Patch(
            "megatron.core.datasets.utils",
            "compile_helpers",
            "the wheel has the dataset helpers built and no Makefile to build them again",
            _unless_built,
        )
    )


def _unless_built(original: Callable[[], Any]) -> Callable[[], Any]:
    def compile_helpers() -> None:
        from megatron.core import datasets

        makefile = Path(datasets.__file__).parent / "Makefile"
        built = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
        if makefile.exists() or not built:
            original()

    return compile_helpers
