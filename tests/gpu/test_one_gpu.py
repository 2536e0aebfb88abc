"""Ranks that share one GPU: NCCL between them, bits, memory, and the tool that measures them.

    PYTHONPATH=. python -m pytest tests/gpu

Skipped without a GPU and MPS.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.profile.one_gpu.plan import ENGINE
from tools.profile.one_gpu.report import MEMORY_TOLERANCE
from tools.profile.one_gpu_pipeline import main

pytestmark = pytest.mark.gpu

MODEL = "--layers 4 --hidden 1024 --heads 8 --sequence 512 --microbatches 4 --rounds 2"
"""A microbatch keeps some tens of MiB on a stage, beside which nothing else counts."""


def test_messages_over_nccl_between_ranks_of_one_gpu(
    on_one_gpu: Callable[..., list[str]],
) -> None:
    logs = on_one_gpu("transport_rank.py", "5", ranks=3)
    # Stages at the ends have one neighbour, the one between them two.
    for log, messages in zip(logs, (5, 10, 5), strict=True):
        assert f"{messages} messages came" in log


@pytest.mark.skipif(importlib.util.find_spec(ENGINE) is None, reason="no Transformer Engine")
@pytest.mark.usefixtures("multiprocessors")
def test_with_layers_of_transformer_engine_the_bits_and_memory_are_as_well(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    words = f"--ranks 2 {MODEL} --schedules zb-h1 --transformer-impl {ENGINE} --json {file}"
    assert main(words.split()) == 0
    rows = json.loads(file.read_text())["schedules"]
    assert [one["schedule"] for one in rows] == ["megatron", "1f1b", "zb-h1", "zb-h1"]
    assert [one["different"] for one in rows] == [None] * 4


@pytest.fixture(scope="module")
def figures(
    multiprocessors: int, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, dict[str, dict[str, Any]]]:
    """The tool's exit code, and its rows by schedule, at a small size on two ranks."""
    file = tmp_path_factory.mktemp("one_gpu") / "figures.json"
    words = f"--ranks 2 {MODEL} --schedules zb-h1 --post-validation off,on --json {file}"
    code = main(words.split())
    rows = json.loads(Path(file).read_text())["schedules"] if file.exists() else []
    return code, {f"{one['schedule']}{'+' * one['validates']}": one for one in rows}


def test_the_tool_meets_its_bars(figures: tuple[int, dict[str, Any]]) -> None:
    code, rows = figures
    assert code == 0
    assert list(rows) == ["megatron", "1f1b", "zb-h1", "zb-h1+"]
    assert all(one["iteration_ms"] > 0 and one["allocated"] > 0 for one in rows.values())


@pytest.mark.parametrize("schedule", ["megatron", "1f1b", "zb-h1", "zb-h1+"])
def test_bits_are_those_of_megatrons_1f1b(
    schedule: str, figures: tuple[int, dict[str, Any]]
) -> None:
    assert figures[1][schedule]["different"] is None


@pytest.mark.parametrize("schedule", ["megatron", "1f1b", "zb-h1"])
def test_each_stage_keeps_what_is_predicted(
    schedule: str, figures: tuple[int, dict[str, Any]]
) -> None:
    row = figures[1][schedule]
    assert row["memory"] == pytest.approx(row["predicted_memory"], rel=MEMORY_TOLERANCE)
