"""Jobs that are alive side by side and compute in turns.

Every rank of every job keeps a line to the coordinator. It reports what its last turn brought, and
blocks until it is given the next one. While another job has the turn its process is stopped, since
gloo's threads (some thirty a rank) each wake up a hundred times a second, whatever the rank does. A
rank whose line breaks ends with an error, and a stopped one ends with the coordinator, so that no
job outlives it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron.zero_bubble.local_job import run_ranks

__all__ = ["Jobs", "Line", "jobs_in_turns"]

HOST = "127.0.0.1"
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1  # of prctl(2): which signal a process gets when its parent ends


class Line:
    """One end of a line between the coordinator and a rank: JSON, a value a line of text."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""

    @classmethod
    def to_coordinator(cls, port: int, job: str, rank: int) -> Line:
        """A rank's line; its first message says whose it is."""
        if sys.platform == "linux":
            # A process that is stopped does not notice that its line is broken.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        line = cls(socket.create_connection((HOST, port)))
        line.send([job, rank, os.getpid()])
        return line

    def send(self, value: Any) -> None:
        """ConnectionError if the other end is gone."""
        self._socket.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        """Block until a value comes; ConnectionError if the other end is gone."""
        while b"\n" not in self._received:
            more = self._socket.recv(1 << 16)
            if not more:
                raise ConnectionError("the other end of the line has ended")
            self._received += more
        text, _, self._received = self._received.partition(b"\n")
        return json.loads(text)

    def waits(self, seconds: float) -> bool:
        """Whether something is there to receive, be it the end, within this time."""
        return b"\n" in self._received or bool(select.select([self._socket], [], [], seconds)[0])

    def close(self) -> None:
        """End the line; the other end notices, if it is still there."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Jobs:
    """The coordinator's view of running jobs, made by `jobs_in_turns`."""

    def __init__(self, running: Mapping[str, Future[None]], ranks: int) -> None:
        self._running, self._ranks = running, ranks
        self._lines: dict[tuple[str, int], Line] = {}
        self._processes: dict[tuple[str, int], int] = {}

    def turn(self, job: str, order: str) -> list[Any]:
        """Tell a job what to do, and return what its ranks report once all are idle again.

        Raises:
            JobFailed: the job failed, or took too long.
            RuntimeError: the job had ended.
        """
        self._signal(job, signal.SIGCONT)
        for rank in range(self._ranks):
            try:
                self._lines[job, rank].send(order)
            except ConnectionError as error:
                raise self._failure(job) from error
        return self._reports(job)

    def connect(self, listener: socket.socket) -> None:
        """Return when all ranks have called and are idle; raise as `turn` does."""
        listener.settimeout(POLL_SECONDS)
        while len(self._lines) < len(self._running) * self._ranks:
            for job, future in self._running.items():
                if future.done():
                    raise self._failure(job)
            try:
                line = Line(listener.accept()[0])
            except TimeoutError:
                continue
            job, rank, process = line.receive()
            self._lines[job, rank] = line
            self._processes[job, rank] = process
        for job in self._running:
            self._reports(job)

    def join(self) -> None:
        """Wait for all jobs to end by themselves; JobFailed if one fails."""
        for job in self._running:
            self._signal(job, signal.SIGCONT)
        for future in self._running.values():
            future.result()

    def close(self) -> None:
        """Break all lines: jobs that wait for a turn end."""
        for line in self._lines.values():
            line.close()
        for job in self._running:
            self._signal(job, signal.SIGCONT)

    def _reports(self, job: str) -> list[Any]:
        reports = [self._report(job, rank) for rank in range(self._ranks)]
        self._signal(job, signal.SIGSTOP)
        return reports

    def _report(self, job: str, rank: int) -> Any:
        line = self._lines[job, rank]
        # A rank that is stuck because another one has ended is ended together with its job.
        while not line.waits(POLL_SECONDS):
            if self._running[job].done():
                raise self._failure(job)
        try:
            return line.receive()
        except ConnectionError as error:
            raise self._failure(job) from error

    def _signal(self, job: str, which: signal.Signals) -> None:
        for (its_job, _), process in self._processes.items():
            if its_job == job:
                with suppress(ProcessLookupError):
                    os.kill(process, which)

    def _failure(self, job: str) -> BaseException:
        """What ended the job, or is about to."""
        cause = self._running[job].exception()
        return cause or RuntimeError(f"the job {job} had ended before its turn came")


@contextmanager
def jobs_in_turns(
    script: Path,
    flags: Mapping[str, Sequence[str]],
    ranks: int,
    *,
    logs: Path,
    time_limit: float,
) -> Iterator[Jobs]:
    """Start jobs and yield them, all ranks idle; at the end wait until they have ended.

    If a job or the body fails, all jobs end.

    Args:
        script: what a rank runs, with a port and the job's name, for `Line.to_coordinator`, before
            the job's flags. It reports once when it is ready, and once after each turn.
        flags: of each job, by its name.
        ranks: of each job.
        logs: directory; rank r of a job writes ``JOB/rank{r}.log`` there.
        time_limit: seconds for each job, start included.

    Raises:
        JobFailed: a job did not start.
    """
    # Closed in reverse: the threads of the pool end when the lines are cut and the jobs have ended.
    with (
        ThreadPoolExecutor(len(flags)) as pool,
        closing(socket.create_server((HOST, 0), backlog=len(flags) * ranks)) as listener,
    ):
        port = str(listener.getsockname()[1])
        running = {
            job: pool.submit(
                run_ranks,
                [str(script), port, job, *its_flags],
                ranks,
                logs=logs / job,
                time_limit=time_limit,
            )
            for job, its_flags in flags.items()
        }
        with closing(Jobs(running, ranks)) as jobs:
            jobs.connect(listener)
            yield jobs
            jobs.join()
