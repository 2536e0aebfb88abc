"""How long messages take, and how far apart the stages' clocks are, over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_line_is_measured_both_ways_and_clocks_are_set_right() -> None:
    """Linear, V, interleaved and one stage; afterwards the channels work as before."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "ZERO_BUBBLE_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONWARNINGS": "ignore",
    }
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("messages_ranks.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
