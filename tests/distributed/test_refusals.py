"""Mistakes that only a started process can notice end it with one line, not with a hang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.zero_bubble.local_job import JobFailed, run_ranks
from tests.distributed.configs import Config

ROOT = Path(__file__).resolve().parents[2]


def complaint(logs: Path, *flags: str) -> str:
    """What pretrain_gpt.py, which must fail, says on rank 0."""
    config = Config()
    own = [flag for flag in config.flags() if flag != "--mock-data"]
    command = [str(ROOT / "pretrain_gpt.py"), *own, "--pipeline-schedule", "zb-h1", *flags]
    with pytest.raises(JobFailed, match="ended with code 2"):
        run_ranks(command, config.world_size, logs=logs, time_limit=120)
    said = [
        line
        for line in (logs / "rank0.log").read_text().splitlines()
        if line.startswith("zero-bubble: error: ")
    ]
    assert len(said) == 1
    return said[0].removeprefix("zero-bubble: error: ")


def test_a_split_without_documents(tmp_path: Path) -> None:
    """Megatron alone would look for samples for ever."""
    from tools.prepare_text import write_dataset

    write_dataset(iter([b"one document", b"another"]), tmp_path / "few", overwrite=False)
    assert np.fromfile(tmp_path / "few.bin", dtype=np.uint16).size > 0
    message = complaint(tmp_path, "--data-path", str(tmp_path / "few"))
    assert message.startswith("--split 90,5,5 leaves no document of the 2 in ")
    assert "for validation" in message


def test_data_that_is_not_there(tmp_path: Path) -> None:
    message = complaint(tmp_path, "--data-path", str(tmp_path / "none"))
    assert f"--data-path {tmp_path / 'none'}: there is no file {tmp_path / 'none'}.idx" in message


def test_an_adaptor_that_comes_too_late_for_cpu_mode() -> None:
    script = "import megatron.core, megatron.zero_bubble.adaptor"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ZERO_BUBBLE_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert (
        "zero-bubble: error: megatron.core was imported before megatron.zero_bubble.adaptor"
        in ended.stderr
    )
