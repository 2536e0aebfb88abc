"""CPU mode's stand-in for attention over parts of a sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_ranks_attend_as_one(tmp_path: Path) -> None:
    run_ranks(
        [str(Path(__file__).with_name("context_parallel_rank.py"))],
        2,
        logs=tmp_path,
        time_limit=120,
        environment={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )
    for rank in range(2):
        said = (tmp_path / f"rank{rank}.log").read_text()
        assert said.count("same: ") == 4
