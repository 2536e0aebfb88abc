"""Whether a program's messages match and its stages cannot block each other.

Shares no code with the lowering that writes programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest

from zero_bubble.check import Rule, Violation, check
from zero_bubble.placement import Placement
from zero_bubble.program import (
    Channel,
    Finalize,
    Flow,
    HandOver,
    Instruction,
    Program,
    Receive,
    Run,
    Send,
)
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["check_program"]

type _Chunk = tuple[int, int]
"""(stage, chunk)"""
type _Result = tuple[Flow, int, int]
"""(flow, chunk, microbatch) on one stage"""
type _Problem = tuple[Rule, str]


def check_program(program: Program) -> list[Violation]:
    """Every rule that the program breaks; an empty list says that it runs to its end.

    Each stage's passes are counted and ordered as `check` does (only F's, if there is no other
    pass: a forward-only program). Each Send needs its Receive on the same channel, in the same
    order, with the same microbatch and the chunks that the placement connects. Deadlock is decided
    for channels that deliver in order and by rendezvous: a message moves once its Send and its
    Receive have both been executed and all earlier ones of the channel have moved. Send and Receive
    do not block; Run blocks until its input has moved.
    """
    links = _Links(program.placement)
    forward_only = all(
        one.what.kind is Kind.F
        for row in program.instructions
        for one in row
        if isinstance(one, Run)
    )
    found = list(_passes(program, forward_only))
    for stage, row in enumerate(program.instructions):
        found += _Stage(links, stage, forward_only).check(row)
    found += _pairs(links, program)
    return found or list(_deadlocks(links, program))


class _Links:
    """Which chunk reads a chunk's result, and which chunk's result it reads, in either flow."""

    def __init__(self, placement: Placement) -> None:
        self.target: dict[tuple[Flow, _Chunk], _Chunk] = {}
        self.source: dict[tuple[Flow, _Chunk], _Chunk] = {}
        for position in range(placement.num_positions - 1):
            low, high = placement.owner(position), placement.owner(position + 1)
            for flow, giver, taker in ((Flow.FORWARD, low, high), (Flow.BACKWARD, high, low)):
                self.target[flow, giver] = taker
                self.source[flow, taker] = giver


def _result(what: Pass) -> _Result | None:
    """What other chunks may read of a pass; W makes nothing for them."""
    if what.kind is Kind.W:
        return None
    flow = Flow.FORWARD if what.kind is Kind.F else Flow.BACKWARD
    return flow, what.chunk, what.microbatch


def _passes(program: Program, forward_only: bool) -> Iterator[Violation]:
    rows = tuple(
        tuple(one.what for one in row if isinstance(one, Run)) for row in program.instructions
    )
    if not forward_only:
        yield from check(Schedule(program.placement, program.num_microbatches, rows))
        return
    for stage, row in enumerate(rows):
        count = Counter(row)
        for chunk in range(program.placement.num_chunks(stage)):
            for microbatch in range(program.num_microbatches):
                one = Pass(Kind.F, microbatch, chunk)
                times = count.pop(one, 0)
                if times != 1:
                    yield Violation(Rule.COUNT, stage, one, f"runs {times} times, not once")
        for one in count:
            yield Violation(Rule.RANGE, stage, one, "is not a chunk and microbatch of this stage")


class _Stage:
    """Walks through one stage's instructions and remembers what is there already."""

    def __init__(self, links: _Links, stage: int, forward_only: bool) -> None:
        self.links = links
        self.stage = stage
        self.forward_only = forward_only
        self.inputs: set[_Result] = set()
        """What has been received or handed over: (flow, chunk that reads it, microbatch)."""
        self.made: set[_Result] = set()
        self.given: set[_Result] = set()
        """What has been sent or handed over: (flow, chunk that made it, microbatch)."""

    def check(self, row: tuple[Instruction, ...]) -> Iterator[Violation]:
        for index, one in enumerate(row):
            match one:
                case Run():
                    problems = self._run(one)
                case Send():
                    problems = self._send(one)
                case Receive():
                    problems = self._receive(one)
                case HandOver():
                    problems = self._hand_over(one)
                case Finalize():
                    problems = self._finalize(last=index == len(row) - 1)
            for rule, detail in problems:
                yield Violation(rule, self.stage, one, detail)
        if not self.forward_only and not any(isinstance(one, Finalize) for one in row):
            yield Violation(Rule.COUNT, self.stage, Finalize(), "is missing at the end")
        for one in row:
            result = _result(one.what) if isinstance(one, Run) else None
            if result is not None and self._target(result) and result not in self.given:
                yield Violation(Rule.MESSAGE, self.stage, one, "its result is never passed on")

    def _target(self, result: _Result) -> _Chunk | None:
        flow, chunk, _ = result
        return self.links.target.get((flow, (self.stage, chunk)))

    def _run(self, one: Run) -> Iterator[_Problem]:
        result = _result(one.what)
        if result is None:
            return
        flow, chunk, _ = result
        if self.links.source.get((flow, (self.stage, chunk))) and result not in self.inputs:
            yield Rule.ORDER, "runs before its input is received or handed over"
        self.made.add(result)

    def _send(self, one: Send) -> Iterator[_Problem]:
        flow, result = one.channel.flow, (one.channel.flow, one.chunk, one.microbatch)
        target = self._target(result)
        wanted = Channel(self.stage, target[0], flow) if target else None
        yield from _on_channel(one.channel, wanted)
        yield from self._give(result)

    def _receive(self, one: Receive) -> Iterator[_Problem]:
        flow = one.channel.flow
        source = self.links.source.get((flow, (self.stage, one.chunk)))
        wanted = Channel(source[0], self.stage, flow) if source else None
        yield from _on_channel(one.channel, wanted)
        yield from self._take((flow, one.chunk, one.microbatch))

    def _hand_over(self, one: HandOver) -> Iterator[_Problem]:
        result = (one.flow, one.source_chunk, one.microbatch)
        target = self._target(result)
        if target != (self.stage, one.target_chunk):
            yield Rule.MESSAGE, f"the result goes to (stage, chunk) {target}"
        yield from self._give(result)
        yield from self._take((one.flow, one.target_chunk, one.microbatch))

    def _give(self, result: _Result) -> Iterator[_Problem]:
        if result not in self.made:
            yield Rule.ORDER, "comes before the pass that makes the result"
        if result in self.given:
            yield Rule.MESSAGE, "passes the same result on a second time"
        self.given.add(result)

    def _take(self, result: _Result) -> Iterator[_Problem]:
        if result in self.inputs:
            yield Rule.MESSAGE, "brings the same input a second time"
        self.inputs.add(result)

    def _finalize(self, last: bool) -> Iterator[_Problem]:
        if self.forward_only:
            yield Rule.COUNT, "there are no gradients in a forward-only program"
        elif not last:
            yield Rule.ORDER, "is not the last instruction"


def _on_channel(used: Channel, wanted: Channel | None) -> Iterator[_Problem]:
    if used != wanted:
        yield Rule.MESSAGE, f"is on channel {used}, expected {wanted or 'no message'}"


def _pairs(links: _Links, program: Program) -> Iterator[Violation]:
    """The k-th Send of a channel against its k-th Receive."""
    sends: dict[Channel, list[tuple[int, Send]]] = defaultdict(list)
    receives: dict[Channel, list[tuple[int, Receive]]] = defaultdict(list)
    for stage, row in enumerate(program.instructions):
        for one in row:
            if isinstance(one, Send):
                sends[one.channel].append((stage, one))
            elif isinstance(one, Receive):
                receives[one.channel].append((stage, one))
    for channel in sorted({*sends, *receives}):
        pairs = zip_longest(sends[channel], receives[channel])
        for index, (sent, received) in enumerate(pairs):
            if received is None:
                yield Violation(Rule.MESSAGE, sent[0], sent[1], f"has no Receive on {channel}")
            elif sent is None:
                yield Violation(Rule.MESSAGE, received[0], received[1], f"has no Send on {channel}")
            else:
                stage, send = sent
                target = links.target.get((channel.flow, (stage, send.chunk)))
                other, receive = received
                if (target, send.microbatch) != ((other, receive.chunk), receive.microbatch):
                    detail = f"message {index} of {channel} meets {receive} of stage {other}"
                    yield Violation(Rule.MESSAGE, stage, send, detail)
                    break  # all later ones are displaced as well


def _deadlocks(links: _Links, program: Program) -> Iterator[Violation]:
    """Execute until nothing moves."""
    rows = program.instructions
    index: dict[tuple[int, _Result], tuple[Channel, int]] = {}
    posted: dict[Channel, int] = defaultdict(int)
    for stage, row in enumerate(rows):
        for one in row:
            if isinstance(one, Receive):
                key = (stage, (one.channel.flow, one.chunk, one.microbatch))
                index[key] = (one.channel, posted[one.channel])
                posted[one.channel] += 1

    sends: dict[Channel, int] = defaultdict(int)
    receives: dict[Channel, int] = defaultdict(int)
    at = [0] * len(rows)

    def blocked(stage: int) -> tuple[Channel, int] | None:
        one = rows[stage][at[stage]]
        result = _result(one.what) if isinstance(one, Run) else None
        message = index.get((stage, result)) if result else None
        if message is None:
            return None
        channel, number = message
        return message if number >= min(sends[channel], receives[channel]) else None

    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while at[stage] < len(row) and not blocked(stage):
                one = row[at[stage]]
                if isinstance(one, Send):
                    sends[one.channel] += 1
                elif isinstance(one, Receive):
                    receives[one.channel] += 1
                at[stage] += 1
                moved = True
    for stage, row in enumerate(rows):
        message = blocked(stage) if at[stage] < len(row) else None
        if message is not None:
            channel, number = message
            detail = (
                f"waits for ever for message {number} of {channel}: {sends[channel]} sent, "
                f"{receives[channel]} received"
            )
            yield Violation(Rule.DEADLOCK, stage, row[at[stage]], detail)
