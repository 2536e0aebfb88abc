"""Messages that nobody wants any more, and those that come after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_fresh_messages_are_told_from_stale_ones_and_rows_reach_all_stages(tmp_path: Path) -> None:
    run_ranks(
        [str(Path(__file__).with_name("tentative_rank.py"))],
        3,
        logs=tmp_path,
        time_limit=200,
        environment={"PYTHONPATH": str(ROOT)},
    )
