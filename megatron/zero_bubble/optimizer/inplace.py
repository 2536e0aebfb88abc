"""In place: an ordinary step, undone by inverting AdamW's arithmetic (the paper's Algorithm 1).

It keeps nothing but counters, and it is for comparison: the inverse is exact on paper only. In 32
bits a step rounds away part of what it replaces. Where a gradient is some thousand times the size
of those before it, most of the second moment is lost, and it may even come back below zero. Such
a spike is just what has a step undone. What cannot be right is an error here; what is only
imprecise is not seen, so that training goes on from parameters that differ in their last bits, or
after a spike in more than that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.optimizer.model_parameters import (
    MainParameter,
    forget_gathers,
    gather_model_parameters,
    main_parameters,
    step_members,
    steppable_members,
    write_model_parameters,
)
from megatron.zero_bubble.optimizer.state import Counters, check_state, is_adam

__all__ = ["InPlace"]

SLICE_ELEMENTS = 1 << 22  # inverted at a time, to bound the scratch
REMEDY = "restart from the last checkpoint with --rollback deferred, which undoes any step exactly"


@dataclass(frozen=True, slots=True)
class _Settings:
    """One step of a group, as numbers: rates, and the corrections of the moments' bias."""

    lr: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float

    @classmethod
    def after_step(cls, inner: Any, parameter: MainParameter) -> _Settings:
        group = inner.param_groups[parameter.group]
        step = float(group.get("step", inner.state[parameter.tensor].get("step")))
        beta1, beta2 = group["betas"]
        corrected = group.get("bias_correction", True)
        return cls(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            correction1=1 - beta1**step if corrected else 1.0,
            correction2=1 - beta2**step if corrected else 1.0,
        )


class InPlace:
    """An ordinary step, and its inverse.

    Args:
        optimizer: what Megatron made, with Adam that decouples weight decay from the gradient.

    Raises:
        ConfigurationError: an inner optimizer whose step has no such inverse.
    """

    def __init__(self, optimizer: ChainedOptimizer) -> None:
        self._optimizer = optimizer
        self._members = steppable_members(optimizer)
        for member in self._members:
            _check_invertible(member.optimizer)
        self._counters: Counters | None = None
        self._kept_bytes = self._scratch_bytes = 0

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    @property
    def scratch_bytes(self) -> int:
        """Memory of an undo: there is none in an ordinary step."""
        return self._scratch_bytes

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def apply(self) -> None:
        check_state(self._members)
        self._counters = Counters(self._members)
        self._kept_bytes = self._counters.nbytes
        step_members(self._members)
        gather_model_parameters(self._optimizer)

    def commit(self) -> None:
        self._counters = None

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def undo(self, *, publish: bool) -> None:
        """As the protocol says, but for rounding.

        Raises:
            RuntimeError: the inverse gives what no step can have started from.
        """
        forget_gathers(self._optimizer)
        for member in self._members:
            for parameter in main_parameters(member):
                self._invert(member.optimizer, parameter)
        if self._counters is not None:
            self._counters.restore()
        self._counters = None
        if publish:
            write_model_parameters(self._members)
            gather_model_parameters(self._optimizer)

    def _invert(self, inner: Any, parameter: MainParameter) -> None:
        settings = _Settings.after_step(inner, parameter)
        state = inner.state[parameter.tensor]
        tensors = (
            parameter.tensor.data,
            parameter.tensor.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
        )
        sound = True
        for p, g, m, v in zip(*(t.view(-1).split(SLICE_ELEMENTS) for t in tensors), strict=True):
            _invert_slice(settings, p, g, m, v)
            self._scratch_bytes = max(self._scratch_bytes, 2 * p.nbytes)
            sound = sound and _is_sound(p, m, v)
        if not sound:
            raise RuntimeError(
                f"--rollback inplace could not undo a step of {parameter.name}: a second moment "
                "came back below zero, or a value came back as infinite or not a number. Its "
                f"gradient has grown too far for the inverse: {REMEDY}"
            )


def _invert_slice(
    settings: _Settings, p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor
) -> None:
    """From parameters and moments after the step to those before it, in place."""
    denominator = v.sqrt().div_(math.sqrt(settings.correction2)).add_(settings.eps)
    p.addcdiv_(m, denominator, value=settings.lr / settings.correction1)
    p.div_(1 - settings.lr * settings.weight_decay)
    m.add_(g, alpha=settings.beta1 - 1).div_(settings.beta1)
    v.addcmul_(g, g, value=settings.beta2 - 1).div_(settings.beta2)


def _is_sound(p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> bool:
    finite = p.isfinite().all() & m.isfinite().all() & v.isfinite().all()
    return bool(finite & (v >= 0).all())


def _check_invertible(inner: Any) -> None:
    name = type(inner).__name__
    if not is_adam(inner):
        raise ConfigurationError(
            f"--rollback inplace inverts AdamW's arithmetic, and the optimizer is {name}: "
            "use --optimizer adam, or --rollback deferred"
        )
    for group in inner.param_groups:
        if not _decouples_weight_decay(inner, group):
            raise ConfigurationError(
                f"--rollback inplace cannot invert {name} that adds weight decay to the gradient "
                "(decoupled_weight_decay is off): use AdamW, or --rollback deferred"
            )
        if group.get("amsgrad") or group.get("maximize"):
            raise ConfigurationError(
                f"--rollback inplace knows neither amsgrad nor maximize of {name}: "
                "use --rollback deferred"
            )
        if 0 in group["betas"]:
            raise ConfigurationError(
                f"--rollback inplace divides by --adam-beta1 and --adam-beta2, which are "
                f"{group['betas']}: use values above 0, or --rollback deferred"
            )


def _decouples_weight_decay(inner: Any, group: dict[str, Any]) -> bool:
    if isinstance(inner, torch.optim.Adam):
        return bool(group.get("decoupled_weight_decay", isinstance(inner, torch.optim.AdamW)))
    return bool(getattr(inner, "adam_w_mode", True))
