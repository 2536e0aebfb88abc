"""What it takes to go ahead with an optimizer step before it is known to be right."""

from __future__ import annotations

from typing import Any, Protocol

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.optimizer.deferred import Deferred
from megatron.zero_bubble.optimizer.inplace import InPlace
from megatron.zero_bubble.optimizer.model_parameters import steppable_members
from megatron.zero_bubble.optimizer.snapshot import Snapshot
from megatron.zero_bubble.optimizer.state import is_adam, is_sgd

__all__ = ["KINDS", "Rollback", "make_rollback"]

KINDS = ("deferred", "snapshot", "inplace")


class Rollback(Protocol):
    """An optimizer step that can be undone: ``apply``, then ``commit`` or ``undo``.

    All of it happens within one step of the training loop, so that learning rates and the like
    stay as they are. The gradients are ready: the main ones are set and unscaled, not clipped.
    """

    def apply(self) -> None:
        """Step with the gradients as they are; forwards then read stepped parameters.

        Raises:
            RuntimeError: no ordinary step came before, so that there are no moments yet.
        """

    def commit(self) -> None:
        """The step was right: leave what Megatron's ``step_with_ready_grads`` would have left."""

    def undo(self, *, publish: bool) -> None:
        """The step was wrong: leave everything as before ``apply``, gradients included.

        Forwards that ran since are void, and so is what they saved for their backward.

        Args:
            publish: write and gather the model's parameters too. Otherwise an ordinary step must
                follow, which does so itself.
        """

    @property
    def kept_bytes(self) -> int:
        """Memory that the last ``apply`` took until ``commit`` or ``undo``."""

    @property
    def scratch_bytes(self) -> int:
        """Memory for a moment at a time, on top of that."""


def make_rollback(kind: str, optimizer: ChainedOptimizer, *, on_host: bool = False) -> Rollback:
    """The kind of rollback that ``--rollback`` names, for Megatron's optimizer.

    Args:
        kind: one of ``KINDS``.
        optimizer: what ``get_megatron_optimizer`` returned.
        on_host: ``snapshot`` keeps its copies in the host's memory.

    Raises:
        ConfigurationError: an unknown kind, or an optimizer that it cannot step and undo exactly.
    """
    if kind not in KINDS:
        raise ConfigurationError(f"--rollback {kind} is unknown: use one of {', '.join(KINDS)}")
    if on_host and kind != "snapshot":
        raise ConfigurationError(
            f"--rollback-snapshot-on-host says where copies are kept, and --rollback {kind} keeps "
            "none: drop it, or use --rollback snapshot"
        )
    _check_optimizer(optimizer)
    if kind == "deferred":
        return Deferred(optimizer)
    if kind == "snapshot":
        return Snapshot(optimizer, on_host=on_host)
    return InPlace(optimizer)


# Fields of Megatron's settings with which a step does more than the parts that are known here.
_OPTIMIZER_FIELDS = {
    "use_precision_aware_optimizer": "--use-precision-aware-optimizer",
    "optimizer_cpu_offload": "--optimizer-cpu-offload",
    "optimizer_cuda_graph": "--optimizer-cuda-graph",
    "reuse_grad_buf_for_mxfp8_param_ag": "--reuse-grad-buf-for-mxfp8-param-ag",
    "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step",
}
_DDP_FIELDS = {
    "use_megatron_fsdp": "--use-megatron-fsdp",
    "fp8_param_gather": "--fp8-param-gather",
    "fp4_param_gather": "--fp4-param-gather",
}


def _check_optimizer(optimizer: Any) -> None:
    if type(optimizer) is not ChainedOptimizer:  # subclasses have steps of their own
        raise _refusal(f"the optimizer is {type(optimizer).__name__}, not a ChainedOptimizer")
    for member in optimizer.chained_optimizers:
        if type(member) not in (
            FP32Optimizer,
            Float16OptimizerWithFloat16Params,
            DistributedOptimizer,
        ):
            raise _refusal(f"it cannot undo a step of {type(member).__name__}")
        _check_fields(member.config, _OPTIMIZER_FIELDS)
        if isinstance(member, DistributedOptimizer):
            _check_fields(member.ddp_config, _DDP_FIELDS)
    for member in steppable_members(optimizer):
        inner = member.optimizer
        if not (is_adam(inner) or is_sgd(inner)):
            raise _refusal(
                f"it steps parameters by slices, which is known to be the same for Adam and SGD, "
                f"and the optimizer is {type(inner).__name__}"
            )


def _check_fields(settings: Any, fields: dict[str, str]) -> None:
    for field, flag in fields.items():
        if getattr(settings, field, False):  # not every version of Megatron has each
            raise _refusal(f"it cannot undo a step with {flag}: drop that flag")


def _refusal(reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"--optimizer-post-validation does not work here: {reason}; or drop "
        "--optimizer-post-validation"
    )
