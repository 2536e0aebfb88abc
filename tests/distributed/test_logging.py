"""Megatron's log, timers, TensorBoard and wandb are where they always are: on the last rank."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.distributed.configs import Config

SCRIPT = Path(__file__).with_name("logging_rank.py")
ROOT = SCRIPT.parents[2]
ITERATION = re.compile(r"iteration +\d+/ +\d+ .* lm loss: (\S+) ")
VALIDATION = re.compile(r"validation loss at iteration \d+ \| lm loss value: (\S+) ")
TIMERS = re.compile(r"^ +forward-backward \.+: \(", re.MULTILINE)


@pytest.mark.parametrize("schedule", ["zb-v", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_the_last_rank_logs(schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = Config(iterations=3)
    record = tmp_path / "written"
    flags = f"""--pipeline-schedule {schedule} --tensorboard-dir {tmp_path}/tensorboard
        --tensorboard-log-interval 1 --log-timers-to-tensorboard --timing-log-level 1
        --wandb-project project --wandb-exp-name name --wandb-save-dir {tmp_path}/wandb
        --data-cache-path {tmp_path}/cache""".split()
    command = [str(SCRIPT), str(record), *config.flags(), *flags]
    run_ranks(command, config.world_size, logs=tmp_path, time_limit=150)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(config.world_size)]
    for sign in (ITERATION, VALIDATION, TIMERS):
        assert [bool(sign.search(log)) for log in logs] == [False, True], sign.pattern
    assert not Path(f"{record}.0").exists()
    written = json.loads(Path(f"{record}.1").read_text())
    losses = [float(one) for one in ITERATION.findall(logs[-1])]
    assert len(losses) == config.iterations
    for writer in ("tensorboard", "wandb"):
        given = [value for name, value in written[writer] if name == "lm loss"]
        # In the log, the second line after any start is the mean of two iterations.
        assert [given[0], given[2]] == pytest.approx([losses[0], losses[2]], rel=1e-5), writer
    names = {name for name, _ in written["tensorboard"]}
    assert {"grad-norm", "forward-backward-time", "lm loss validation"} <= names
