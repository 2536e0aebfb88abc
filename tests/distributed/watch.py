"""Listening to the runtime in a rank of ours.

An assertion more is a value more in the record, and its test in `observations.check_runtime`.
Imports nothing of ours by itself, for reference runs have it too.
"""

from __future__ import annotations

import re
import sys
import time
from typing import Any

__all__ = ["ADAPTOR", "RuntimeWatch", "StepWatch"]

ADAPTOR = "megatron.zero_bubble.adaptor"
LINEAR = re.compile(r"(linear_(qkv|proj|fc1|fc2)|output_layer)\.weight$")


class RuntimeWatch:
    """Listens to the session of this rank; `batches` is plain data, one entry a training batch.

    ::

        stage               this rank's
        schedule            the name of the one that ran
        executed            [instruction as text], in the order it ran
        ends                [host time in ns when each of them ended]
        weight_store_peak   most (chunk, microbatch) bundles that waited for W at once
        weights_in          {kind of pass: weight gradients computed in passes of this kind}
        linears             linear layers on this stage that train
        moved_in            {kind of pass: passes that changed a linear layer's main_grad}
        ended               {kind of pass: host time in ns when the last one of it ended}
        reductions          [host time in ns when a reduction of gradients was started], in order
    """

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        self._session: Any = None
        self._weights_in: dict[str, int] = {}
        self._moved_in: dict[str, int] = {}
        self._computed_before = 0
        self._gradients: list[Any] = []
        self._gradients_before: list[Any] = []
        self._reductions: list[int] = []

    def attach(self, model: list[Any]) -> None:
        """Start to listen as soon as there is a session; never in a reference run."""
        if self._session is not None or ADAPTOR not in sys.modules:
            return
        from megatron.zero_bubble.patches.schedule import current_session

        session = current_session()
        if session is not None:
            self._session = session
            self._gradients = [
                parameter.main_grad
                for chunk in model
                for name, parameter in chunk.named_parameters()
                if LINEAR.search(name) and parameter.requires_grad
            ]
            session.listeners.append(self._batch)
            session.observer = self
            self._watch_reductions()

    def before(self, instruction: Any) -> None:
        self._computed_before = self._session.store.computed
        if getattr(instruction, "what", None) is not None:
            self._gradients_before = [gradient.clone() for gradient in self._gradients]

    def after(self, instruction: Any) -> None:
        what = getattr(instruction, "what", None)
        import torch

        kind = str(what.kind) if what is not None else "communication"
        new = self._session.store.computed - self._computed_before
        self._weights_in[kind] = self._weights_in.get(kind, 0) + new
        if what is not None:
            moved = any(
                not before.view(torch.uint8).equal(now.view(torch.uint8))  # NaNs compare as bits
                for before, now in zip(self._gradients_before, self._gradients, strict=True)
            )
            self._moved_in[kind] = self._moved_in.get(kind, 0) + moved

    def _watch_reductions(self) -> None:
        """Note when a group of buckets is sent, wherever Megatron decides to."""
        from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

        start = _ParamAndGradBucketGroup.start_grad_sync

        def start_and_note(group: Any, *args: Any, **options: Any) -> Any:
            before, now = group.grad_reduce_handle, time.perf_counter_ns()
            result = start(group, *args, **options)
            if group.grad_reduce_handle is not before:  # not one that is under way already
                self._reductions.append(now)
            return result

        _ParamAndGradBucketGroup.start_grad_sync = start_and_note

    def _batch(self, record: Any) -> None:
        weights_in, self._weights_in = self._weights_in, {}
        moved_in, self._moved_in = self._moved_in, {}
        reductions, self._reductions = self._reductions, []
        if not record.forward_only:
            self.batches.append(
                {
                    "stage": record.stage,
                    "schedule": record.program.name,
                    "executed": [str(event.instruction) for event in record.events],
                    "ends": [event.end_ns for event in record.events],
                    "weight_store_peak": record.weight_store_peak,
                    "weights_in": weights_in,
                    "linears": len(self._gradients),
                    "moved_in": moved_in,
                    "ended": {
                        str(event.instruction.what.kind): event.end_ns
                        for event in record.events
                        if hasattr(event.instruction, "what")
                    },
                    "reductions": reductions,
                }
            )


class StepWatch:
    """Listens to the optimizer's steps with post-validation; `steps` has one entry an iteration.

    ::

        stage               this rank's
        verdict             "step", "clip", "skip", ...
        optimistic          whether this stage stepped before it knew the result
        synchronous         whether the step was Megatron's own
        events              [what was done], in order
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self._validation: Any = None

    @property
    def counts(self) -> dict[str, int]:
        return {} if self._validation is None else dict(self._validation.counts)

    def attach(self) -> None:
        """Start to listen as soon as there is post-validation; never in a reference run."""
        if self._validation is not None or ADAPTOR not in sys.modules:
            return
        from megatron.zero_bubble.patches.optimizer import current_post_validation

        self._validation = current_post_validation()
        if self._validation is not None:
            self._validation.listeners.append(self._step)

    def _step(self, record: Any) -> None:
        events = [what for what, _begin, _end in record.events]
        self.steps.append(
            {
                "stage": record.stage,
                "verdict": str(record.verdict),
                "optimistic": record.optimistic,
                "synchronous": "synchronous step" in events,
                "events": events,
            }
        )
