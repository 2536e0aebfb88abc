"""How anything in Megatron is changed: by name, with a reason, logged, found by probing."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import ModuleType
from typing import Any

from megatron.zero_bubble.errors import ConfigurationError

__all__ = ["TESTED_VERSIONS", "Patch", "apply", "check_version", "installed_version"]

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.19.2",)
"""Versions of megatron-core that this project's tests have run with."""
OLDEST, NEXT_UNKNOWN = (0, 17), (0, 20)
_OURS = "megatron.zero_bubble"


@dataclass(frozen=True, slots=True)
class Patch:
    """Replaces ``module.attribute`` (dots allowed) by ``make(original)``."""

    module: str
    attribute: str
    reason: str
    make: Callable[[Any], Any]

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}"


def apply(patch: Patch) -> None:
    """Install a patch, in the module that defines the attribute and in all that imported it.

    A function is replaced by identity across ``sys.modules``: from-imports made earlier are
    mended, later ones see the new attribute.

    Raises:
        ConfigurationError: this megatron-core has no such attribute.
    """
    *path, last = patch.attribute.split(".")
    try:
        owner = reduce(getattr, path, importlib.import_module(patch.module))
        original = getattr(owner, last)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"megatron-core {_version()} has no {patch.name}, which zero-bubble changes "
            f"({patch.reason}): install megatron-core {TESTED_VERSIONS[-1]}"
        ) from error
    replacement = patch.make(original)
    setattr(owner, last, replacement)
    if isinstance(owner, ModuleType):
        _mend_imports(original, replacement)
    if _first_rank():
        logger.info("patched %s: %s", patch.name, patch.reason)


def _mend_imports(original: Any, replacement: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith(_OURS) or not isinstance(module, ModuleType):
            continue  # ours keep the originals they imported
        for key, value in list(vars(module).items()):
            if value is original:
                setattr(module, key, replacement)


def check_version() -> None:
    """Warn about a megatron-core that was not tested, refuse one that cannot work.

    Raises:
        ConfigurationError: older than 0.17, whose wheel has no training loop.
    """
    version = _version()
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise ConfigurationError(
            f"megatron-core {version} is too old: zero-bubble needs 0.17 to 0.19, whose wheels "
            f"contain megatron.training; install megatron-core {TESTED_VERSIONS[-1]}"
        )
    if version not in TESTED_VERSIONS and _first_rank():
        newer = " (newer than any known)" if numbers >= NEXT_UNKNOWN else ""
        logger.warning(
            "megatron-core %s%s has not been tested with zero-bubble; tested: %s",
            version,
            newer,
            ", ".join(TESTED_VERSIONS),
        )


def _first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _version() -> str:
    from megatron.core import package_info

    version: str = package_info.__shortversion__
    return version


def installed_version() -> str:
    """The Megatron that this process would use, for a message; also where it cannot be imported."""
    try:
        return f"megatron-core {_version()}"
    except ImportError:
        return "the installed Megatron"
