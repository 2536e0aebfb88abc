"""What ranks that share a GPU need: a share of it each, and NCCL that takes them for hosts.

Neither torch nor Megatron is imported here.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.zero_bubble.signals import held_back, stopping_once

__all__ = [
    "CONTROL",
    "Unavailable",
    "mps",
    "rank_environment",
    "require_device",
    "shared_environment",
]

CONTROL = "nvidia-cuda-mps-control"
START_SECONDS, STOP_SECONDS, LOOK_SECONDS = 30.0, 20.0, 120.0
PID_FILE = f"{CONTROL}.pid"
"""In the directory of MPS's pipes."""
_LOOK = """
import torch
found = torch.cuda.is_available()
print(torch.cuda.get_device_properties(0).multi_processor_count if found else 0)
"""
MOST_QUEUES, QUEUES_OF_ALL = 16, 64
"""Work queues of a rank, and of all together, asked of MPS."""


class Unavailable(RuntimeError):
    """There is no GPU, or no MPS that shares it out."""


def require_device() -> int:
    """The number of the GPU's multiprocessors; `Unavailable` without a GPU for torch, or MPS."""
    if shutil.which(CONTROL) is None:
        driver = (
            "" if shutil.which("nvidia-smi") else "no GPU: there is no nvidia-smi on PATH, and "
        )
        raise Unavailable(
            f"{driver}there is no {CONTROL} on PATH: MPS, which comes with NVIDIA's driver, gives "
            "each rank a share of the GPU of its own; without it a bubble costs no time"
        )
    found = _multiprocessors()
    if found == 0:
        raise Unavailable("torch.cuda finds no device in this Python")
    return found


def _multiprocessors() -> int:
    """Of the first GPU, 0 if torch finds none; told by another process: this one keeps off it."""
    command = [sys.executable, "-c", _LOOK]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=True
        )
        return int(told.stdout.split()[-1])
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        raise Unavailable(f"torch cannot say whether there is a GPU: {error}") from error


def shared_environment(
    device: str, ranks: int, given: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Variables of all ranks, to be set before they start; ``given`` wins.

    Args:
        device: ``cuda`` or ``cpu``.
    """
    if device == "cpu":
        return {"ZERO_BUBBLE_DEVICE": "cpu", **(given or {})}
    return {
        "ZERO_BUBBLE_DEVICE": "cuda",
        # MPS offers the one device it was started for as number 0.
        "CUDA_VISIBLE_DEVICES": "0",
        # Idle time of one rank must not speed up the others.
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks),
        # Every channel has a stream of its own, and a receive that waits must not hold up what is
        # behind it in the same queue. But MPS has one pool of queues for all its clients.
        "CUDA_DEVICE_MAX_CONNECTIONS": str(max(2, min(MOST_QUEUES, QUEUES_OF_ALL // ranks))),
        # Ranks of one device are taken for different hosts, and talk over sockets.
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        # The same product has to give the same bits, whichever streams are busy.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # Megatron's fused element-wise functions would be compiled by every rank of every job.
        "TORCHDYNAMO_DISABLE": "1",
        **(given or {}),
    }


def rank_environment(device: str, rank: int) -> dict[str, str]:
    """Variables of one rank, to be set before it imports torch."""
    if device == "cpu":
        return {}
    # Every rank uses device 0, which Megatron chooses by the local rank.
    return {"NCCL_HOSTID": f"zero-bubble-{rank}", "LOCAL_RANK": "0"}


@contextmanager
def mps() -> Iterator[dict[str, str]]:
    """MPS with directories of its own, stopped in any case; yields the variables of its clients.

    Raises:
        Unavailable: it did not start.
    """
    # Sockets lie in it, whose paths must be short.
    directory = Path(tempfile.mkdtemp(prefix="zb-mps-"))
    pipes, logs = directory / "pipe", directory / "log"
    clients = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    environment = {**os.environ, **clients}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    environment["CUDA_VISIBLE_DEVICES"] = first or "0"
    with stopping_once():
        try:
            for path in (pipes, logs):
                path.mkdir()
            _start(environment, logs)
            yield clients
        finally:
            with held_back():
                _stop(environment, pipes)
                shutil.rmtree(directory, ignore_errors=True)


def _start(environment: Mapping[str, str], logs: Path) -> None:
    # To a file: the daemon keeps what it is given open, and a pipe would never end.
    said = logs / "start.txt"
    try:
        with said.open("wb") as output:
            code = subprocess.run(
                [CONTROL, "-d"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=START_SECONDS,
                check=False,
            ).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{CONTROL} -d did not start: {error}") from error
    if code:
        text = said.read_text(errors="replace").strip() or "no message"
        raise Unavailable(f"{CONTROL} -d ended with code {code}: {text}")


def _stop(environment: Mapping[str, str], pipes: Path) -> None:
    try:
        subprocess.run(
            [CONTROL],
            env=environment,
            input=b"quit\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=STOP_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        # It does not listen, or never started.
        with suppress(OSError, ValueError):
            os.kill(int((pipes / PID_FILE).read_text()), signal.SIGTERM)
