"""What test_monitor.py checks, in a process in CPU mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron.zero_bubble.profile import monitor as monitor_module
from megatron.zero_bubble.profile.monitor import NOTHING, MeasuredBatch, Monitor, Wish
from megatron.zero_bubble.runtime.watching import BatchRecord
from zero_bubble.builders import build, forwards
from zero_bubble.lower import lower
from zero_bubble.placement import linear
from zero_bubble.schedule import Pass
from zero_bubble.trace.rank_file import Phase, TracedPass

PROGRAM = lower(build("zb-h1", 2, 1))
EVALUATION = lower(forwards(linear(2), 1), forward_only=True)
ROW = tuple(Pass.parse(what) for what in ("0F0", "0I0", "0W0"))
TIMES, MEMORY = Wish(times=True), Wish(times=True, memory=True)
REQUEST: Any = SimpleNamespace(models=())


@dataclass
class Party:
    """Wants of each iteration what it is told to want; notes what it hears."""

    wishes: dict[int, Wish]
    refuses: frozenset[int] = frozenset()
    begun: list[int] = field(default_factory=list)
    taken: list[MeasuredBatch] = field(default_factory=list)

    def wants(self, iteration: int) -> Wish:
        return self.wishes.get(iteration, NOTHING)

    def before(self, iteration: int, request: Any) -> None:
        self.begun.append(iteration)

    def take(self, measured: MeasuredBatch) -> None:
        self.taken.append(measured)

    def lets_run_ahead(self, iteration: int) -> bool:
        return iteration not in self.refuses

    @property
    def iterations(self) -> list[int]:
        return [one.iteration for one in self.taken]


class Device:
    """A clock whose marks are past once the device has come to them; it tells nothing before."""

    def __init__(self) -> None:
        self._moments = count(1)
        self.done = 10**9

    def mark(self) -> int:
        return next(self._moments)

    def is_past(self, mark: int) -> bool:
        return mark <= self.done

    def ms(self, mark: int) -> float:
        assert self.is_past(mark), "waits for the device"
        return float(mark)


class Training:
    """A session that runs ROW, and a loop around it; one stage, whose messages never wait."""

    def __init__(self, *parties: Party) -> None:
        self.attendant: Any = None
        self.listeners: list[Callable[[BatchRecord], None]] = []
        self.store = SimpleNamespace(pending=lambda chunk, microbatch: ())
        self.number, self.device = 1, Device()
        self.ahead: tuple[int, Any] | None = None
        self.held = iter(range(100, 10**6, 100))
        session: Any = self
        self.monitor = Monitor(session, lambda: self.number)
        self.monitor.parties += parties
        self.monitor._clock = self.device
        self.monitor._meter = mock.Mock()
        self.monitor._meter.begin = self._counted

    def _counted(self, compute: Any, split_chunks: frozenset[int]) -> tuple[Any, Any]:
        return ("counted", compute), lambda: next(self.held)

    def begin(self, ahead: bool = False) -> tuple[Any, Any]:
        compute: Any = "computing"
        return self.monitor.attend(compute, frozenset(), REQUEST, ahead=ahead)

    def run(self, recording: Any, row: Iterable[Pass] = ROW) -> None:
        for what in row if recording is not None else ():
            recording.begin()
            recording.ready()
            recording.end(what)

    def batch(self) -> Any:
        """Up to the optimizer's step; what computed it."""
        self.monitor.before(REQUEST)
        if self.ahead is not None:
            (compute, recording), self.ahead = self.ahead[1], None
            self.run(recording, ROW[1:])
        else:
            compute, recording = self.begin()
            self.run(recording)
        self._ended(forward_only=False)
        return compute

    def _ended(self, *, forward_only: bool) -> None:
        record = BatchRecord(EVALUATION if forward_only else PROGRAM, 0, forward_only, (), 0)
        for listener in self.listeners:
            listener(record)

    def evaluate(self) -> None:
        self._ended(forward_only=True)

    def step(self, events: tuple[tuple[str, int, int], ...] = ()) -> None:
        self.monitor.step_begins()
        self.monitor.step_ended(events)
        self.number += 1

    def iteration(self) -> Any:
        compute = self.batch()
        self.step()
        return compute

    def run_ahead(self) -> None:
        """The first pass of the next batch."""
        self.ahead = self.number + 1, self.begin(ahead=True)
        self.run(self.ahead[1][1], ROW[:1])


def each_gets_what_it_wants() -> None:
    first, second, idle = Party({1: TIMES, 3: TIMES}), Party({2: TIMES, 3: TIMES}), Party({})
    training = Training(first, second, idle)
    for _ in range(4):
        training.iteration()
    assert (first.iterations, second.iterations, idle.iterations) == ([1, 3], [2, 3], [])
    assert first.begun == second.begun == idle.begun == [1, 2, 3, 4]
    assert first.taken[1] == second.taken[1]
    one = first.taken[0]
    assert (one.program, one.stage, one.wish) == (PROGRAM, 0, TIMES)
    assert tuple(each.what for each in one.passes) == ROW
    assert one.passes[0] == TracedPass(ROW[0], 1.0, 2.0, 3.0, None)
    assert one.phases == (Phase("optimizer step", 10.0, 11.0),)
    assert one.nbytes > 0


def what_nobody_wants_is_not_recorded() -> None:
    training = Training(Party({2: TIMES}))
    training.monitor.before(REQUEST)
    assert training.begin() == ("computing", None)
    training.number = 2
    compute, recording = training.begin()
    assert compute == "computing"
    assert recording is not None
    assert recording.held is None


def memory_is_counted_for_who_wants_it() -> None:
    times, memory = Party({1: TIMES, 2: TIMES}), Party({1: MEMORY})
    training = Training(times, memory)
    assert training.iteration() == ("counted", "computing")
    assert training.iteration() == "computing"
    assert [one.held for one in memory.taken[0].passes] == [100, 200, 300]
    # Whoever looks at times can see that they are less exact.
    assert [one.wish for one in times.taken] == [MEMORY, TIMES]
    assert all(one.held is None for one in times.taken[1].passes)


def evaluations_are_none() -> None:
    """One between batch and step, as Megatron has none, and one between iterations."""
    party = Party({1: TIMES, 2: TIMES})
    training = Training(party)
    training.batch()
    training.evaluate()
    training.step()
    training.evaluate()
    training.iteration()
    assert party.iterations == [1, 2]
    assert [one.program for one in party.taken] == [PROGRAM, PROGRAM]


def nothing_is_handed_on_before_it_is_past() -> None:
    party = Party({1: TIMES, 2: TIMES})
    training = Training(party)
    training.device.done = 0
    training.iteration()
    training.iteration()
    assert party.taken == []
    training.device.done = 11  # of 22
    training.batch()
    assert party.iterations == [1]
    training.device.done = 10**9
    training.step()
    assert party.iterations == [1, 2]


def who_waits_gets_all() -> None:
    party = Party({1: TIMES})
    training = Training(party)
    training.device.done = 0
    training.iteration()
    training.device.is_past = lambda mark: mark <= 0  # type: ignore[method-assign]
    training.device.ms = float  # type: ignore[method-assign, assignment]
    training.monitor.hand_on()
    assert party.taken == []
    training.monitor.hand_on(wait=True)
    assert party.iterations == [1]


def one_that_waits_hands_on_before_the_next_batch(waits: bool) -> None:
    """Before the parties hear of the next iteration, even if the device is not there yet."""
    party = Party({1: TIMES})
    training = Training(party)
    training.device.is_past = lambda mark: False  # type: ignore[method-assign]
    training.device.ms = float  # type: ignore[method-assign, assignment]
    training.monitor.waits = waits
    training.iteration()
    assert party.taken == []
    taken: list[int] = []
    party.before = lambda iteration, request: taken.extend(party.iterations)  # type: ignore[method-assign]
    training.batch()
    assert taken == ([1] if waits else [])


def the_clock_is_made_anew_where_memory_is_wanted() -> None:
    """Before the first of such iterations, and before no other one."""
    party = Party({2: TIMES, 3: MEMORY, 4: MEMORY, 5: TIMES, 8: MEMORY})
    training = Training(party)
    made: list[int] = []

    def clock_for(device: Any) -> Device:
        made.append(training.number)
        return training.device

    with mock.patch.object(monitor_module, "clock_for", clock_for):
        for _ in range(9):
            training.iteration()
    assert made == [3, 8]


def an_iteration_without_a_step() -> None:
    """It is handed on when the next one begins, without the phases of a step."""
    party = Party({1: TIMES, 2: TIMES})
    training = Training(party)
    training.batch()
    training.number += 1
    assert party.taken == []
    training.iteration()
    assert party.iterations == [1, 2]
    assert party.taken[0].phases == ()
    assert len(party.taken[1].phases) == 1


def a_batch_that_never_ended_is_dropped() -> None:
    party = Party({1: TIMES, 2: TIMES})
    training = Training(party)
    training.monitor.before(REQUEST)
    training.begin()
    training.number += 1
    training.iteration()
    assert party.iterations == [2]


def a_run_ahead_belongs_to_the_next_iteration() -> None:
    party = Party({1: TIMES, 2: TIMES})
    training = Training(party)
    training.batch()
    training.run_ahead()
    training.step()
    training.iteration()
    assert party.iterations == [1, 2]
    for one in party.taken:
        assert tuple(each.what for each in one.passes) == ROW
    ahead, *rest = party.taken[1].passes
    end_of_step = party.taken[0].phases[-1].end
    assert ahead.end < end_of_step < rest[0].begin


def what_has_run_ahead_in_vain_is_recorded_anew() -> None:
    party = Party({2: TIMES})
    training = Training(party)
    training.batch()
    training.run_ahead()
    training.ahead = None
    training.step()
    before = training.device.mark()
    training.iteration()
    assert party.iterations == [2]
    assert tuple(each.what for each in party.taken[0].passes) == ROW
    assert party.taken[0].passes[0].begin > before


def what_has_run_ahead_in_vain_may_not_be_wanted_any_more() -> None:
    party = Party({2: TIMES})
    training = Training(party)
    training.batch()
    training.run_ahead()
    training.ahead = None
    training.step()
    party.wishes.clear()
    training.iteration()
    assert party.taken == []


def phases_of_post_validation() -> None:
    """Both batches know them: the next one has begun before, and goes on after them."""
    party = Party({1: TIMES, 2: TIMES})
    training = Training(party)
    training.batch()
    training.monitor.step_begins()
    training.run_ahead()
    first, second = (
        ("optimistic step", 12_000_000, 13_000_000),
        ("validate", 90_000_000, 91_000_000),
    )
    training.monitor.step_ended([first, second])
    training.number += 1
    training.iteration()
    one, other = party.taken
    assert one.phases == (Phase("optimistic step", 12.0, 13.0), Phase("validate", 90.0, 91.0))
    # 0F0 of the second batch begins at 11 ms, its own step is Megatron's.
    assert [phase.what for phase in other.phases] == [
        "optimizer step",
        "optimistic step",
        "validate",
    ]


def phases_before_the_first_pass_are_not_of_the_batch() -> None:
    party = Party({2: TIMES})
    training = Training(party)
    training.batch()
    training.monitor.step_begins()
    training.device.mark()
    training.device.mark()
    training.run_ahead()  # at 3 ms
    training.monitor.step_ended([("early", 1_000_000, 2_000_000), ("late", 8_000_000, 9_000_000)])
    training.number += 1
    training.iteration()
    assert [phase.what for phase in party.taken[0].phases] == ["optimizer step", "late"]


def all_must_let_it_run_ahead() -> None:
    """They are asked about the iteration that would begin early."""
    training = Training(Party({}), Party({}, refuses=frozenset({5})), Party({}))
    training.number = 3
    assert training.monitor.lets_run_ahead()
    training.number = 4
    assert not training.monitor.lets_run_ahead()
    assert Training().monitor.lets_run_ahead()
