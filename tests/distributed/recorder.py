"""What one rank did, seen from Megatron's training loop: by hooks around it, not from its log."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.distributed.gathering import pieces
from tests.distributed.watch import ADAPTOR, RuntimeWatch, StepWatch

__all__ = ["Recorder"]


class Recorder:
    """Hooks ``train_step`` and ``evaluate``; `save` writes what they saw and the final state.

    The record, one file a rank::

        iterations   [{name: tensor or number}]   losses (last stage), grad_norm, skipped, lr, scale
        evaluations  [{name: tensor}]             losses (last stage)
        state        {name: tensor}               parameters and optimizer state at the end
        pieces       [gathering.Piece]            the same, under names that hold on any rank
        finite       [bool]                       whether all of the state was, after each iteration
        adaptor      bool                         whether it was imported
        runtime      [{name: anything}]           see `watch.RuntimeWatch`
        steps        [{name: anything}]           see `watch.StepWatch`
        counts       {name: int}                  steps by outcome, with post-validation
        position     {name: anything}             random states, samples consumed, scheduler's steps
    """

    def __init__(self) -> None:
        self.iterations: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.finite: list[bool] = []
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._watch = RuntimeWatch()
        self._steps = StepWatch()

    def install(self) -> None:
        """Wrap the two functions where the loop looks them up, outside any other patch."""
        from megatron.training import training

        train_step, evaluate = training.train_step, training.evaluate

        def recorded_step(
            forward_step: Any, data: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            self._watch.attach(model)
            self._steps.attach()
            self._model, self._optimizer = model, optimizer
            result = train_step(forward_step, data, model, optimizer, *args, **kwargs)
            losses, skipped, _checkpoint, _exit, _code, grad_norm, *_ = result
            self.finite.append(all(map(_is_finite, self._state().values())))
            self.iterations.append(
                {f"loss/{name}": value for name, value in _copied(losses)}
                | {
                    "grad_norm": grad_norm,
                    "skipped": skipped,
                    "lr": max(group["lr"] for group in optimizer.param_groups),
                    "loss_scale": float(optimizer.get_loss_scale()),
                }
            )
            return result

        def recorded_evaluation(*args: Any, **kwargs: Any) -> Any:
            result = evaluate(*args, **kwargs)
            self.evaluations.append(dict(_copied(result[0])))
            return result

        training.train_step, training.evaluate = recorded_step, recorded_evaluation

    @property
    def has_begun(self) -> bool:
        """Whether training has; before, there is nothing to record."""
        return bool(self._model)

    def save(self, path: Path) -> None:
        """Write the record; complete or not at all, so that a file means the rank finished."""
        import torch

        record = {
            "iterations": self.iterations,
            "evaluations": self.evaluations,
            "state": self._state(),
            "pieces": list(pieces(self._model, self._optimizer)),
            "finite": self.finite,
            "runtime": self._watch.batches,
            "steps": self._steps.steps,
            "counts": self._steps.counts,
            "position": _position(),
            "adaptor": ADAPTOR in sys.modules,
        }
        torch.save(record, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def _state(self) -> dict[str, Any]:
        return dict(_parameters(self._model)) | dict(_optimizer_state(self._optimizer))


def _is_finite(value: Any) -> bool:
    return bool(value.isfinite().all()) if hasattr(value, "isfinite") else True


def _position() -> dict[str, Any]:
    """Where a run stands in its data and its random numbers."""
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import get_args

    trackers = get_cuda_rng_tracker().get_states()
    return {
        "consumed": get_args().consumed_train_samples,
        "iteration": getattr(get_args(), "curr_iteration", None),  # none before the first
        "random": torch.get_rng_state(),
        **{f"random/{name}": state.clone() for name, state in trackers.items()},
    }


def _copied(losses: dict[str, Any] | None) -> Iterator[tuple[str, Any]]:
    for name, value in (losses or {}).items():
        yield name, value.detach().clone() if hasattr(value, "detach") else value


def _parameters(model: list[Any]) -> Iterator[tuple[str, Any]]:
    for index, chunk in enumerate(model):
        for name, parameter in chunk.named_parameters():
            yield f"model{index}/{name}", parameter.detach().clone()


def _optimizer_state(optimizer: Any, prefix: str = "optimizer") -> Iterator[tuple[str, Any]]:
    """Main parameters and every state tensor, whatever the kind of Megatron optimizer.

    A chain is its members; each member wraps one torch optimizer, whose groups hold the parameters
    it updates: the model's own (fp32), fp32 copies (mixed precision), or this rank's shards of
    those (distributed optimizer).
    """
    import torch

    if optimizer is None:
        return
    if hasattr(optimizer, "chained_optimizers"):
        for index, member in enumerate(optimizer.chained_optimizers):
            yield from _optimizer_state(member, f"{prefix}{index}")
        return
    inner = optimizer.optimizer
    if inner is None:  # nothing to train on this rank
        return
    for g, group in enumerate(inner.param_groups):
        if "step" in group:
            yield f"{prefix}/group{g}/step", group["step"]
        for p, parameter in enumerate(group["params"]):
            name = f"{prefix}/group{g}/parameter{p}"
            yield f"{name}/main", parameter.detach().clone()
            for key, value in inner.state.get(parameter, {}).items():
                copied = value.detach().clone() if torch.is_tensor(value) else value
                yield f"{name}/{key}", copied
