"""Starts the stages of a replay on this machine, a process each, and gathers what they measured.

The processes are forked from one that has imported torch: importing it once a stage would take
longer than everything else. Real training is better served by `megatron.zero_bubble.local_job`.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
import torch.distributed as dist

from megatron.zero_bubble.local_job import CONSEQUENCES
from megatron.zero_bubble.profile.replay import (
    DelayedTransport,
    PausedCompute,
    Sleeper,
    StageLog,
    timeline_of,
)
from megatron.zero_bubble.runtime.interpreter import Interpreter
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.program import Program
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import Timeline, simulate

__all__ = ["Iteration", "ReplayFailed", "Replayed", "replay"]

HOST = "127.0.0.1"
START_MARGIN_NS = 20_000_000
"""From when the last stage is ready to when all start: time enough for all to hear of it."""
START_SECONDS = 300.0
"""For all stages to connect."""
SLOWEST = 10.0
"""How many times longer than predicted an iteration may take before it counts as stuck."""
GRACE_SECONDS = 5.0
"""For other stages to report too, once one has failed."""
PR_SET_PDEATHSIG, PR_SET_TIMERSLACK = 1, 29
"""From Linux's prctl.h."""


class ReplayFailed(RuntimeError):
    """A stage ended with an error, or did not end."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of all stages."""

    timeline: Timeline
    """What ran; times in ms from the first start."""
    logs: tuple[StageLog, ...]

    @property
    def latencies(self) -> list[float]:
        """Of messages, in ms; see `DelayedTransport.latencies`."""
        return [one for log in self.logs for one in log.latencies]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What `replay` measured."""

    iterations: tuple[Iteration, ...]
    """Without the warm-up."""
    real_time: bool
    """Whether all stages were scheduled before everything else on the machine."""


def replay(
    schedule: Schedule,
    costs: Costs,
    *,
    repeats: int,
    warm_up: int = 1,
    real_time: bool = True,
    wait_limit: float = 60.0,
) -> Replayed:
    """Run a legal schedule ``warm_up`` + ``repeats`` times, its passes being pauses.

    The interpreter runs the program of `lower`, over gloo on this machine. The stages of an
    iteration start together. After each, the sleeps are calibrated (`Sleeper`).

    Args:
        costs: of the schedule's placement; their times are those of the pauses and messages.
        real_time: ask the system to schedule the stages before other processes, so that those do
            not lengthen pauses. They need little: for the rest of the time the stages sleep.
        wait_limit: seconds that a wait for a message may take.

    Raises:
        ReplayFailed: names the stage that failed by itself, or those that did not end.
    """
    iterations = warm_up + repeats
    longest = wait_limit + SLOWEST * simulate(schedule, costs).cost / 1e3
    work = _Work(schedule, costs, lower(schedule), iterations, real_time, wait_limit)
    # In the stages, let no collection touch what was here before the fork: it would copy the pages.
    gc.freeze()
    try:
        with _started(work) as stages:
            found = _gather(stages, time.monotonic() + START_SECONDS + iterations * longest)
    finally:
        gc.unfreeze()
    rows = list(zip(*(one.logs for one in found), strict=True))[warm_up:]
    return Replayed(
        tuple(Iteration(timeline_of(schedule, costs, row), row) for row in rows),
        all(one.real_time for one in found),
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """What every stage is given."""

    schedule: Schedule
    costs: Costs
    program: Program
    iterations: int
    real_time: bool
    wait_limit: float


@dataclass(frozen=True, slots=True)
class _Report:
    """What a stage tells at its end: a log for each iteration."""

    logs: tuple[StageLog, ...]
    real_time: bool


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a stage tells when it fails."""

    text: str
    is_consequence: bool
    """Whether it has lost another one, which failed before it."""


@dataclass(frozen=True, slots=True)
class _Started:
    stage: int
    process: BaseProcess
    pipe: Connection


@contextmanager
def _started(work: _Work) -> Iterator[list[_Started]]:
    """The processes of all stages, connected to a store; they are gone afterwards."""
    fork = multiprocessing.get_context("fork")
    stages: list[_Started] = []
    try:
        for stage in range(work.schedule.num_stages):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_run_stage, args=(stage, work, theirs), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            stages.append(_Started(stage, process, ours))
        # Only now: the store is a thread, which a fork would not take along.
        store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        for one in stages:
            with suppress(BrokenPipeError):  # what ended it is in the pipe
                one.pipe.send(store.port)
        yield stages
    finally:
        for one in stages:
            one.process.kill()
            one.process.join()
            one.pipe.close()


def _gather(stages: Sequence[_Started], deadline: float) -> list[_Report]:
    """The reports of all stages, in their order."""
    waiting = {one.pipe: one for one in stages}
    reports: dict[int, _Report] = {}
    failures: dict[int, _Failure] = {}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            one = waiting.pop(pipe)
            report = _received(one)
            if isinstance(report, _Failure):
                failures[one.stage] = report
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            else:
                reports[one.stage] = report
    if failures:
        stage = min(failures, key=lambda one: (failures[one].is_consequence, one))
        raise ReplayFailed(f"stage {stage} failed:\n{failures[stage].text}")
    if waiting:
        stuck = ", ".join(str(one.stage) for one in waiting.values())
        raise ReplayFailed(f"not at an end in time, and given up: stages {stuck}")
    return [reports[one.stage] for one in stages]


def _received(one: _Started) -> _Report | _Failure:
    try:
        report: _Report | _Failure = one.pipe.recv()
        return report
    except (EOFError, ConnectionResetError):
        one.process.join(GRACE_SECONDS)
        return _Failure(f"its process ended with code {one.process.exitcode}", False)


def _run_stage(stage: int, work: _Work, pipe: Connection) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends all
    _ask_linux()
    torch.set_num_threads(1)
    try:
        pipe.send(_iterations(stage, work, pipe.recv()))
    except BaseException:
        text = traceback.format_exc()
        with suppress(OSError):
            pipe.send(_Failure(text, any(sign in text for sign in CONSEQUENCES)))
    finally:
        # Nothing of the parent's is to be cleaned up here; gloo's threads need not be.
        os._exit(0)


def _ask_linux() -> None:
    """End with the parent, and sleep as exactly as the timer can; other systems do without."""
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        library.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def _iterations(stage: int, work: _Work, port: int) -> _Report:
    count = work.schedule.num_stages
    dist.init_process_group(
        "gloo",
        store=dist.TCPStore(HOST, port, is_master=False, wait_for_workers=False),
        rank=stage,
        world_size=count,
        timeout=timedelta(seconds=START_SECONDS),
    )
    sleeper = Sleeper()
    transport = DelayedTransport(
        work.schedule, work.costs, sleeper, stage=stage, wait_limit=work.wait_limit
    )
    real_time = work.real_time and _schedule_first()
    logs = []
    for _ in range(work.iterations):
        # A collection in the middle of an iteration would be a pause that nobody asked for.
        gc.collect()
        gc.disable()
        transport.latencies.clear()
        compute = PausedCompute(stage, work.schedule, work.costs, sleeper)
        interpreter = Interpreter(stage, compute, transport)
        _start_together(sleeper)
        interpreter.run(work.program.instructions[stage])
        gc.enable()
        sleeper.learn()
        logs.append(StageLog(tuple(interpreter.log), tuple(transport.latencies)))
    dist.barrier()  # nobody goes while another one may still be reading from it
    return _Report(tuple(logs), real_time)


def _start_together(sleeper: Sleeper) -> None:
    """Return at one time on all stages, soon after the last of them has come here."""
    start = torch.tensor([time.perf_counter_ns() + START_MARGIN_NS])
    dist.all_reduce(start, dist.ReduceOp.MAX)
    sleeper.until(int(start.item()))


def _schedule_first() -> bool:
    """Ask for real-time scheduling of this process, gloo's threads too; whether that is granted."""
    if sys.platform != "linux":
        return False
    try:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
    except OSError:  # no permission
        return False
    return True
