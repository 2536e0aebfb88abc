"""The forward_backward function's contract, beside Megatron's own on one model and one batch.

Losses, gradients, deallocated outputs, loss scaling, forward only, other data than losses: what the
training loop of CPU mode does not vary by flags.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.distributed.configs import Config

RANK = Path(__file__).with_name("side_by_side_rank.py")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_side_by_side(tied: bool, tmp_path: Path) -> None:
    config = Config(tied=tied)
    flags = ("--pipeline-schedule", "1f1b", "--rerun-mode", "disabled")
    command = [str(RANK), *config.flags(), *flags]
    run_ranks(command, config.world_size, logs=tmp_path, time_limit=240)
    for rank in range(config.world_size):
        assert "side by side: equal" in (tmp_path / f"rank{rank}.log").read_text()
