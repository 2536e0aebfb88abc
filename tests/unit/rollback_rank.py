"""A rank of two that share an optimizer: each steps a shard, and gathers the other's."""

import logging

from megatron.zero_bubble.patches import cpu

EVENTS = ("plain", "ok", "clip", "skip", "interrupted", "ok")  # see rollback_checks.py
CASES = (
    ("deferred", "distributed", "bf16"),
    ("sliced", "distributed", "fp32"),
    ("sliced", "overlap", "bf16"),
    ("deferred", "overlap", "fp32"),
    ("snapshot", "distributed", "fp32"),
    ("snapshot", "overlap", "bf16"),
)


def main() -> None:
    """Raises AssertionError at the first difference, or where a broken package shows none."""
    cpu.install()
    logging.disable(logging.WARNING)
    import torch
    from megatron.core import parallel_state

    from tests.unit.rollback_checks import check_as_a_plain_step, found_wrong_with

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    for kind, sharding, precision in CASES:
        settings = {"precision": precision, "sharding": sharding, "inner": "adam"}
        check_as_a_plain_step(kind, EVENTS, **settings)
        print(f"same: {kind} {sharding} {precision}", flush=True)
    for kind, sharding, sabotage in (
        ("deferred", "overlap", "gathers are not forgotten"),
        ("snapshot", "distributed", "nothing is gathered"),
    ):
        settings = {"precision": "bf16", "sharding": sharding, "inner": "adam"}
        assert found_wrong_with(sabotage, kind, EVENTS, **settings), sabotage
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
