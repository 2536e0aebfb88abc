"""When passes ran: by the host's clock, and by a device that is behind the host."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.runtime.interpreter import Interpreter
from megatron.zero_bubble.runtime.recording import DeviceClock, HostClock, Recording, clock_for
from megatron.zero_bubble.runtime.transport import Receipt
from zero_bubble.builders import build
from zero_bubble.lower import lower
from zero_bubble.program import Program, Run
from zero_bubble.schedule import Pass
from zero_bubble.trace.rank_file import Phase, TracedPass


@dataclass
class Counter:
    """A clock whose moments are 1, 2, 3, ... ms."""

    moments: Iterator[int] = field(default_factory=lambda: count(1))

    def mark(self) -> int:
        return next(self.moments)

    def is_past(self, mark: int) -> bool:
        return True

    def ms(self, mark: int) -> float:
        return float(mark)


class Event:
    """Stands in for a CUDA event: past once the made-up device has come that far."""

    made: int = 0
    """Work that the host has given to the device."""
    done: int = 0
    """Of which the device has done so much, 10 ms each."""
    synchronized: int = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.made += 1
        self.number = Event.made

    def query(self) -> bool:
        return self.number <= Event.done

    def synchronize(self) -> None:
        Event.synchronized += 1
        Event.done = max(Event.done, self.number)

    def elapsed_time(self, later: Event) -> float:
        assert self.query()
        assert later.query(), "asked for a time that is not past"
        return 10.0 * (later.number - self.number)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Event]:
    Event.made = Event.done = Event.synchronized = 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 5_000_000)
    return Event


def test_a_pass_waits_from_its_begin_and_computes_from_ready_to_its_end() -> None:
    held = iter([100, 50])
    one = Recording(Counter(), lambda: next(held))
    one.begin()
    one.ready()
    one.end(Pass.parse("0F0"))
    one.begin()
    one.end(Pass.parse("0I0"))
    assert one.passes() == (
        TracedPass(Pass.parse("0F0"), 1.0, 2.0, 3.0, 100),
        TracedPass(Pass.parse("0I0"), 4.0, 4.0, 5.0, 50),
    )
    assert one.phases() == ()


def test_shares_of_w_make_whole_passes() -> None:
    """Two halves are one W, the one whose shares began first; 0I4 runs after two of six halves."""
    one = Recording(Counter())
    for text in ["0W2", "0W3", "0I4", "0W2", "0W4", "0W3", "0W4"]:
        one.begin()
        one.end(Pass.parse(text), 1 if text == "0I4" else 2)
    assert [(str(each.what), each.begin, each.end) for each in one.passes()] == [
        ("0W2", 1, 3),
        ("0I4", 4, 5),
        ("0W3", 6, 8),
        ("0W4", 9, 11),
    ]


def test_phases_are_kept_apart_from_passes() -> None:
    one = Recording(Counter(), None)
    one.begin()
    one.end(Pass.parse("0W1"))
    one.begin()
    one.end("finalize")
    one.begin()
    one.end("optimizer step")
    assert one.passes() == (TracedPass(Pass.parse("0W1"), 1.0, 1.0, 2.0, None),)
    assert one.phases() == (Phase("finalize", 3.0, 4.0), Phase("optimizer step", 5.0, 6.0))


@given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_times_are_in_order_whatever_waits(waits: list[bool]) -> None:
    one = Recording(HostClock())
    for number, waited in enumerate(waits):
        one.begin()
        if waited:
            one.ready()
        one.end(Pass.parse(f"0F{number}"))
    passes = one.passes()
    assert [each.what.microbatch for each in passes] == [*range(len(waits))]
    for each in passes:
        assert each.begin <= each.ready <= each.end
    assert all(before.end <= after.begin for before, after in pairwise(passes))
    assert [each.ready > each.begin for each in passes] == waits


def test_the_clock_of_the_host_is_its_monotonic_one_in_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostClock)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 2_500_000)
    mark = clock.mark()
    assert clock.is_past(mark)
    assert clock.ms(mark) == 2.5


def test_the_clock_of_a_device_tells_the_host_s_time(device: type[Event]) -> None:
    """Its zero was at 5 ms on the host's clock; the third piece of work ends 20 ms later."""
    clock = clock_for(torch.device("cuda", 0))
    assert isinstance(clock, DeviceClock)
    assert device.synchronized == 1  # once, when it is made
    clock.mark()
    mark = clock.mark()
    device.done = 3
    assert clock.ms(mark) == 25.0
    assert device.synchronized == 1


def test_nothing_waits_for_a_device_until_all_is_past(device: type[Event]) -> None:
    clock = DeviceClock()
    device.synchronized = 0
    one = Recording(clock)
    for what in ("0F0", "0I0", "0W0"):
        one.begin()
        one.ready()
        one.end(Pass.parse(what))
    one.begin()
    one.end("optimizer step")
    given = device.made
    for done in range(given):
        device.done = done
        assert not one.is_past
    device.done = given
    assert one.is_past
    assert [each.end - each.ready for each in one.passes()] == [10.0] * 3
    assert [each.end - each.begin for each in one.phases()] == [10.0]
    assert device.synchronized == 0


def test_without_a_phase_the_last_pass_is_what_must_be_past(device: type[Event]) -> None:
    one = Recording(DeviceClock())
    assert one.is_past  # nothing to wait for
    one.begin()
    one.end(Pass.parse("0F0"))
    device.done = device.made - 1
    assert not one.is_past
    device.done = device.made
    assert one.is_past


def test_who_asks_too_early_waits(device: type[Event]) -> None:
    one = Recording(DeviceClock())
    device.synchronized = 0
    one.begin()
    one.end(Pass.parse("0F0"))
    assert one.passes()[0].end - one.passes()[0].begin == 10.0
    assert device.synchronized > 0


def test_its_size_is_what_python_takes_for_it() -> None:
    """Times, marks and bytes held of a thousand passes, each a number of its own."""
    passes = [Pass.parse(f"0F{number}") for number in range(1000)]
    big = count(10**6)
    gc.collect()  # tuples that other tests have left for reuse would not be seen as taken
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        one = Recording(Counter(count(10**6)), lambda: next(big))
        for what in passes:
            one.begin()
            one.ready()
            one.end(what)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert one.nbytes == pytest.approx(taken, rel=0.2)


class Nothing:
    """Computes nothing, and brings messages of nothing; takes the place of both."""

    def forward(self, chunk: int, microbatch: int, input: Any) -> tuple[Any, Any]:
        return torch.zeros(1, requires_grad=True), torch.zeros(1)

    def backward(self, *_: Any) -> Any:
        return torch.zeros(1)

    def recompute(self, chunk: int, microbatch: int) -> None: ...
    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None: ...
    def finalize(self) -> None: ...

    def buffer(self, flow: Any) -> torch.Tensor:
        return torch.zeros(1)

    def send(self, channel: Any, message: Any) -> None: ...
    def drain(self) -> None: ...

    def receive(self, channel: Any, buffer: torch.Tensor) -> Receipt:
        return Receipt(channel, buffer, None)  # type: ignore[arg-type]

    def wait(self, receipt: Receipt) -> torch.Tensor:
        return receipt.buffer


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_the_interpreter_tells_of_every_pass_and_of_its_wait(name: str) -> None:
    """A pass is ready later than it begins where its input is a message: from another stage."""
    program: Program = lower(build(name, 3, 4))
    for stage, row in enumerate(program.instructions):
        nothing: Any = Nothing()
        one = Recording(Counter())
        Interpreter(stage, nothing, nothing, recording=one).run(row)
        passes = one.passes()
        assert [each.what for each in passes] == [
            each.what for each in row if isinstance(each, Run)
        ]
        for each in passes:
            source = _source(program, stage, each.what)
            assert (each.ready > each.begin) == (source is not None and source != stage), each
        assert [phase.what for phase in one.phases()] == ["finalize"]


def _source(program: Program, stage: int, what: Pass) -> int | None:
    """The stage whose output a pass reads; None for data, the loss, and W."""
    place = program.placement
    if what.kind == "W":
        return None
    writer = (place.before if what.kind == "F" else place.after)(stage, what.chunk)
    return None if writer is None else writer[0]
