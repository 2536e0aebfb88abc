"""What an event log says about time, by hand-written logs."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.profile.times import batch_times
from megatron.zero_bubble.runtime.interpreter import Event
from zero_bubble.program import Channel, Finalize, Flow, Receive, Run, Send
from zero_bubble.schedule import Kind, Pass

MS = 1_000_000  # ns
FORWARD = Channel(0, 1, Flow.FORWARD)
LOG = (
    Event(Receive(FORWARD, 0, 1), 0 * MS, 1 * MS, 0),
    Event(Run(Pass(Kind.F, 0, 1)), 1 * MS, 7 * MS, 2 * MS),
    Event(Run(Pass(Kind.F, 0, 0)), 7 * MS, 10 * MS, 0),
    Event(Send(FORWARD, 0, 0), 10 * MS, 12 * MS, 0),
    Event(Run(Pass(Kind.F, 1, 1)), 12 * MS, 17 * MS, 0),
    Event(Run(Pass(Kind.B, 0, 1)), 17 * MS, 25 * MS, 1 * MS),
    Event(Run(Pass(Kind.W, 0, 1)), 25 * MS, 28 * MS, 0),
    Event(Finalize(), 30 * MS, 34 * MS, 0),
)


def test_passes_are_kept_by_kind_and_chunk_in_order_without_their_waits() -> None:
    assert batch_times(LOG).passes == {
        (Kind.F, 1): [4.0, 5.0],
        (Kind.F, 0): [3.0],
        (Kind.B, 1): [7.0],
        (Kind.W, 1): [3.0],
    }


def test_sums_over_all_chunks() -> None:
    times = batch_times(LOG)
    assert times.compute == pytest.approx(4 + 5 + 3 + 7 + 3)
    assert times.waited == pytest.approx(2 + 1)
    assert times.messages == pytest.approx(1 + 2 + 4)
    # The first pass could begin at 3 ms, when its message was there; the last one ended at 28 ms.
    assert times.span == pytest.approx(28 - 3)


def test_an_empty_log() -> None:
    times = batch_times(())
    assert (times.passes, times.compute, times.waited, times.messages, times.span) == (
        {}, 0, 0, 0, 0,
    )  # fmt: skip
