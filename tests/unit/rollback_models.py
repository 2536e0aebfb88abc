"""Small models with Megatron's optimizers, for the tests of rollbacks.

To be imported in CPU mode only, by rollback_checks.py and rollback_rank.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizers
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

from megatron.zero_bubble.patches.cpu_torch import FusedAdam

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CLIP = 1.0
CALM, SPIKE = 3e-4, 3e-1  # of single gradients: their norm is below and above what is clipped
WIDE, NARROW = 131, 5  # the wide layer's weight is some slices of 4096 and a remainder


def _torch_adam(**implementation: bool) -> Callable[..., torch.optim.Optimizer]:
    """torch's Adam or AdamW, called as Megatron calls a fused Adam."""

    def build(
        params: Any, adam_w_mode: bool, capturable: bool, **settings: Any
    ) -> torch.optim.Optimizer:
        adam = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return adam(params, **settings, **implementation)

    return build


class _WritingAdam(FusedAdam):
    """Leaves something else in the gradients, as fused kernels may without decoupled decay."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(parameter, alpha=group["weight_decay"])


ADAMS: dict[str, Any] = {
    "adam": FusedAdam,  # CPU mode's own, with `step` in the group
    "writing": _WritingAdam,
    "torch": _torch_adam(foreach=False),
    "foreach": _torch_adam(foreach=True),
    "fused": _torch_adam(fused=True),
}
MOMENTUM = {"sgd": 0.0, "momentum": 0.9}


@contextmanager
def adam_class(name: str) -> Iterator[None]:
    """Let Megatron build another Adam."""
    kept = megatron_optimizers.Adam
    megatron_optimizers.Adam = ADAMS.get(name, kept)
    try:
        yield
    finally:
        megatron_optimizers.Adam = kept


class Net(torch.nn.Module):  # type: ignore[misc]
    """Three layers of different sizes, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(67, WIDE)
        self.wide = torch.nn.Linear(WIDE, WIDE)
        self.norm = torch.nn.LayerNorm(WIDE)
        self.last = torch.nn.Linear(WIDE, NARROW)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(torch.tanh(self.first(inputs))))
        normed = self.norm(hidden.to(self.norm.weight.dtype))
        return self.last(normed.to(inputs.dtype))


class Trainee:
    """Two chunks of a model and their optimizer; two of the same settings are alike in each bit.

    Args:
        precision: "bf16", "fp16" or "fp32".
        sharding: "plain", "distributed", or "overlap", the distributed optimizer whose gathers
            forwards start.
        inner: a name of ``ADAMS`` or ``MOMENTUM``.
        experts: whether the wide layers are experts', which get a sub-optimizer of their own.
        decoupled: AdamW rather than L2 regularization.
        mixed: whether the norms are in fp32 whatever the precision.
    """

    def __init__(
        self,
        precision: str,
        sharding: str,
        inner: str,
        *,
        experts: bool = False,
        decoupled: bool = True,
        mixed: bool = False,
    ) -> None:
        torch.manual_seed(5)
        self.dtype = DTYPES[precision]
        # Whether no parameter of the model is stepped itself.
        self.separate = precision != "fp32" and not mixed
        self.sharding = sharding
        halves = {"bf16": precision == "bf16", "fp16": precision == "fp16"}
        model_config = TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=1, **halves
        )
        sharded = sharding != "plain"
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=sharded,
            overlap_param_gather=sharding == "overlap",
            overlap_grad_reduce=sharding == "overlap",
            bucket_size=9000,
            grad_reduce_in_fp32=True,
        )
        self.chunks = []
        for _ in range(2):
            net = Net().to(self.dtype)
            if mixed:
                net.norm.float()
            for parameter in net.wide.parameters() if experts else ():
                parameter.allreduce = False
            self.chunks.append(DistributedDataParallel(model_config, ddp_config, net))
        config = OptimizerConfig(
            optimizer="sgd" if inner in MOMENTUM else "adam",
            sgd_momentum=MOMENTUM.get(inner, 0.9),
            lr=1e-2,
            weight_decay=0.1,
            decoupled_weight_decay=decoupled,
            clip_grad=CLIP,
            params_dtype=self.dtype,
            use_distributed_optimizer=sharded,
            overlap_param_gather=sharding == "overlap",
            initial_loss_scale=2.0**16,
            loss_scale_window=4,
            hysteresis=1,
            min_loss_scale=1.0,
            **halves,
        )
        with adam_class(inner):
            self.optimizer = get_megatron_optimizer(config, self.chunks)

    @property
    def members(self) -> list[Any]:
        return list(self.optimizer.chained_optimizers)

    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def set_gradients(self, iteration: int, size: float, *, infinite: bool = False) -> None:
        """Gradients as backward passes and their reduction leave them, on every rank the same."""
        generator = torch.Generator().manual_seed(iteration)
        scale = self.optimizer.get_loss_scale().item()
        for parameter in self.parameters():
            gradient = torch.randn(parameter.shape, generator=generator) * size
            if infinite and parameter.numel() == NARROW:
                gradient[1] = float("inf")
            parameter.main_grad.copy_(gradient * scale)
        for chunk in self.chunks if self.sharding == "overlap" else ():
            for buckets in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                buckets.param_gather_dispatched = False  # as the end of the reduction does

    def set_learning_rate(self, iteration: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - iteration / 100)

    def forward(self, *, interrupted: bool = False) -> torch.Tensor:
        """A forward of each chunk, which gathers parameters where it has to; the sum.

        Args:
            interrupted: only of the first layers, which leave gathers for others in flight.
        """
        inputs = torch.ones(3, 67, dtype=self.dtype)
        if interrupted:
            return torch.stack([chunk.module.first(inputs).sum() for chunk in self.chunks]).sum()
        return torch.stack([chunk(inputs).float().sum() for chunk in self.chunks]).sum()

    def end_iteration(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def everything(self) -> dict[str, torch.Tensor]:
        """A copy of all that a step may change, by name; names begin with what it is."""
        found = {
            f"model {index}": parameter.data for index, parameter in enumerate(self.parameters())
        }
        for number, member in enumerate(self.members):
            inner = member.optimizer
            for index, group in enumerate(inner.param_groups):
                at = f"{number}.{index}"
                for key, value in group.items():
                    if key != "params" and isinstance(value, int | float | torch.Tensor):
                        found[f"group {at} {key}"] = torch.as_tensor(value)
                for place, parameter in enumerate(group["params"]):
                    found[f"main {at}.{place}"] = parameter.data
                    if parameter.grad is not None:
                        found[f"gradient {at}.{place}"] = parameter.grad
                    for key, value in inner.state.get(parameter, {}).items():
                        if value is not None:
                            found[f"state {at}.{place} {key}"] = torch.as_tensor(value)
        found["loss scale"] = self.optimizer.get_loss_scale()
        return {name: value.detach().clone() for name, value in found.items()}


def differences(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], *kinds: str
) -> list[str]:
    """Names of what is there in one only, or not the same in every bit.

    Args:
        kinds: compare only names that begin with one of these words; all without.
    """
    names = sorted(ours.keys() | theirs.keys())
    return [
        name
        for name in names
        if (not kinds or name.split()[0] in kinds)
        and not (name in ours and name in theirs and _same_bits(ours[name], theirs[name]))
    ]


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.itemsize]
    return bool(torch.equal(one.contiguous().view(integers), other.contiguous().view(integers)))
