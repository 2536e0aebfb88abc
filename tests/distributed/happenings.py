"""Things that happen to a rank while it trains, at points that only our runtime has.

`Config.happening` names one as ``what:stage:iteration``. The iteration is counted from 0; its step
is being taken. ``what`` is

    late         the last W of the iteration begins only when all other stages have run ahead
    raise        the first forward of the next iteration raises, in run-ahead where there is one
    raise-alone  the same, on the first tensor-parallel rank of the stage only
    slow         the stage is slow to run ahead, in any iteration
    terminate    the process gets SIGTERM in that forward
    save         all ranks save a checkpoint after the step, which no flag asked for
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["MESSAGE", "install"]

MESSAGE = "this forward fails on purpose"
PATIENCE_S = 60.0


def install(happening: str, directory: Path) -> None:
    """Prepare what is to happen; on every rank, since each says when it has run ahead."""
    if not happening:
        return
    what, stage, iteration = happening.split(":")
    _HAPPENINGS[what](int(stage), int(iteration), directory)


def _stage() -> int:
    from megatron.zero_bubble.patches.schedule import current_session

    session = current_session()
    assert session is not None
    stage: int = session.pipeline()[0]
    return stage


def _iteration() -> int:
    from megatron.training import get_args

    iteration: int = get_args().curr_iteration
    return iteration


def _late(stage: int, iteration: int, directory: Path) -> None:
    from megatron.zero_bubble.runtime.compute import MegatronCompute
    from megatron.zero_bubble.runtime.run_ahead import RunAhead

    run, weight = RunAhead.run, MegatronCompute.weight

    def run_and_tell(self: Any) -> None:
        run(self)
        (directory / f"ahead-{_iteration()}-{_stage()}").touch()

    def weight_when_all_are_ahead(
        self: Any, chunk: int, microbatch: int, part: int = 0, parts: int = 1
    ) -> None:
        others = set(range(self._groups.pp.size())) - {stage}
        last = microbatch == self._options.num_microbatches - 1
        if _stage() == stage and _iteration() == iteration and last and chunk == 0:
            _wait_for([directory / f"ahead-{iteration}-{one}" for one in others])
        weight(self, chunk, microbatch, part, parts)

    RunAhead.run = run_and_tell  # type: ignore[method-assign]
    MegatronCompute.weight = weight_when_all_are_ahead  # type: ignore[method-assign]


def _slow(stage: int, iteration: int, directory: Path) -> None:
    from megatron.zero_bubble.runtime.run_ahead import RunAhead

    run = RunAhead.run

    def run_slowly(self: Any) -> None:
        if _stage() == stage:
            time.sleep(1.0)
        run(self)

    RunAhead.run = run_slowly  # type: ignore[method-assign]


def _wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            missing = [path.name for path in paths if not path.exists()]
            raise TimeoutError(f"these stages never ran ahead: {missing}")
        time.sleep(0.01)


def _fail() -> None:
    raise ArithmeticError(MESSAGE)


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _fail_alone() -> None:
    from megatron.core import parallel_state

    if parallel_state.get_tensor_model_parallel_rank() == 0:
        _fail()


def _in_next_forward(happen: Callable[[], None]) -> Callable[[int, int, Path], None]:
    def prepare(stage: int, iteration: int, directory: Path) -> None:
        from megatron.zero_bubble.runtime.compute import MegatronCompute

        forward = MegatronCompute.forward
        batches = 0

        def eventful(self: Any, chunk: int, microbatch: int, input: Any) -> Any:
            nonlocal batches
            # Evaluations do not count; a first forward that is repeated would.
            if (
                _stage() == stage
                and (chunk, microbatch) == (0, 0)
                and not self._options.forward_only
            ):
                batches += 1
                if batches == iteration + 2:
                    print("happening", flush=True)
                    happen()
            return forward(self, chunk, microbatch, input)

        MegatronCompute.forward = eventful  # type: ignore[method-assign]

    return prepare


def _save(stage: int, iteration: int, directory: Path) -> None:
    from megatron.training import get_args, training

    callbacks = training.post_training_step_callbacks

    def save_unasked(
        model: Any, optimizer: Any, scheduler: Any, done: int, *rest: Any, **options: Any
    ) -> Any:
        if done == iteration + 1:
            args = get_args()
            args.save = str(directory / "checkpoint")
            training.save_checkpoint(done, model, optimizer, scheduler, 0)
            args.save = None
        return callbacks(model, optimizer, scheduler, done, *rest, **options)

    training.post_training_step_callbacks = save_unasked


_HAPPENINGS: dict[str, Callable[[int, int, Path], None]] = {
    "late": _late,
    "raise": _in_next_forward(_fail),
    "raise-alone": _in_next_forward(_fail_alone),
    "slow": _slow,
    "terminate": _in_next_forward(_terminate),
    "save": _save,
}
