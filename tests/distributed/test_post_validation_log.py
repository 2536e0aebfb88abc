"""What a post-validated run writes to TensorBoard: a synchronous run's values, and its counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.distributed.configs import Config
from tests.distributed.validated import FLAG

SCRIPT = Path(__file__).with_name("logging_rank.py")
ROOT = SCRIPT.parents[2]
CONFIG = Config(iterations=8, clip_grad=1.18)
COUNTS = "post-validation/"


def scalars(directory: Path, *flags: str) -> dict[str, list[float]]:
    """Names to the values written in order, by the last rank."""
    directory.mkdir()
    given = f"""--pipeline-schedule zb-h1 --tensorboard-dir {directory}/tensorboard
        --tensorboard-log-interval 1 --data-cache-path {directory}/cache""".split()
    command = [str(SCRIPT), str(directory / "written"), *CONFIG.flags(), *given, *flags]
    run_ranks(command, CONFIG.world_size, logs=directory, time_limit=150)
    written = json.loads((directory / f"written.{CONFIG.world_size - 1}").read_text())
    found: dict[str, list[float]] = {}
    for name, value in written["tensorboard"]:
        found.setdefault(name, []).append(value)
    return found


@pytest.mark.slow
def test_tensorboard_of_post_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    expected = scalars(tmp_path / "expected", "--canonical-grad-norm")
    actual = scalars(tmp_path / "actual", FLAG, "--post-validation-window", "0")
    counts = {
        name.removeprefix(COUNTS): actual.pop(name)
        for name in list(actual)
        if name.startswith(COUNTS)
    }
    assert {"grad-norm", "learning-rate", "lm loss", "loss-scale"} <= expected.keys()
    for found in (expected, actual):
        for name in [one for one in found if one.endswith("-time")]:
            del found[name]
    assert actual == expected
    # The first step, the one before an evaluation, and the last are synchronous.
    norms = expected["grad-norm"]
    assert len(norms) == CONFIG.iterations
    validated = [norm for index, norm in enumerate(norms) if index not in (0, 3, 7)]
    clipped = sum(norm > CONFIG.clip_grad for norm in validated)
    assert 0 < clipped < len(validated)
    assert {name: values[-1] for name, values in counts.items() if name != "rolled-back"} == {
        "synchronous": 3,
        "committed": len(validated) - clipped,
        "clipped": clipped,
        "skipped": 0,
        "mode-changes": 0,
    }
    assert 0 < counts["rolled-back"][-1] <= clipped
    for values in counts.values():
        assert values == sorted(values), "they only grow"
