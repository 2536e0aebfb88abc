"""What forward passes change besides their outputs: random states, buffers, statistics of MoE.

Forwards that may be thrown away run after `ForwardState.capture`, between `set_aside` and
`release`. Then comes either `restore`, or `resume` when their batch goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron.zero_bubble import compat
from megatron.zero_bubble.runtime.host_random import HostRandomStates

__all__ = ["ForwardState"]


@dataclass(frozen=True, slots=True)
class _RandomStates:
    """All that Megatron saves in a checkpoint as random state."""

    host: HostRandomStates
    cuda: torch.Tensor
    tracker: dict[str, Any]

    @classmethod
    def capture(cls) -> _RandomStates:
        tracker = get_cuda_rng_tracker().get_states()
        return cls(
            HostRandomStates.capture(),
            torch.cuda.get_rng_state(),
            {name: _copied(state) for name, state in tracker.items()},
        )

    def restore(self) -> None:
        self.host.restore()
        torch.cuda.set_rng_state(self.cuda)
        get_cuda_rng_tracker().set_states(dict(self.tracker))


class ForwardState:
    """A point in time to which forward passes of these model chunks can be taken back."""

    def __init__(self, models: Sequence[torch.nn.Module], *, moe: bool) -> None:
        self._random = _RandomStates.capture()
        self._buffers = [(*one, one[-1].detach().clone()) for one in _buffers(models)]
        self._metrics = _SetAsideMetrics() if moe else None

    @classmethod
    def capture(cls, models: Sequence[torch.nn.Module]) -> ForwardState:
        """Remember the present."""
        return cls(models, moe=any(_has_experts(one) for one in models))

    def restore(self) -> None:
        """Go back; the statistics set aside are dropped."""
        self._random.restore()
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer.copy_(value)
        self.release()
        self._metrics = None

    def set_aside(self) -> None:
        """The forwards begin: the statistics that they report go aside."""
        if self._metrics is not None:
            self._metrics.take_over()

    def release(self) -> None:
        """The forwards are over: statistics that are reported now belong to another batch."""
        if self._metrics is not None:
            self._metrics.put_back()

    def resume(self) -> None:
        """Their batch goes on: its statistics begin with those set aside."""
        if self._metrics is not None:
            self._metrics.join()
            self._metrics = None


class _SetAsideMetrics:
    """MoE statistics of a batch that has begun before those of the last one are logged."""

    def __init__(self) -> None:
        self._before = compat.moe_statistics()
        self._ahead = compat.new_moe_statistics()

    def take_over(self) -> None:
        compat.set_moe_statistics(self._ahead)

    def put_back(self) -> None:
        compat.set_moe_statistics(self._before)

    def join(self) -> None:
        compat.add_moe_statistics(compat.moe_statistics(), self._ahead)


def _buffers(
    models: Sequence[torch.nn.Module],
) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """(module, name, buffer) of each; a forward may change a buffer or put another in its place."""
    # Not by `named_buffers`: Megatron's DistributedDataParallel has an attribute `buffers`.
    for model in models:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, name, buffer


def _has_experts(model: torch.nn.Module) -> bool:
    config = getattr(model, "config", None)
    return getattr(config, "num_moe_experts", None) is not None


def _copied(state: Any) -> Any:
    # With CUDA graphs the tracker holds generators.
    return state.clone_state() if isinstance(state, torch.Generator) else state.clone()
