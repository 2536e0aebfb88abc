"""The batch scripts under a stand-in for Slurm: directives, signals, and what goes back into the
queue."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.fake_slurm import install
from tests.unit.test_examples import BATCH, ROOT, SCRIPTS, TOY

KNOWN = {
    "job-name", "nodes", "gpus-per-node", "ntasks-per-node", "cpus-per-task", "exclusive", "mem",
    "time", "output", "open-mode", "signal", "requeue",
}  # fmt: skip
"""Options of sbatch, from its manual."""


@pytest.mark.parametrize("name", BATCH)
def test_directives(name: str) -> None:
    lines = (SCRIPTS / name).read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:]), (
        "Slurm stops reading there"
    )
    options = {}
    for line in lines[:first]:
        if line.startswith("#SBATCH"):
            match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
            assert match is not None, line
            assert match[1] not in options
            options[match[1]] = match[2]
    assert options.keys() <= KNOWN
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert int(options["nodes"]) * int(options["gpus-per-node"]) == BATCH[name][1]
    assert "%j" in options["output"], "a log for each job"
    assert "/" not in options["output"], "Slurm makes no directories"
    assert options["open-mode"] == "append", "or a restart would overwrite its log"
    assert "requeue" in options
    to_shell = re.fullmatch(r"B:(\w+)@(\d+)", options["signal"])
    assert to_shell is not None
    assert f"' {to_shell[1]}\n" in (SCRIPTS / "slurm_job.sh").read_text(), "nobody traps it"
    assert int(to_shell[2]) >= 300, "seconds to save in"


class Job:
    """A batch script as Slurm would run it: a copy, elsewhere, with Slurm's programs on PATH."""

    def __init__(self, directory: Path, repository: Path, **environment: str) -> None:
        self.directory = directory
        directory.mkdir()
        self.script = directory / "slurm_script"
        shutil.copy(SCRIPTS / "slurm_one_node.sh", self.script)
        self.environment = (
            install(directory)
            | {"SLURM_SUBMIT_DIR": str(repository), "SAVE": str(directory / "checkpoints")}
            | environment
        )
        self.log = directory / "log"

    def start(self, *words: str, **environment: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [self.script, *words],
                env=self.environment | environment,
                cwd=self.directory,
                stdout=log,
                stderr=log,
            )

    def wait_for(self, text: str, process: subprocess.Popen[bytes], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while text not in self.log.read_text():
            assert process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < end, f"no {text!r} in {seconds} s"
            time.sleep(0.05)

    @property
    def requeued(self) -> list[str]:
        path = self.directory / "requeued"
        return path.read_text().split() if path.exists() else []


TINY = """#!/usr/bin/env bash
stop() {
    echo "$SLURM_PROCID saved to $SAVE"
    [[ -z ${3:-} ]] || echo 263 >"$SAVE/latest_checkpointed_iteration.txt"
    exit "${2:-0}"
}
trap 'stop "$@"' TERM
echo "$SLURM_PROCID of $SLURM_STEP_NUM_TASKS at $MASTER_ADDR:$MASTER_PORT, $EXIT_SIGNAL_HANDLER, $*"
[[ $1 == train ]] || exit "$1"
for ((i = 0; i < 600; i++)); do sleep 0.1; done
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Job:
    """A job of a model that only waits for its signal."""
    repository = tmp_path / "repository"
    shutil.copytree(SCRIPTS, repository / "examples" / "gpt3")
    model = repository / "examples" / "gpt3" / "tiny.sh"
    model.write_text(TINY)
    model.chmod(0o755)
    return Job(tmp_path / "job", repository, MODEL="tiny")


def test_before_its_time_is_over_a_job_saves_and_goes_back_into_the_queue(tiny: Job) -> None:
    job = tiny.start("train")
    for rank in "01":
        tiny.wait_for(f"{rank} of 2 at localhost:24711, 1, train", job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0
    log = tiny.log.read_text()
    assert f"0 saved to {tiny.directory}/checkpoints" in log
    assert f"1 saved to {tiny.directory}/checkpoints" in log
    assert tiny.requeued == ["4711"]


def test_a_job_that_ends_does_not_go_back_into_the_queue(tiny: Job) -> None:
    assert tiny.start("0").wait(60) == 0
    assert tiny.start("3").wait(60) == 3
    # As of a rank that was killed by the signal which this shell gets.
    assert tiny.start("138").wait(60) == 138
    assert tiny.requeued == []


@pytest.mark.parametrize(("saves", "requeued"), [("", []), ("saves", ["4711"])])
def test_a_job_that_fails_after_its_signal_goes_on_only_from_a_new_checkpoint(
    tiny: Job, saves: str, requeued: list[str]
) -> None:
    latest = tiny.directory / "checkpoints" / "latest_checkpointed_iteration.txt"
    latest.parent.mkdir()
    latest.write_text("200")
    job = tiny.start("train", "5", saves)
    for rank in "01":
        tiny.wait_for(f"{rank} of 2", job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == (0 if saves else 5)
    assert tiny.requeued == requeued
    assert ("have saved nothing since they were told to" in tiny.log.read_text()) == (not saves)


def test_a_job_goes_back_into_the_queue_so_many_times(tiny: Job) -> None:
    job = tiny.start("train", SLURM_RESTART_COUNT="2", MAX_REQUEUES="2")
    tiny.wait_for("1 of 2", job)
    tiny.wait_for("0 of 2", job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == 0
    assert "MAX_REQUEUES=2 is reached" in tiny.log.read_text()
    assert tiny.requeued == []


@pytest.mark.slow
def test_a_real_run_goes_on_after_its_signal(tmp_path: Path) -> None:
    """The script of a model, two CPU ranks: signal, checkpoint, and the second part of the job."""
    job = Job(tmp_path / "job", ROOT, MODEL="1.5b", **TOY, HOME=str(tmp_path))
    first = job.start(TRAIN_ITERS="100000")
    job.wait_for("iteration        3/", first, seconds=240)
    first.send_signal(signal.SIGUSR1)
    assert first.wait(120) == 0, job.log.read_text()[-3000:]
    assert job.requeued == ["4711"]
    saved = int((tmp_path / "job/checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert saved >= 3
    second = job.start(TRAIN_ITERS=str(saved + 2), SLURM_RESTART_COUNT="1")
    assert second.wait(240) == 0, job.log.read_text()[-3000:]
    after = job.log.read_text().split("back into the queue")[1]
    assert f"at iteration {saved}" in after
    assert re.search(rf"iteration +{saved + 1}/", after)
    assert not re.search(rf"iteration +{saved}/", after)
    assert job.requeued == ["4711"]
