"""What test_patch_targets.py asks of Megatron, in a process in CPU mode."""

from __future__ import annotations

import importlib
import pkgutil
from unittest import mock

from megatron.zero_bubble import patches
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.patches import patching
from megatron.zero_bubble.patches.patching import Patch


def patches_by_module() -> dict[str, list[Patch]]:
    """What each module of patches would install; nothing is installed."""
    found: dict[str, list[Patch]] = {}
    for one in pkgutil.iter_modules(patches.__path__):
        module = importlib.import_module(f"{patches.__name__}.{one.name}")
        if module is not patching and hasattr(module, "apply"):
            found[one.name] = []
            with mock.patch.object(module, "apply", found[one.name].append):
                module.install()
    return found


def targets() -> dict[str, dict[str, str]]:
    """By module of patches and target: what is wrong with the target, if anything is."""
    return {
        module: {patch.name: _wrong_with(patch) for patch in found}
        for module, found in patches_by_module().items()
    }


def _wrong_with(patch: Patch) -> str:
    try:
        target = patching._probe(patch.module, patch.attribute, "changes")
    except ConfigurationError as error:
        return str(error)
    return "" if callable(target) else f"it is a {type(target).__name__}"
