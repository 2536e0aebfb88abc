"""A rank that trains layers of Transformer Engine on a CPU, as far as that goes without kernels.

    engine_rank.py FILE [flags of pretrain_gpt.py]

CPU mode as it is, but for Transformer Engine, which is there: the stand-in of tests/unit, or with
the variable that it reads the real Python over a stand-in for what is compiled. Attention is
Megatron's local one, and norms of gradients are taken by Megatron's local functions, since those of
Transformer Engine are kernels. Weights start from draws by their names in the model, so that every
placement trains the same model. Each rank leaves FILE.RANK, a JSON object: losses and gradient
norms of all steps, a digest of each parameter after the last one, and how many layers delay.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]


def enter_cpu_mode() -> None:
    """Before Megatron is imported."""
    os.environ["ZERO_BUBBLE_DEVICE"] = "cpu"
    from megatron.zero_bubble.patches import cpu
    from tests.unit import stand_in_te

    stand_in_te.install()
    del cpu.ARGUMENTS["transformer_impl"]
    del cpu.ARGUMENTS["use_cpu_initialization"]  # replaces biases, on which delaying rests
    del cpu.ALLOWED["moe_grouped_gemm"]
    with mock.patch.object(cpu, "_block_cuda_packages"):
        cpu.install()


def take_local_functions() -> None:
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine_spec_provider as provider
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    provider.TEDotProductAttention = DotProductAttention
    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = utils.local_multi_tensor_applier
        module.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    clip_grads.l2_norm_impl = utils.local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_tensor_impl = None


class Steps:
    """Takes the place of train_step, and sees what it gives."""

    def __init__(self) -> None:
        from megatron.training import training

        self.train_step = training.train_step
        self.losses: list[float] = []
        self.norms: list[float] = []
        training.train_step = self

    def __call__(self, *given: Any, **options: Any) -> Any:
        from tools.profile.one_gpu.start import Start

        self.models = given[2]
        if not self.norms:
            Start(self.models, given[3]).restore()
        result = self.train_step(*given, **options)
        self.losses += [float(result[0]["lm loss"])] if result[0] else []
        self.norms.append(float(result[5]))
        return result

    def report(self) -> dict[str, Any]:
        from megatron.zero_bubble.runtime.delayed_layers import delays
        from tools.profile.one_gpu.start import digests

        layers = [layer for model in self.models for layer in model.modules()]
        return {
            "losses": self.losses,
            "norms": self.norms,
            "digests": digests(self.models),
            "delaying": sum(map(delays, layers)),
        }


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    file = sys.argv.pop(1)
    enter_cpu_mode()
    import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

    # isort: split
    import pretrain_gpt

    take_local_functions()
    steps = Steps()
    pretrain_gpt.main()
    Path(f"{file}.{os.environ['RANK']}").write_text(json.dumps(steps.report()))
