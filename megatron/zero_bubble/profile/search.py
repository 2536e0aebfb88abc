"""A search for a schedule in a process of its own, while training goes on.

A thread would take the interpreter from the rank that launches kernels. The process is the
``zero-bubble`` command, so that whoever wants to know more can run the same line.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import zero_bubble
from zero_bubble.export.json_io import ScheduleFile, load_file
from zero_bubble.profile.profile import Profile, save_profile

__all__ = ["Search", "SearchFailed"]

_LOWEST_PRIORITY = 19
# As `python -m zero_bubble`, but on Linux it ends with the process that has started it (prctl's
# PR_SET_PDEATHSIG).
_RUN = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from zero_bubble.cli import main
sys.exit(main())
"""


class SearchFailed(RuntimeError):
    """The command ended with an error, which is the message."""


class Search:
    """``zero-bubble schedule auto`` for a profile, a number of microbatches and a limit.

    Args:
        profile: costs and placement.
        microbatches: of a batch.
        limit: as ``--memory-limit`` takes it.
        effort: as ``--effort``.
    """

    def __init__(self, profile: Profile, microbatches: int, limit: str, effort: str) -> None:
        self.profile, self.microbatches = profile, microbatches
        self._directory = tempfile.TemporaryDirectory(prefix="zero-bubble-")
        folder = Path(self._directory.name)
        self._output, self._log = folder / "schedule.json", folder / "log"
        save_profile(profile, folder / "profile.json")
        self._problem = [
            *("schedule", "auto", "--placement", _placement_flag(profile)),
            *("--stages", str(profile.placement.num_stages)),
            *("--microbatches", str(microbatches)),
            *("--memory-limit", limit, "--effort", effort),
        ]
        files = ("--costs", str(folder / "profile.json"), "--output", str(self._output))
        self._process = self._start([*self._problem, *files])

    def command(self, costs: str) -> str:
        """The command line, for people, with the profile in this file."""
        return shlex.join(["zero-bubble", *self._problem, "--costs", costs])

    def _start(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        home = str(Path(zero_bubble.__file__).resolve().parent.parent)
        paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _RUN, *command],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        with suppress(OSError):  # it may have ended, or the system has no priorities
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST_PRIORITY)
        return process

    def result(self, *, wait: bool = False) -> ScheduleFile | None:
        """What was found; None while it searches, unless told to wait.

        Raises:
            SearchFailed: the command failed, or what it wrote cannot be read.
        """
        code = self._process.wait() if wait else self._process.poll()
        if code is None:
            return None
        if code:
            lines = self._log.read_text(errors="replace").strip().splitlines()
            raise SearchFailed(lines[-1] if lines else f"it ended with code {code}")
        try:
            return load_file(self._output)
        except (ValueError, OSError) as error:
            raise SearchFailed(str(error)) from error

    def text(self) -> str:
        """The file of what was found."""
        return self._output.read_text(encoding="utf-8")

    def stop(self) -> None:
        """End the process, if it still runs, and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()


def _placement_flag(profile: Profile) -> str:
    """What ``--placement`` calls it."""
    return "v" if profile.placement.num_chunks(0) > 1 else "linear"
