"""A rank of two that share each layer: split linears against Megatron's own on the same ranks."""

import itertools

from megatron.zero_bubble.patches import cpu


def main() -> None:
    """Raises AssertionError at the first difference."""
    cpu.install()
    import torch
    from megatron.core import parallel_state

    from tests.unit.filling_checks import filled
    from tests.unit.split_linear_checks import compare

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    for kind, dtype, sequence_parallel in itertools.product(
        ("column", "row"), ("fp32", "bf16"), (False, True)
    ):
        compare(kind, dtype=dtype, sequence_parallel=sequence_parallel)
        print(f"same: {kind} {dtype} sequence_parallel={sequence_parallel}", flush=True)
    for dtype, sequence_parallel in itertools.product(("fp32", "bf16"), (False, True)):
        filled(dtype, sequence_parallel=sequence_parallel)
        print(f"filled: {dtype} sequence_parallel={sequence_parallel}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
