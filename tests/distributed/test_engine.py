"""Layers of Transformer Engine in whole training runs: B now and W later, to the bits of 1F1B.

The package is a stand-in, or its real Python over a stand-in for its kernels
(tools/test_transformer_engine.py); `engine_rank` says what else is not as on a GPU.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.distributed.configs import Config
from tests.unit.stand_in_te import REAL
from zero_bubble.builders import BUILDERS

RANK = Path(__file__).with_name("engine_rank.py")
ENGINE = (
    *("--transformer-impl", "transformer_engine", "--attention-backend", "unfused"),
    *("--no-gradient-accumulation-fusion", "--no-rope-fusion"),
)
REPLACES_BIASES = "--use-cpu-initialization"
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-grouped-gemm"),
    *("--moe-token-dispatcher-type", "alltoall", "--swiglu", "--disable-bias-linear"),
)
FULL = (
    *("--recompute-granularity", "full"),
    *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
)
SHARDED = {"dp": 2, "distributed_optimizer": True, "precision": "bf16"}
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
LAYERS = 4
LINEARS = 4 * LAYERS
"""Without that of the output layer, which is Megatron's local one."""


def trained(config: Config, directory: Path, *flags: str) -> list[dict[str, Any]]:
    """What each rank reported."""
    directory.mkdir()
    given = [one for one in config.flags() if one != REPLACES_BIASES]
    command = [str(RANK), str(directory / "report"), *given, *ENGINE, *flags]
    command += ["--data-cache-path", str(directory / "cache")]
    run_ranks(command, config.world_size, logs=directory, time_limit=240)
    files = [directory / f"report.{rank}" for rank in range(config.world_size)]
    return [json.loads(one.read_text()) for one in files]


CASES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    ("zb-h1", SHARDED, OVERLAP),
    ("zb-h1", {}, ()),
    ("zb-h2", {"precision": "bf16"}, ()),
    ("zb-v", {}, ()),
    ("zb-interleaved", {}, ()),
    ("zb-h1", {}, EXPERTS),
    ("zb-v", {"precision": "bf16"}, EXPERTS),
    ("zb-h1", {}, FULL),
    ("zb-h1", {}, (*FULL, "--zero-bubble-recompute", "in-backward")),
    ("zb-h1", {"tp": 2}, ("--sequence-parallel",)),
    ("1f1b", {}, ()),
]


@pytest.mark.parametrize(
    ("schedule", "changes", "flags"),
    [CASES[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in CASES[1:])],
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one)),
)
def test_bits_are_those_of_megatrons_1f1b(
    schedule: str, changes: dict[str, Any], flags: tuple[str, ...], tmp_path: Path
) -> None:
    if changes.get("tp", 1) > 1 and REAL not in os.environ:
        pytest.skip("the stand-in has no tensor parallelism; tools/test_transformer_engine.py has")
    # Its norm is added up by rank, which other placements have others of: it must not clip.
    config = Config(iterations=4, layers=LAYERS, clip_grad=1e6, **changes)
    splits = schedule != "1f1b"
    common = tuple(one for one in flags if "zero-bubble" not in one and one != "in-backward")
    theirs = trained(config, tmp_path / "megatron", *common)
    ours = trained(config, tmp_path / "ours", *flags, "--pipeline-schedule", schedule)
    assert [rank["losses"] for rank in ours if rank["losses"]] == [
        rank["losses"] for rank in theirs if rank["losses"]
    ]
    if len(BUILDERS[schedule].placement(config.pp).positions[0]) == 1:
        assert [rank["norms"] for rank in ours] == [rank["norms"] for rank in theirs]
    assert _model(ours) == _model(theirs)
    assert [rank["delaying"] for rank in theirs] == [0] * config.world_size
    replicas = config.world_size // config.pp
    assert sum(rank["delaying"] for rank in ours) == splits * LINEARS * replicas
    if splits:
        logs = [path.read_text() for path in sorted((tmp_path / "ours").glob("rank*.log"))]
        split = [int(one) for log in logs for one in re.findall(r"(\d+) linear layers give B", log)]
        assert sum(split) == (LINEARS + 1) * replicas


def _model(ranks: list[dict[str, Any]]) -> dict[str, set[int]]:
    """Digests of each parameter by its name; tensor-parallel ranks have parts of it."""
    found: dict[str, set[int]] = {}
    for rank in ranks:
        for name, digest in rank["digests"].items():
            found.setdefault(name, set()).add(digest)
    return found
