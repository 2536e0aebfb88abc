"""What test_compat.py asks of Megatron, in a process in CPU mode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import global_vars

from megatron.zero_bubble import compat
from tests.unit.megatron_checks import _validated

LOCAL = (
    *("--transformer-impl", "local", "--use-cpu-initialization", "--vocab-size", "63"),
    *("--no-gradient-accumulation-fusion", "--no-persist-layer-norm", "--no-masked-softmax-fusion"),
    *("--distributed-backend", "gloo", "--attention-backend", "unfused", "--no-rope-fusion"),
    *("--tokenizer-type", "NullTokenizer", "--train-iters", "1", "--lr", "0.1"),
)


def both_builders(flags: list[str]) -> tuple[str, str]:
    """The model as the builder for older versions makes it, and as Megatron's own does."""
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    args = _validated([*LOCAL, *flags])
    args.padded_vocab_size = 64
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        older = compat._build_gpt(pg_collection=groups)
        own = GPTModelBuilder(gpt_config_from_args(args)).build_model(groups, True, True)
    return _described(older), _described(own)


def _described(model: torch.nn.Module) -> str:
    shapes = [(name, tuple(one.shape)) for name, one in model.named_parameters()]
    settings = {key: str(value) for key, value in vars(model).items() if isinstance(value, bool)}
    return f"{model}\n{shapes}\n{settings}"


def statistics_in_dictionaries() -> dict[str, Any]:
    """Sums of two kinds of statistics, kept as before 0.18."""

    def entry(value: float, group: str) -> dict[str, Any]:
        return {"values": torch.full((2,), value), "reduce_group": group, "avg_group": None}

    more = {"known": entry(3.0, "yours"), "new": entry(1.0, "mine")}
    with mock.patch.object(compat, "_moe_logging", return_value=None):
        statistics = compat.new_moe_statistics()
        statistics["known"] = entry(1.0, "mine")
        compat.add_moe_statistics(statistics, more)
    return {
        "sums": {name: one["values"].tolist() for name, one in statistics.items()},
        "groups": {name: one["reduce_group"] for name, one in statistics.items()},
        "added": more["known"]["values"].tolist(),
    }


def gradients(**functions: list[float]) -> list[float]:
    """Of a sub-optimizer with these functions, by what they give."""
    given: dict[str, Callable[[], list[float]]] = {
        name: lambda values=values: values  # type: ignore[misc]
        for name, values in functions.items()
    }
    return compat.gradients_for_norm(SimpleNamespace(**given))


def microbatch_sizes() -> tuple[int, int]:
    """Of an evaluation: with a flag of its own, and without."""
    newer = SimpleNamespace(micro_batch_size=2, eval_micro_batch_size=5)
    older = SimpleNamespace(micro_batch_size=2)
    return tuple(map(compat.evaluation_microbatch_size, (newer, older)))  # type: ignore[arg-type, return-value]
