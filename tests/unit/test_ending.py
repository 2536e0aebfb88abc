"""How a process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RANK = Path(__file__).with_name("ending_rank.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's idle scheduling")
def test_a_process_ends_well_however_late_gloo_s_threads_are(tmp_path: Path) -> None:
    for attempt in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(RANK), str(tmp_path / f"store{attempt}")],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
