"""What all tests here need: a GPU, and MPS that shares it out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tools.profile.one_gpu.device import CONTROL, Unavailable, mps, require_device
from tools.profile.one_gpu.device import shared_environment as environment_of

RANKS_SECONDS = 180.0


@pytest.fixture(scope="session")
def multiprocessors() -> int:
    """Of the GPU; without one, or without MPS, the test is skipped."""
    if shutil.which(CONTROL) is None:
        pytest.skip(f"no {CONTROL} on PATH")
    try:
        return require_device()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def on_one_gpu(multiprocessors: int, tmp_path: Path) -> Callable[..., list[str]]:
    """``on_one_gpu(script, *words, ranks=2)``: what each rank printed, all sharing the GPU."""

    def run(script: str, *words: str, ranks: int = 2) -> list[str]:
        with mps() as clients:
            run_ranks(
                [str(Path(__file__).with_name(script)), *words],
                ranks,
                logs=tmp_path / "logs",
                time_limit=RANKS_SECONDS,
                environment=environment_of("cuda", ranks, clients),
            )
        return [(tmp_path / "logs" / f"rank{rank}.log").read_text() for rank in range(ranks)]

    return run
