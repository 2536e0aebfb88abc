"""What test_sampler.py checks of rounds, in a process in CPU mode."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import torch

from megatron.zero_bubble.profile import sampler as sampler_module
from megatron.zero_bubble.profile.messages import Messages
from megatron.zero_bubble.profile.monitor import NOTHING, MeasuredBatch, Wish
from megatron.zero_bubble.profile.sampler import Round, Sampler
from zero_bubble.builders import build
from zero_bubble.lower import lower
from zero_bubble.profile.report import RankReport
from zero_bubble.schedule import Kind, Pass
from zero_bubble.trace.rank_file import TracedPass

PROGRAM = lower(build("zb-h1", 2, 1))
ROW = tuple(Pass.parse(what) for what in ("0F0", "0I0", "0W0"))
TIMES, MEMORY = Wish(times=True), Wish(times=True, memory=True)


def rounds() -> None:
    whole, short = Round(0, 5, 8, whole=True), Round(1, 20, 22, whole=False)
    assert [*whole.timed] == [6, 7, 8]
    assert [*short.timed] == [20, 21, 22]
    assert [whole.wants(one) for one in range(4, 10)] == [
        NOTHING, MEMORY, TIMES, TIMES, TIMES, NOTHING,
    ]  # fmt: skip
    assert [short.wants(one) for one in (19, 20, 22, 23)] == [NOTHING, TIMES, TIMES, NOTHING]


def measured(iteration: int, ms: float, wish: Wish = TIMES) -> MeasuredBatch:
    """F, B and W of ``ms``, twice and three times that, each after a wait of 50 ms."""
    passes, now = [], 0.0
    for what, factor, held in zip(ROW, (1, 2, 3), (1000, 400, 0), strict=True):
        ready = now + 50.0
        now = ready + factor * ms
        passes.append(TracedPass(what, ready - 50.0, ready, now, held))
    return MeasuredBatch(iteration, PROGRAM, 1, wish, tuple(passes), ())


def sampler_of(whole: bool = True, **fields: Any) -> Sampler:
    return Sampler(7, torch.device("cpu"), Round(3, 5, 8, whole), **fields)


def a_report_of_a_round() -> None:
    """Times are medians of the iterations after the first, without their waits."""
    edges = ((1, 0, 0.25),)
    sampler = sampler_of(messages=Messages(edges, 0.0))
    with mock.patch.object(sampler_module, "room", lambda device, most: 10 * most):
        for iteration, ms in ((5, 100.0), (6, 1.0), (7, 9.0), (8, 2.0)):
            assert not sampler.is_complete
            sampler.take(measured(iteration, ms, MEMORY if iteration == 5 else TIMES))
        assert sampler.is_complete
        report = sampler.report()
    assert report == RankReport(
        rank=7,
        stage=1,
        batches=3,
        times={Kind.F: (2.0,), Kind.B: (4.0,), Kind.W: (6.0,)},
        outliers=3,
        worst=4.5,
        m_b=(1000.0,),
        m_w=(400.0,),
        room=10_000,
        edges=edges,
    )
    assert RankReport.from_json(report.to_json()) == report


def a_report_of_a_short_round() -> None:
    """All of its iterations count, and nothing is said of memory."""
    sampler = sampler_of(whole=False)
    for iteration, ms in ((5, 1.0), (6, 2.0), (7, 3.0), (8, 4.0)):
        assert not sampler.is_complete
        sampler.take(measured(iteration, ms))
    assert sampler.is_complete
    report = sampler.report()
    assert report.times[Kind.F] == (2.5,)
    assert (report.m_b, report.m_w, report.room, report.edges) == ((), (), None, ())


def a_round_is_complete_with_its_own_iterations_only() -> None:
    sampler = sampler_of()
    for iteration in (3, 4, 9, 10, 11):
        sampler.take(measured(iteration, 1.0))
    assert not sampler.is_complete
    for iteration in (6, 7, 8):
        sampler.take(measured(iteration, 1.0))
    assert not sampler.is_complete  # memory is missing
    sampler.take(measured(5, 1.0))
    assert not sampler.is_complete  # it was not measured
    sampler.take(measured(5, 1.0, MEMORY))
    assert sampler.is_complete


def the_time_of_an_iteration() -> None:
    """From the beginning of one to that of the next; the one in which memory is counted is none."""
    sampler = sampler_of()
    clock = {4: 0.0, 5: 1.0, 6: 100.0, 7: 100.5, 8: 100.75, 9: 101.75, 10: 500.0}
    for iteration, seconds in clock.items():
        with mock.patch.object(time, "perf_counter", return_value=seconds):
            sampler.begins(iteration)
    for iteration in range(5, 9):
        sampler.take(measured(iteration, 1.0, MEMORY if iteration == 5 else TIMES))
    assert sampler.report().iteration_ms == 500.0  # of 500, 250 and 1000
