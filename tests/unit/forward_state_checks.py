"""What test_forward_state.py checks, in a process in CPU mode: forwards that are taken back."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils

from megatron.zero_bubble import compat
from megatron.zero_bubble.runtime import forward_state
from megatron.zero_bubble.runtime.forward_state import ForwardState

LAYERS = 3
GENERATORS = ("python", "numpy", "torch", "cuda", "tracker")


class Layer(torch.nn.Module):  # type: ignore[misc]
    """Draws from every generator, and keeps count in buffers of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("tokens", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", None)
        self.replaced: torch.Tensor
        self.register_buffer("replaced", torch.zeros(1))
        self.draws: list[dict[str, float]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.tokens += len(inputs)
        self.replaced = self.replaced + 1
        outputs = self.norm(torch.nn.functional.dropout(inputs, 0.5))
        tracker = get_cuda_rng_tracker()
        with tracker.fork("of a test"):
            by_tracker = torch.rand(1).item()
        on_device = torch.rand(1, generator=DEVICE).item()
        drawn = random.random(), np.random.rand(), torch.rand(1).item(), on_device, by_tracker
        self.draws.append(dict(zip(GENERATORS, drawn, strict=True)))
        return outputs


class Wrapper(torch.nn.Module):  # type: ignore[misc]
    """As Megatron's DistributedDataParallel: `buffers` is a list of something else."""

    def __init__(self, module: torch.nn.Module, config: Any) -> None:
        super().__init__()
        self.module, self.config = module, config
        self.buffers = [object()]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)


DEVICE = torch.Generator()
"""Stands for the device's generator, which in CPU mode is the CPU's."""


@contextmanager
def seeded() -> Iterator[None]:
    """Every generator from the same start; what the process had comes back after."""
    tracker = get_cuda_rng_tracker()
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state(), tracker.get_states()
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    DEVICE.manual_seed(4)
    named = torch.Generator().manual_seed(5).get_state()
    tracker.set_states({**kept[3], "of a test": named})
    cuda = SimpleNamespace(get_rng_state=DEVICE.get_state, set_rng_state=DEVICE.set_state)
    names = {name: getattr(torch, name) for name in ("no_grad",)}
    try:
        # Only the module under test sees it: the tracker needs the one generator.
        torch_of_module = SimpleNamespace(**names, cuda=cuda, Generator=torch.Generator)
        with mock.patch.object(forward_state, "torch", torch_of_module):
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])
        tracker.set_states(kept[3])


def models() -> list[Wrapper]:
    """Two chunks, of which one is wrapped twice."""
    config = SimpleNamespace(num_moe_experts=None)
    return [Wrapper(Layer(), config), Wrapper(Wrapper(Layer(), config), config)]


def layers(chunks: list[Wrapper]) -> list[Layer]:
    return [one for chunk in chunks for one in chunk.modules() if isinstance(one, Layer)]


def forwards(chunks: list[Wrapper], number: int, first: int = 0) -> list[torch.Tensor]:
    """This many microbatches through all chunks."""
    inputs = torch.linspace(-1, 1, 12).view(3, 4)
    return [chunk(inputs * (first + one + 1)) for one in range(number) for chunk in chunks]


def _everything(chunks: list[Wrapper]) -> list[Any]:
    states = [{**one.state_dict(), "tokens": one.tokens} for one in layers(chunks)]
    return [{name: value.tolist() for name, value in one.items()} for one in states]


def without_interruption() -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs, draws and buffers of three forwards of each chunk."""
    with seeded():
        chunks = models()
        forwards(chunks, 1)  # buffers are no zeros any more
        outputs = forwards(chunks, 3)
    return _values(outputs), _last_draws(chunks, 3), _everything(chunks)


def _values(outputs: list[torch.Tensor]) -> list[Any]:
    return [one.tolist() for one in outputs]


def _last_draws(chunks: list[Wrapper], number: int) -> list[Any]:
    return [one.draws[-number:] for one in layers(chunks)]


def taken_back() -> None:
    """Forwards after others that were taken back, once and twice, and from a mere beginning."""
    expected = without_interruption()
    assert len({draw for one in expected[1][0] for draw in one.values()}) == 15
    for vain in ((2,), (1, 3), (0,), (0, 2)):
        with seeded():
            chunks = models()
            forwards(chunks, 1)
            for number in vain:
                state = ForwardState.capture(chunks)
                state.set_aside()
                forwards(chunks, number)
                state.release()
                state.restore()
            outputs = forwards(chunks, 3)
        found = _values(outputs), _last_draws(chunks, 3), _everything(chunks)
        assert found == expected, vain


def each_generator_counts() -> dict[str, bool]:
    """Whether the draws of each generator differ, if what was drawn is not taken back."""
    _, expected, _ = without_interruption()
    with seeded():
        chunks = models()
        forwards(chunks, 1)
        forwards(chunks, 1)
        forwards(chunks, 3)
    found = _last_draws(chunks, 3)
    return {
        name: all(
            one[name] != other[name]
            for ours, theirs in zip(found, expected, strict=True)
            for one, other in zip(ours, theirs, strict=True)
        )
        for name in GENERATORS
    }


def goes_on() -> None:
    """Forwards that count, in two parts."""
    expected = without_interruption()
    with seeded():
        chunks = models()
        forwards(chunks, 1)
        state = ForwardState.capture(chunks)
        state.set_aside()
        outputs = forwards(chunks, 2)
        state.release()
        state.resume()
        outputs += forwards(chunks, 1, first=2)
    assert (_values(outputs), _last_draws(chunks, 3), _everything(chunks)) == expected


@contextmanager
def new_tracker() -> Iterator[Callable[[], Any]]:
    """The statistics of a run from its start; a function that gives the present ones."""
    kept = compat.moe_statistics()
    compat.set_moe_statistics(compat.new_moe_statistics())
    try:
        yield compat.moe_statistics
    finally:
        compat.set_moe_statistics(kept)


GROUP: Any = "the ranks of a layer"
OF_DICTIONARIES = hasattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER")
"""How Megatron keeps the statistics before 0.18."""


def record(microbatch: int, *names: str) -> None:
    """What the layers of one microbatch report."""
    for name in names or ("load_balancing_loss", "z_loss"):
        for layer in range(1, LAYERS + 1):
            value = torch.tensor(1 / (3 + microbatch) + layer / 7 + len(name))
            if OF_DICTIONARIES:
                moe_utils.save_to_aux_losses_tracker(
                    name, value, layer, LAYERS, GROUP, reduce_group_has_dp=name == "z_loss"
                )
            else:
                compat.moe_statistics().record(
                    name, value, layer, LAYERS, reduce_group=GROUP, needs_dp_avg=name == "z_loss"
                )


def reported(tracker: Any) -> dict[str, Any]:
    """What a log of an iteration shows, which clears it."""
    entries = {name: dict(entry) for name, entry in _entries(tracker).items()}
    shown = {name: entry | {"values": entry["values"].tolist()} for name, entry in entries.items()}
    if OF_DICTIONARIES:
        moe_utils.clear_aux_losses_tracker()
    else:
        tracker.clear()
    return shown


def _entries(tracker: Any) -> dict[str, dict[str, Any]]:
    if OF_DICTIONARIES:
        present: dict[str, dict[str, Any]] = tracker
        return present
    return {name: vars(entry) for name, entry in tracker.metrics.items()}


def statistics_without_interruption(iterations: int) -> list[dict[str, Any]]:
    with new_tracker() as tracker:
        found = []
        for iteration in range(iterations):
            for microbatch in range(4):
                record(10 * iteration + microbatch)
            found.append(reported(tracker()))
    return found


def statistics_of_experts() -> None:
    """Each iteration's log has its own microbatches, of which two ran before the last log."""
    experts = Wrapper(Layer(), SimpleNamespace(num_moe_experts=4))
    expected = statistics_without_interruption(4)
    assert expected[0] != expected[1]
    for vain in (False, True):
        with new_tracker() as tracker:
            found = []
            ahead = 0
            for iteration in range(4):
                for microbatch in range(ahead, 4):
                    record(10 * iteration + microbatch)
                state = ForwardState.capture([*models(), experts])
                state.set_aside()
                for microbatch in range(2):
                    record(10 * (iteration + 1) + microbatch)
                state.release()
                if vain:
                    state.restore()
                before = tracker()
                found.append(reported(tracker()))
                if not vain:
                    state.resume()
                    ahead = 2
                assert tracker() is before
        assert found == expected, vain


def statistics_that_are_new() -> None:
    """A statistic that only the forwards ahead report is there afterwards."""
    experts = Wrapper(Layer(), SimpleNamespace(num_moe_experts=4))
    with new_tracker() as tracker:
        record(0, "z_loss")
        state = ForwardState.capture([experts])
        state.set_aside()
        record(1, "z_loss", "load_balancing_loss")
        state.release()
        assert list(_entries(tracker())) == ["z_loss"]
        reported(tracker())
        state.resume()
        found = reported(tracker())
    with new_tracker() as tracker:
        record(1, "z_loss", "load_balancing_loss")
        assert found == reported(tracker())


def without_experts_nothing_is_set_aside() -> None:
    with new_tracker() as tracker:
        present = tracker()
        state = ForwardState.capture(models())
        state.set_aside()
        assert tracker() is present
        state.release()
        state.restore()
        assert tracker() is present


def an_exception_in_between() -> None:
    """Released and restored after a forward that raised, the statistics are the run's own."""
    experts = Wrapper(Layer(), SimpleNamespace(num_moe_experts=4))
    with new_tracker() as tracker:
        record(0)
        present = tracker()
        expected = [entry["values"].tolist() for entry in _entries(present).values()]
        state = ForwardState.capture([experts])
        state.set_aside()
        record(1)
        state.restore()
        assert tracker() is present
        assert [entry["values"].tolist() for entry in _entries(present).values()] == expected
