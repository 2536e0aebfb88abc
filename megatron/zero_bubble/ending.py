"""A process ends only once its other threads are at rest.

gloo's threads own what they send and reduce a moment longer than the caller who waited for it. One
that lets go of a tensor while Python shuts down asks for the interpreter's lock, which then ends
the thread inside C++ code: "terminate called without an active exception", and a run that did all
its work ends with code -6. Seen with torch 2.11 on busy machines; PyTorch's
developers know it.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from functools import cache
from pathlib import Path

__all__ = ["install"]

THREADS = Path("/proc/self/task")
RUNNING = "R"
LOOK_SECONDS = 0.002
# A thread seen asleep may be about to take the lock, which sleeping here hands to it.
LOOKS_AT_REST = 3
PATIENCE_SECONDS = 2.0  # a thread that is busy for longer has work of its own


@cache
def install() -> None:
    """Call before anything else registers with `atexit`: the last to be called is the first."""
    if THREADS.is_dir():  # elsewhere than on Linux threads cannot be looked at
        atexit.register(_wait_until_threads_rest)


def _wait_until_threads_rest() -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    at_rest = 0
    while at_rest < LOOKS_AT_REST and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        at_rest = 0 if _others_run() else at_rest + 1


def _others_run() -> bool:
    own = str(threading.get_native_id())
    return any(_state(task) == RUNNING for task in os.listdir(THREADS) if task != own)


def _state(task: str) -> str:
    try:
        text = (THREADS / task / "stat").read_text()
    except OSError:  # it has ended
        return ""
    return text.rpartition(")")[2].split()[0]
