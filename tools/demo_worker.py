"""One rank of tools/demo.py: pretrain_gpt.py, with what the demo shows written down beside it.

python tools/demo_worker.py RESULTS [Megatron's flags]
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

# isort: split
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args, training

import pretrain_gpt
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.profile.times import message_time
from megatron.zero_bubble.runtime.interpreter import Event
from zero_bubble.program import Run

GRAD_NORM = 5  # its place in what Megatron's train_step returns


class Recorder:
    """Collects losses, iteration times and passes, from Megatron's schedule as from ours.

    Forward and backward steps are timed where both call them; ours spends what is W elsewhere, so
    that there the session's event log counts.
    """

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.grad_norms: list[str] = []
        self.validation: list[str] = []
        self.seconds: list[float] = []
        self.batches: list[list[tuple[str, float, float]]] = []
        """(kind, begin, end) of each pass of each training batch, in seconds."""
        self._steps: list[tuple[str, float, float]] = []
        training.train_step = self._around_train_step(training.train_step)
        training.evaluate = self._around_evaluate(training.evaluate)
        schedules.forward_step = self._timing(schedules.forward_step, "F")
        schedules.backward_step = self._timing(schedules.backward_step, "BW")

    def _around_train_step(self, train_step: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **options: Any) -> Any:
            session = current_session()
            events: list[Event] = []
            if session is not None:
                session.listeners[:] = [lambda record: events.extend(record.events)]
            self._steps = []
            begin = time.perf_counter()
            result = train_step(*given, **options)
            self.seconds.append(time.perf_counter() - begin)
            if result[0]:
                self.losses += [value.item().hex() for value in result[0].values()]
            self.grad_norms.append(float(result[GRAD_NORM]).hex())
            self.batches.append(passes_of(events) if session is not None else self._steps)
            return result

        return wrapper

    def _around_evaluate(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*given: Any, **options: Any) -> Any:
            session = current_session()
            if session is not None:
                session.listeners.clear()
            result = evaluate(*given, **options)
            self.validation += [float(value).hex() for value in (result[0] or {}).values()]
            return result

        return wrapper

    def _timing(self, step: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def wrapper(*given: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = step(*given, **options)
            self._steps.append((kind, begin, time.perf_counter()))
            return result

        return wrapper


def passes_of(events: list[Event]) -> list[tuple[str, float, float]]:
    """The passes in an event log, the wait for their messages left out."""
    return [
        (event.instruction.what.kind.value, (event.begin_ns + event.waited_ns) / 1e9,
         event.end_ns / 1e9)
        for event in events
        if isinstance(event.instruction, Run)
    ]  # fmt: skip


def main() -> None:
    results = Path(sys.argv.pop(1))
    recorder = Recorder()
    pretrain_gpt.main()
    session, args = current_session(), get_args()
    rank = int(os.environ["RANK"])
    shape = (args.seq_length, args.micro_batch_size, args.hidden_size)
    message_ms = None
    if session is not None and session.transport is not None:
        message_ms = message_time(session.transport, rank, shape, args.params_dtype)
    results.mkdir(parents=True, exist_ok=True)
    (results / f"rank{rank}.json").write_text(
        json.dumps(
            {
                "losses": recorder.losses,
                "grad_norms": recorder.grad_norms,
                "validation": recorder.validation,
                "seconds": recorder.seconds,
                "batches": recorder.batches,
                "message_ms": message_ms,
            }
        )
    )


if __name__ == "__main__":
    main()
