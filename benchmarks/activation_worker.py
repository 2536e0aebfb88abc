"""One rank of activation_memory.py: trains, another schedule each iteration, and counts bytes.

python benchmarks/activation_worker.py DIRECTORY FILE.json,FILE.json,... [Megatron's flags]
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

# isort: split
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import training
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pretrain_gpt
from megatron.zero_bubble.arguments import schedule_for
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.profile.activations import (
    ActivationCounter,
    CountedCompute,
    PassMemory,
)
from megatron.zero_bubble.runtime.compute import MegatronCompute
from megatron.zero_bubble.runtime.interpreter import Compute
from megatron.zero_bubble.runtime.watching import BatchRecord
from zero_bubble.program import Instruction, Run

LAYERS = "layers"


class Live(TorchDispatchMode):  # type: ignore[misc]
    """Bytes of all tensors that live, of those that operations made while this mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.highest = 0
        """Since it was last set."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {key for key, _ in storages((args, kwargs))}
        new = [(key, one) for key, one in storages(result) if key not in given]
        self._made |= {key: (StorageWeakRef(one), one.nbytes()) for key, one in new}
        self.highest = max(self.highest, self.now())
        return result

    def now(self) -> int:
        self._made = {key: one for key, one in self._made.items() if not one[0].expired()}
        return sum(nbytes for _, nbytes in self._made.values())


def storages(tree: Any) -> list[tuple[int, Any]]:
    found = [one.untyped_storage() for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
    return [(one._cdata, one) for one in found]


class Observers:
    """Observes one iteration: what is kept, by all and by the layers, and what passes allocate."""

    def __init__(self, counter: ActivationCounter, live: Live) -> None:
        self.whole = PassMemory(lambda: counter.held)
        self.layers = PassMemory(lambda: counter.held_in(LAYERS))
        self.live = live
        self.transient = 0
        self._begin = 0

    def before(self, instruction: Instruction) -> None:
        self.whole.before(instruction)
        self.layers.before(instruction)
        self._begin = self.live.highest = self.live.now()

    def after(self, instruction: Instruction) -> None:
        self.whole.after(instruction)
        self.layers.after(instruction)
        if isinstance(instruction, Run):
            over = self.live.highest - max(self._begin, self.live.now())
            self.transient = max(self.transient, over)


class Recorder:
    """Takes the place of train_step: chooses the iteration's schedule, and counts its bytes."""

    def __init__(self, names: list[str]) -> None:
        self.train_step = training.train_step
        self.names = names
        self.iterations: list[dict[str, Any]] = []
        self.counter: ActivationCounter | None = None

    def __call__(self, *given: Any, **options: Any) -> Any:
        if self.counter is None:
            self.counter = counter_of(given[2])
            current_session().instrument = partial(counted, self.counter)
        session, name = current_session(), self.names[len(self.iterations)]
        session.reschedule(partial(schedule_for, name))
        batches: list[BatchRecord] = []
        live = Live()
        session.observer = observers = Observers(self.counter, live)
        session.listeners[:] = [batches.append]
        with live:
            result = self.train_step(*given, **options)
        (batch,) = batches
        chunks = range(batch.program.placement.num_chunks(batch.stage))
        self.iterations.append(
            {
                "schedule": Path(name).stem,
                "stage": batch.stage,
                "amounts": [observers.whole.amounts(chunk) for chunk in chunks],
                "peak": observers.whole.peak,
                "layers": observers.layers.peak,
                "transient": observers.transient,
                "left": self.counter.held,
            }
        )
        return result


def counter_of(models: list[Any]) -> ActivationCounter:
    """Counts all but parameters and buffers, transformer layers apart from the rest."""
    counter = ActivationCounter(
        tensor
        for model in models
        # By name: in DistributedDataParallel `buffers` is a list of something else.
        for _, tensor in (*model.named_parameters(), *model.named_buffers())
    )
    for model in models:
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                counter.mark(module, LAYERS)
    return counter


def counted(counter: ActivationCounter, compute: MegatronCompute) -> Compute:
    """The session's computations, counted."""
    pending = current_session().store.pending
    return CountedCompute(compute, counter, pending, compute.split_chunks, LAYERS)


def main() -> None:
    scratch, names = Path(sys.argv.pop(1)), sys.argv.pop(1).split(",")
    recorder = Recorder(names)
    training.train_step = recorder
    pretrain_gpt.main()
    rank = int(os.environ["RANK"])
    (scratch / f"rank{rank}.json").write_text(json.dumps(recorder.iterations))


if __name__ == "__main__":
    main()
