"""A rank that hangs, dies or fails takes the job down, and each log says what happened there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.zero_bubble import local_job
from megatron.zero_bubble.local_job import JobFailed, run_ranks
from tests.distributed.configs import Config
from tests.distributed.faulty_rank import MESSAGE, MICROBATCH

WAIT_LIMIT = 5
MANY_ITERATIONS = 100_000  # only the fault can end these jobs
TIME_LIMIT = 120.0
SCRIPT = Path(__file__).with_name("faulty_rank.py")
ROOT = SCRIPT.parents[2]

# What the interpreter says about a stage that waits for another.
COMPLAINT = re.compile(
    r"PipelineError: stage (?P<stage>\d+), (?:pass (?P<what>\d[FIWB]\d+) "
    r"\((?:F|B|W) of microbatch \d+, chunk 0\)|instruction \d(?:SEND|RECV)_[FB]\d+): "
    r"(?P<why>waited 5 s \(the limit\) on|lost the connection of) "
    r"channel (?P<channel>[FB]:\d->\d), whose other end is stage (?P<peer>\d+) "
    r"\(rank (?P<rank>\d+)\): that stage(?:'s process ended| is stuck); look at its own output"
)


@dataclass(frozen=True)
class Ended:
    """A job that failed: what `run_ranks` raised, and the ranks' logs."""

    failure: JobFailed
    logs: tuple[str, ...]

    def complaint(self, stage: int) -> re.Match[str]:
        """The last thing in the log of a stage that lost another one."""
        found = list(COMPLAINT.finditer(self.logs[stage]))
        assert found, self.logs[stage][-3000:]
        assert found[-1]["stage"] == str(stage)
        return found[-1]


def run_with(
    what: str, stage: int, stages: int, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> Ended:
    """Train under ZB-H1 until the fault; fails if the job does not end by itself."""
    # Those that wait for a stopped rank all notice at about the same time.
    monkeypatch.setattr(local_job, "GRACE_SECONDS", float(WAIT_LIMIT))
    config = Config(pp=stages, layers=stages, microbatches=4, iterations=MANY_ITERATIONS)
    command = [str(SCRIPT), what, str(stage), *config.flags()]
    command += ["--data-cache-path", str(logs / "cache"), "--eval-iters", "0"]
    command += ["--pipeline-schedule", "zb-h1", "--zero-bubble-wait-limit", str(WAIT_LIMIT)]
    with pytest.raises(JobFailed) as caught:
        run_ranks(
            command,
            stages,
            logs=logs,
            time_limit=TIME_LIMIT,
            environment={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        )
    texts = tuple((logs / f"rank{rank}.log").read_text() for rank in range(stages))
    for rank, text in enumerate(texts):
        # By then every stage has trained, so that it failed in the middle of training.
        assert "after 2 iterations" in text, f"rank {rank}: {text[-3000:]}"
        assert (f"faulty_rank: {what}" in text) == (rank == stage)
    return Ended(caught.value, texts)


def test_a_stopped_process_is_noticed_within_the_wait_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_with("stop", 1, 3, tmp_path, monkeypatch)
    # Not the job's own time limit, and not the stopped rank, which says nothing.
    assert ended.failure.reason == "ended with code 1"
    assert ended.failure.rank != 1
    for stage in (0, 2):
        complaint = ended.complaint(stage)
        assert complaint["why"] == f"waited {WAIT_LIMIT} s (the limit) on"
        assert (complaint["peer"], complaint["rank"]) == ("1", "1")
    assert ended.complaint(0)["channel"] in ("B:1->0", "F:0->1")
    assert (ended.complaint(2)["channel"], ended.complaint(2)["what"]) == ("F:1->2", "0F1")


def test_a_killed_process_is_named_as_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_with("kill", 1, 2, tmp_path, monkeypatch)
    assert (ended.failure.rank, ended.failure.reason) == (1, "ended with code -9")
    complaint = ended.complaint(0)
    assert complaint["why"] == "lost the connection of"
    assert complaint["peer"] == "1"


@pytest.mark.parametrize(("what", "kind", "stage"), [("forward", "F", 0), ("weight", "W", 1)])
def test_an_exception_in_a_pass_is_in_its_own_log_with_the_pass(
    what: str, kind: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = run_with(what, stage, 2, tmp_path, monkeypatch)
    assert (ended.failure.rank, ended.failure.reason) == (stage, "ended with code 1")
    own = (
        f"ArithmeticError: {MESSAGE}\n"
        f"[rank{stage}]: zero-bubble: raised on stage {stage}, pass 0{kind}{MICROBATCH} "
        f"({kind} of microbatch {MICROBATCH}, chunk 0)"
    )
    assert own in ended.logs[stage]
    assert MESSAGE in str(ended.failure)
    assert "PipelineError" not in ended.logs[stage]
    complaint = ended.complaint(1 - stage)
    assert complaint["why"] == "lost the connection of"
    assert complaint["peer"] == str(stage)
