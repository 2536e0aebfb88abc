"""Run the ranks of a small job on this machine: what torchrun does, in half the start-up time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.zero_bubble.signals import held_back, stopping_once

__all__ = ["JobFailed", "run_ranks"]

POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0  # for the others to end by themselves once one rank has failed
# What a rank says that lost, or waited in vain for, another one.
CONSEQUENCES = ("PipelineError", "Connection closed by peer", "Connection reset by peer")


@dataclass(eq=False)
class JobFailed(RuntimeError):
    """A rank ended with an error, or the job took too long."""

    rank: int
    reason: str
    log: Path

    def __str__(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-25:]
        return "\n".join([f"rank {self.rank} {self.reason}; its log {self.log} ends:", *lines])


def run_ranks(
    command: Sequence[str],
    ranks: int,
    *,
    logs: Path,
    time_limit: float,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run ``command`` (after the Python interpreter) once a rank, on the CPU, one thread each.

    Args:
        logs: directory; rank r writes ``rank{r}.log`` there.
        time_limit: seconds; after it all ranks are killed.

    Raises:
        JobFailed: names the rank that failed by itself, if one did, and not the neighbours which
            failed because of it; the other ranks are ended.
        KeyboardInterrupt: this process was told to stop, by SIGINT, SIGTERM or SIGHUP; all ranks
            are ended.
    """
    logs.mkdir(parents=True, exist_ok=True)
    shared = {
        **os.environ,
        "ZERO_BUBBLE_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **(environment or {}),
    }
    processes: list[subprocess.Popen[bytes]] = []
    with stopping_once():
        try:
            _start(processes, command, shared, logs)
            _watch(processes, logs, time.monotonic() + time_limit, time_limit)
        finally:
            _end(processes)


def _start(
    processes: list[subprocess.Popen[bytes]],
    command: Sequence[str],
    shared: Mapping[str, str],
    logs: Path,
) -> None:
    """Append a process for each rank."""
    for rank in range(int(shared["WORLD_SIZE"])):
        # Interrupted in between, a process would be there that nobody knows.
        with held_back(), (logs / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kill those that still run; all, before any is waited for."""
    with held_back():
        running = [one for one in processes if one.poll() is None]
        for one in running:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
        for one in running:
            one.wait()


def _watch(
    processes: Sequence[subprocess.Popen[bytes]], logs: Path, deadline: float, time_limit: float
) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            end = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < end and any(p.poll() is None for p in processes):
                time.sleep(POLL_SECONDS)
            ended = [rank for rank, process in enumerate(processes) if process.poll()]
            cause = next((rank for rank in ended if _own_fault(logs / f"rank{rank}.log")), failed)
            reason = f"ended with code {processes[cause].returncode}"
            raise JobFailed(cause, reason, logs / f"rank{cause}.log")
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline:
            stuck = codes.index(None)
            reason = f"was still running after {time_limit:g} s"
            raise JobFailed(stuck, reason, logs / f"rank{stuck}.log")
        time.sleep(POLL_SECONDS)


def _own_fault(log: Path) -> bool:
    """Whether a rank that failed did so by itself, not because of what another one did.

    Which process is gone first does not tell: connections close before a process ends.
    """
    text = log.read_text(errors="replace")
    return not any(sign in text for sign in CONSEQUENCES)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
