"""What test_run_ahead_parts.py checks, in a process in CPU mode: programs run in two parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.zero_bubble.errors import PipelineError
from megatron.zero_bubble.runtime.run_ahead import RunAhead, RunAheadFailed, _plan
from tests.unit.orders import all_forwards_first, random_order
from zero_bubble.builders import build
from zero_bubble.check_program import check_program
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.program import Channel, Flow, Program, Receive, Run, Send
from zero_bubble.run_ahead import run_ahead
from zero_bubble.schedule import Kind

PLACEMENTS = (
    linear(3), v_shape(2), v_shape(3), interleaved(2, 2), interleaved(3, 3),
    Placement(((0, 2), (1, 3, 4))), Placement(((0, 5), (4, 1), (2, 3))),
)  # fmt: skip


def of_builders(name: str) -> dict[str, int]:
    return _parts(
        lower(build(name, stages, microbatches), prefetch=prefetch)
        for stages in range(2, 7)
        for microbatches in (1, stages, 2 * stages + 1)
        for prefetch in (0, 2, 4)
    )


def of_any_order() -> dict[str, int]:
    orders = (
        random_order(placement, microbatches, seed)
        for placement in PLACEMENTS
        for microbatches in (1, 3)
        for seed in range(6)
    )
    gpipes = (all_forwards_first(placement, 3, split=True) for placement in PLACEMENTS)
    return _parts(lower(one) for schedules in (orders, gpipes) for one in schedules)


def _parts(programs: Iterable[Program]) -> dict[str, int]:
    """Check the two parts of every stage; how many receives were left, and forwards ran ahead."""
    found: Counter[str] = Counter()
    for program in programs:
        plans = [_plan(program, stage) for stage in range(len(program.instructions))]
        sent = {one for plan in plans for one in _messages(program, plan.ahead)}
        rows = []
        for stage, (plan, row) in enumerate(zip(plans, program.instructions, strict=True)):
            whole = plan.ahead + plan.rest
            rows.append(whole)
            assert Counter(whole) == Counter(row)
            # Receives aside, the order is the program's; and so it is on each channel.
            assert _without_receives(whole) == _without_receives(row)
            assert _by_channel(whole) == _by_channel(row)
            assert len(_without_receives(plan.ahead)) == len(
                _without_receives(row[: run_ahead(program)[stage]])
            )
            for one in plan.ahead:
                if isinstance(one, Run):
                    assert one.what.kind is Kind.F
                    found["forwards ahead"] += 1
                if isinstance(one, Receive):
                    # Of an earlier stage, which has run ahead if this one has.
                    assert _message(one) in sent
                    assert one.channel.source < stage
            ran = row[: run_ahead(program)[stage]]
            for one in ran:
                if isinstance(one, Receive) and one not in plan.ahead:
                    assert _message(one) not in sent or one.channel.source > stage
                    found["receives left"] += 1
            assert plan.arriving == Counter(
                channel for channel, _, _ in sent if channel.target == stage
            )
        assert not check_program(Program(program.placement, program.num_microbatches, tuple(rows)))
    return dict(found)


def _messages(program: Program, part: Iterable[Any]) -> Iterator[tuple[Channel, int, int]]:
    """(channel, microbatch, chunk that reads it) of what is sent."""
    place = program.placement
    for one in part:
        if isinstance(one, Send):
            side = place.after if one.channel.flow is Flow.FORWARD else place.before
            reader = side(one.channel.source, one.chunk)
            assert reader is not None
            yield one.channel, one.microbatch, reader[1]


def _message(one: Receive) -> tuple[Channel, int, int]:
    return one.channel, one.microbatch, one.chunk


def _without_receives(row: Iterable[Any]) -> list[Any]:
    return [one for one in row if not isinstance(one, Receive)]


def _by_channel(row: Iterable[Any]) -> dict[Channel, list[Receive]]:
    found: dict[Channel, list[Receive]] = {}
    for one in row:
        if isinstance(one, Receive):
            found.setdefault(one.channel, []).append(one)
    return found


@dataclass(frozen=True)
class Request:
    """What `RunAhead` reads of a BatchRequest."""

    iterators: tuple[Any, ...]
    models: tuple[Any, ...] = ()
    seq_length: int = 4


class Recorder:
    """Stands for the transport, the interpreter and the data of a batch; notes what is called."""

    def __init__(self, stage: int, fails_at: Any = None, error: BaseException | None = None):
        self.calls: list[Any] = []
        self.log: list[Any] = []
        self.recording: list[bool] = []
        self.transport, self.fails_at, self.error = self, fails_at, error
        program = lower(build("zb-h1", 4, 8))
        self.data = iter(range(100))
        self.request: Any = Request((self.data, None))
        compute = SimpleNamespace(buffer=lambda flow: _tensor())
        self.batch: Any = SimpleNamespace(
            request=self.request, program=program, stage=stage, interpreter=self, compute=compute,
            left=program.instructions[stage],
        )  # fmt: skip

    def execute(self, instructions: Any) -> None:
        for one in instructions:
            if one == self.fails_at:
                raise self.error or ValueError("in a pass")
            self.recording.append(torch.is_grad_enabled())
            if isinstance(one, Run) and self.reader is not None:
                self.calls.append(("read", next(self.reader)))
            self.log.append(SimpleNamespace(instruction=one))

    reader: Any = None

    def send(self, channel: Channel, message: Any) -> None:
        self.calls.append(("send", channel, message.tolist()))

    def begin_tentative(self) -> None:
        self.calls.append("begin")

    def keep_tentative(self) -> None:
        self.calls.append("keep")

    def discard_tentative(self, sent: dict[Channel, int], buffer: Any) -> None:
        for channel in sent:
            assert buffer(channel).tolist() == _tensor().tolist()
        self.calls.append(("discard", sent))


def _tensor() -> torch.Tensor:
    return torch.zeros(2)


def _begun(recorder: Recorder) -> RunAhead:
    ahead = RunAhead()
    ahead.enabled = True
    (recorder.reader, none) = ahead.replayable(recorder.request.iterators)
    assert none is None
    assert next(recorder.reader) == 0
    ahead.begin(recorder.batch)
    return ahead


def the_batch_that_was_asked_for() -> None:
    """It goes on where its beginning ended, and its data are not read again."""
    recorder = Recorder(1)
    ahead = _begun(recorder)
    ahead.run()
    done = [event.instruction for event in recorder.log]
    row = recorder.batch.program.instructions[1]
    assert done
    assert _without_receives((*done, *recorder.batch.left)) == _without_receives(row)
    assert ahead.waiting is recorder.batch
    assert ahead.take(recorder.request) is recorder.batch
    assert recorder.calls[0] == "begin"
    assert recorder.calls[-1] == "keep"
    read = sum(isinstance(one, Run) for one in done)
    assert next(recorder.reader) == 1 + read
    assert ahead.waiting is None
    assert ahead.take(recorder.request) is None
    ahead.discard()
    assert recorder.calls[-1] == "keep"


def another_batch() -> None:
    """What has run is thrown away, and its data are read again."""
    recorder = Recorder(1)
    ahead = _begun(recorder)
    ahead.run()
    other: Any = Request(recorder.request.iterators, seq_length=8)
    assert ahead.take(other) is None
    assert ("discard", {Channel(0, 1, Flow.FORWARD): 4}) in recorder.calls
    assert next(recorder.reader) == 1


def other_data() -> None:
    """Which one rank alone would see: the others would keep what they have."""
    recorder = Recorder(1)
    ahead = _begun(recorder)
    ahead.run()
    other: Any = Request((iter(()), None))
    with pytest.raises(RuntimeError, match="another data iterator"):
        ahead.take(other)


def of_some_stages() -> None:
    """Only what stages have sent that did run ahead comes in vain."""
    for ran, expected in ((None, 3), (2, 3), (1, None), (0, None)):
        recorder = Recorder(2)
        ahead = _begun(recorder)
        ahead.discard(ran)
        expected_from = {} if expected is None else {Channel(1, 2, Flow.FORWARD): expected}
        assert recorder.calls == ["begin", ("discard", expected_from)], ran


def a_pass_that_raises() -> None:
    """Later stages still get all they wait for; the error comes when the batch is asked for."""
    whole = Recorder(1)
    _begun(whole).run()
    sends = [one.instruction for one in whole.log if isinstance(one.instruction, Send)]
    passes = [one.instruction for one in whole.log if isinstance(one.instruction, Run)]
    assert len(sends) == len(passes) == 3
    recorder = Recorder(1, fails_at=passes[1])
    ahead = _begun(recorder)
    with pytest.raises(RunAheadFailed) as caught:
        ahead.run()
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    sent = [one for one in recorder.calls if one[0] == "send"]
    assert sent == [("send", one.channel, [0.0, 0.0]) for one in sends[1:]]
    ahead.discard()
    ahead.failure = cause
    with pytest.raises(ValueError, match="in a pass") as raised:
        ahead.take(recorder.request)
    assert raised.value is cause
    assert ahead.take(recorder.request) is None
    assert next(recorder.reader) == 1


def a_stage_that_is_gone() -> None:
    """Nobody is left to send to."""
    recorder = Recorder(1, error=PipelineError("gone"))
    ahead = _begun(recorder)
    recorder.fails_at = ahead._plan(recorder.batch).ahead[-2]
    with pytest.raises(PipelineError, match="gone"):
        ahead.run()
    assert not [one for one in recorder.calls if one[0] == "send"]


def gradients_are_recorded() -> None:
    """Also within the optimizer's step, which records none."""
    recorder = Recorder(0)
    ahead = _begun(recorder)
    with torch.no_grad():
        ahead.run()
        assert not torch.is_grad_enabled()
    assert set(recorder.recording) == {True}
