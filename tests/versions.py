"""What tests ask for and an older Megatron has not: such a test is skipped there, with the reason.

Only what is no part of the older version at all belongs here, by its own name.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

import pytest

__all__ = ["since", "skip_without"]

NEW_FLAGS = {"--step-batch-size-schedule": "0.18"}
"""Flags that tests use, and the first version of Megatron that has them."""


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skips a test of what Megatron has only since this version."""
    return pytest.mark.skipif(_is_older_than(version), reason=_reason(version, what))


def skip_without(flags: Sequence[str]) -> None:
    """Skip the running test if the installed Megatron does not have one of the flags."""
    for flag, version in NEW_FLAGS.items():
        if flag in flags and _is_older_than(version):
            pytest.skip(_reason(version, flag))


def _is_older_than(version: str) -> bool:
    return _numbers(_installed()) < _numbers(version)


def _reason(version: str, what: str) -> str:
    return f"{what} is new in megatron-core {version}; installed is {_installed()}"


def _installed() -> str:
    return importlib.metadata.version("megatron-core")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]
