"""What splitting costs: (B + W) / fused backward of one stage, on one CPU thread.

Fused and split passes alternate in one process on the same four Megatron layers inside Megatron's
DistributedDataParallel, so that both add into main_grad. The bar is 1.05 in both precisions.

    .venv/bin/python benchmarks/split_overhead.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable

from common import free_port, verdict

BAR = 1.05
HEADS, MICROBATCH = 8, 2
SIZES = {
    # (layers, hidden, sequence). Many CPUs compute bf16 by emulation, tens of times slower.
    "fp32": (4, 512, 256),
    "bf16": (2, 256, 128),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    os.environ |= {"ZERO_BUBBLE_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())

    import torch

    from megatron.zero_bubble.patches import cpu

    cpu.install()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    print(f"one stage, microbatch size {MICROBATCH}; medians of {repeats} alternating repeats, ms")
    print(
        f"{'precision':<10}{'layers':>7}{'hidden':>7}{'seq':>5}"
        f"{'F':>8}{'B':>8}{'W':>8}{'fused':>8}{'(B+W)/fused':>13}"
    )
    ratios = []
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        layers, hidden, sequence = SIZES[name]
        forward, b, w, fused, ratio = measure(dtype, SIZES[name], repeats)
        print(
            f"{name:<10}{layers:>7}{hidden:>7}{sequence:>5}"
            f"{forward:8.1f}{b:8.1f}{w:8.1f}{fused:8.1f}{ratio:13.3f}",
            flush=True,
        )
        ratios.append(ratio)
    torch.distributed.destroy_process_group()
    return verdict(max(ratios) <= BAR, f"(B+W)/fused at most {max(ratios):.3f}, bar {BAR}")


def measure(
    dtype, size: tuple[int, int, int], repeats: int
) -> tuple[float, float, float, float, float]:
    """Medians of F, B, W and fused backward in ms, and of the ratio of each repeat."""
    import torch

    from megatron.zero_bubble.runtime.layers import split_linears
    from megatron.zero_bubble.runtime.weight_grad import WeightGradStore

    layers, hidden, sequence = size
    model = build_stage(dtype, layers, hidden, sequence)
    store = WeightGradStore()
    split_linears([model], store)
    shape = (sequence, MICROBATCH, hidden)
    input = torch.randn(shape, dtype=dtype, requires_grad=True)
    gradient = torch.randn(shape, dtype=dtype)

    def forward() -> torch.Tensor:
        model.module.set_input_tensor([input])
        return model(None, None, None)

    columns: tuple[list[float], ...] = ([], [], [], [], [])
    for repeat in range(repeats + 2):
        output, _ = timed(forward)
        _, fused = timed(lambda output=output: output.backward(gradient))
        with store.deferred(True):
            output, f = timed(forward)
            with store.collecting(0, 0):
                _, b = timed(lambda output=output: output.backward(gradient))
        _, w = timed(lambda: store.run(0, 0))
        if repeat >= 2:  # the first ones warm up
            for column, value in zip(columns, (f, b, w, fused, (b + w) / fused), strict=True):
                column.append(value)
    f, b, w, fused, ratio = map(statistics.median, columns)
    return f, b, w, fused, ratio


def build_stage(dtype, layers: int, hidden: int, sequence: int):
    """A middle stage: layers only, no embedding and no loss."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=HEADS,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=256,
        max_sequence_length=sequence,
        pre_process=False,
        post_process=False,
    )
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp_config, model.to(dtype))


def timed(work: Callable):
    """(result, ms)."""
    begin = time.perf_counter()
    result = work()
    return result, (time.perf_counter() - begin) * 1e3


if __name__ == "__main__":
    sys.exit(main())
