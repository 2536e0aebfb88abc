"""What rollback.py measures, on Megatron's optimizers in a process in CPU mode."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from megatron.core import optimizer as megatron_optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.optimizer import inplace
from megatron.zero_bubble.optimizer.deferred import batches
from megatron.zero_bubble.optimizer.model_parameters import main_parameters
from megatron.zero_bubble.optimizer.rollback import KINDS, Rollback, make_rollback
from megatron.zero_bubble.optimizer.state import is_elementwise, standing_in

CLIP = 1.0
CALM_STEPS = 20
CALM_NORM = 0.1


def torch_fused(params: Any, adam_w_mode: bool, capturable: bool, **settings: Any) -> Any:
    """torch's fused AdamW, called as Megatron calls its fused Adam."""
    return torch.optim.AdamW(params, **settings, fused=True)


ADAMS = {"CPU mode's": megatron_optimizers.Adam, "torch fused": torch_fused}


class Job:
    """A bf16 model of so many layers and its optimizer; jobs with equal arguments are alike."""

    def __init__(self, adam: str, layers: int, hidden: int) -> None:
        torch.manual_seed(1)
        modules = [torch.nn.Linear(hidden, hidden) for _ in range(layers)]
        net = torch.nn.Sequential(*modules).bfloat16()
        shape = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 1}
        self.chunk = DistributedDataParallel(
            TransformerConfig(**shape, bf16=True), DistributedDataParallelConfig(), net
        )
        config = OptimizerConfig(optimizer="adam", lr=1e-3, weight_decay=0.1, bf16=True)
        config.clip_grad, config.params_dtype = CLIP, torch.bfloat16
        with mock.patch.object(megatron_optimizers, "Adam", ADAMS[adam]):
            self.optimizer = get_megatron_optimizer(config, [self.chunk])
        self.elements = sum(parameter.numel() for parameter in self.chunk.parameters())

    def set_gradients(self, seed: int, norm: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.chunk.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.main_grad.copy_(gradient * (norm / self.elements**0.5))

    def step(self, seed: int, norm: float) -> None:
        """Megatron's own, with its clipping."""
        self.set_gradients(seed, norm)
        self.optimizer.step()

    def redo(self) -> None:
        """What follows an undone step: clip, and step plainly."""
        norm = self.optimizer.get_grad_norm()
        for member in self.optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(member.get_parameters(), max_norm=CLIP, total_norm=norm)
        self.optimizer.step_with_ready_grads()

    def numbers(self) -> torch.Tensor:
        """The model's parameters, main ones and moments, a row each, as integers of their bits."""
        (member,) = self.optimizer.chained_optimizers
        columns = []
        for parameter in main_parameters(member):
            state = member.optimizer.state[parameter.tensor]
            numbers = parameter.in_model.float(), parameter.tensor, *state.values()
            columns.append(
                torch.stack([n.flatten() for n in numbers if n.numel() == parameter.tensor.numel()])
            )
        return torch.cat(columns, dim=1).view(torch.int32)


def differing(kind: str, adam: str, spike: float) -> tuple[float, bool]:
    """An undone and clipped step after a spike, against a twin that was synchronous.

    Returns:
        The share of parameters of which a bit differs, in the parameter or its moments; and
        whether the undo was an error. (Then the share is what it would be without the check.)
    """
    ours, twin = Job(adam, 2, 724), Job(adam, 2, 724)
    for seed in range(CALM_STEPS):
        for job in (ours, twin):
            job.step(seed, CALM_NORM)
    norm = CALM_NORM * spike
    twin.step(CALM_STEPS, norm)
    ours.set_gradients(CALM_STEPS, norm)
    ours.optimizer.prepare_grads()
    rollback = make_rollback(kind, ours.optimizer)
    refused = False
    sound = inplace._is_sound

    def note(*tensors: torch.Tensor) -> bool:
        nonlocal refused
        refused |= not sound(*tensors)
        return True

    with mock.patch.object(inplace, "_is_sound", note):
        rollback.apply()
        rollback.undo(publish=False)
    ours.redo()
    wrong = (ours.numbers() != twin.numbers()).any(dim=0)
    return wrong.float().mean().item(), refused


@dataclass(frozen=True, slots=True)
class Cost:
    """Memory in bytes a parameter and bytes; times as ratios to a plain step."""

    kept: float
    scratch: int
    ordinary: float
    failed: float
    ordinary_to_sliced: float
    failed_to_sliced: float


def costs(adam: str, repeats: int) -> tuple[float, dict[str, Cost]]:
    """Milliseconds of a plain step, and each kind's cost, of steps that alternate."""
    job = Job(adam, 8, 1024)
    job.step(0, CALM_NORM)
    job.set_gradients(1, CALM_NORM)
    job.optimizer.prepare_grads()
    rollbacks: dict[str, Rollback] = {kind: make_rollback(kind, job.optimizer) for kind in KINDS}
    times: dict[str, list[float]] = {}
    memory: dict[str, tuple[int, int]] = {}

    def timed(name: str, *parts: Callable[[], Any]) -> None:
        start = time.perf_counter()
        for part in parts:
            part()
        times.setdefault(name, []).append(time.perf_counter() - start)

    plain = job.optimizer.step_with_ready_grads
    for _ in range(repeats + 1):
        timed("plain", plain)
        timed("sliced", lambda: sliced_step(job))
        for kind, rollback in rollbacks.items():
            timed(f"{kind} ordinary", rollback.apply, rollback.commit)
            memory[kind] = rollback.kept_bytes, 0
            undo = lambda rollback=rollback: rollback.undo(publish=False)  # noqa: E731
            timed(f"{kind} failed", rollback.apply, undo, plain)
            memory[kind] = rollback.kept_bytes, rollback.scratch_bytes

    def ratio(name: str, reference: str) -> float:
        pairs = zip(times[name][1:], times[reference][1:], strict=True)
        return statistics.median(one / other for one, other in pairs)

    found = {
        kind: Cost(
            memory[kind][0] / job.elements,
            memory[kind][1],
            ratio(f"{kind} ordinary", "plain"),
            ratio(f"{kind} failed", "plain"),
            ratio(f"{kind} ordinary", "sliced"),
            ratio(f"{kind} failed", "sliced"),
        )
        for kind in rollbacks
    }
    return 1e3 * statistics.median(times["plain"][1:]), found


@torch.no_grad()
def sliced_step(job: Job) -> None:
    """A plain step by the slices of `deferred`, but in place; counters stay."""
    (member,) = job.optimizer.chained_optimizers
    inner = member.optimizer
    for batch in batches(list(main_parameters(member))):
        views, states = [], {}
        for piece in batch:
            tensor = piece.parameter.tensor
            view = piece.of(tensor.data)
            view.grad = piece.of(tensor.grad)
            states[view] = {
                key: piece.of(value) if is_elementwise(tensor, value) else value.clone()
                for key, value in inner.state[tensor].items()
            }
            views.append(view)
        group = {**inner.param_groups[batch[0].parameter.group], "params": views}
        with standing_in(inner, [group], states):
            inner.step()
        for piece, view in zip(batch, views, strict=True):
            piece.of(piece.parameter.in_model).copy_(view)
