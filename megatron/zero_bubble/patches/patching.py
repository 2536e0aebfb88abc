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

__all__ = [
    "RELIED_ON",
    "TESTED_VERSIONS",
    "Patch",
    "apply",
    "check_relied_on",
    "check_version",
    "installed_version",
]

logger = logging.getLogger(__name__)

TESTED_VERSIONS = ("0.17.1", "0.18.2", "0.19.2")
"""Versions of megatron-core that `tools/test_versions.py` runs this project's tests with."""
OLDEST, NEXT_UNKNOWN = (0, 17), (0, 20)
_OURS = "megatron.zero_bubble"

RELIED_ON = {
    "megatron.core.pipeline_parallel.schedules": (
        "forward_step",
        "backward_step",
        "check_first_val_step",
        "deallocate_output_tensor",
        "get_tensor_shapes",
    ),
    "megatron.core.process_groups_config": ("ProcessGroupCollection.use_mpu_process_groups",),
    "megatron.core.distributed": ("DistributedDataParallel._make_backward_post_hook",),
    "megatron.core.tensor_parallel.layers": (
        "ColumnParallelLinear._forward_impl",
        "RowParallelLinear._forward_impl",
        "dist_all_gather_func",
        "dist_reduce_scatter_func",
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        "DistributedOptimizer.checkpoint_fully_reshardable_formats",
        "DistributedOptimizer._get_model_param_range_map",
    ),
    "megatron.core.optimizer.optimizer": (
        "Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
        "Float16OptimizerWithFloat16Params._collect_main_grad_data_for_unscaling",
    ),
    "megatron.core.optimizer.clip_grads": ("l2_norm_impl", "multi_tensor_applier"),
    "megatron.core.num_microbatches_calculator": ("_GLOBAL_NUM_MICROBATCHES_CALCULATOR",),
    "megatron.core.utils": ("get_model_config", "prepare_input_tensors_for_wgrad_compute"),
}
"""What the runtime calls by attribute: without a probe it would be missed in the first batch."""


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
    path, _, last = patch.attribute.rpartition(".")
    original = _probe(patch.module, patch.attribute, f"changes ({patch.reason})")
    owner = _probe(patch.module, path, "changes")
    replacement = patch.make(original)
    setattr(owner, last, replacement)
    if isinstance(owner, ModuleType):
        _mend_imports(original, replacement)
    if _first_rank():
        logger.info("patched %s: %s", patch.name, patch.reason)


def check_relied_on() -> None:
    """Find all that the runtime calls in Megatron.

    Raises:
        ConfigurationError: names the first thing that this megatron-core lacks.
    """
    for module, attributes in RELIED_ON.items():
        for attribute in attributes:
            _probe(module, attribute, "calls")


def _probe(module: str, attribute: str, use: str) -> Any:
    """``module.attribute`` (dots allowed; the module itself if empty)."""
    try:
        return reduce(getattr, filter(None, attribute.split(".")), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"megatron-core {_version()} has no {module}.{attribute}, which zero-bubble {use}: "
            f"install megatron-core {TESTED_VERSIONS[-1]}"
        ) from error


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
