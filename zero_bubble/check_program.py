"""Whether a program's messages match and its stages cannot block each other.

Shares no code with the lowering that writes programs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import zip_longest

from zero_bubble.check import Rule, Violation, check
from zero_bubble.check_shares import check_shares, whole_passes
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


def check_program(program: Program) -> list[Violation]:
    """Every rule that the program breaks; an empty list says that it runs to its end.

    Each stage's passes are counted and ordered as `check` does (only F's, if there is no other
    pass: a forward-only program), shares of W's as `check_shares` does. Each Send needs its Receive
    on the same channel, in the same order, with the same microbatch and the chunks that the
    placement connects. Deadlock is decided for channels that deliver in order and by rendezvous: a
    message moves once its Send and its Receive have both been executed and all earlier ones of the
    channel have moved. Send and Receive do not block; Run blocks until its input has moved.
    ValueError unless the program has a row of instructions for each stage.
    """
    forward_only = all(
        one.what.kind is Kind.F
        for row in program.instructions
        for one in row
        if isinstance(one, Run)
    )
    found = list(_passes(program, forward_only))
    for stage, row in enumerate(program.instructions):
        found += _Stage(program.placement, stage, forward_only).check(row)
    found += _pairs(program)
    return found or list(_deadlocks(program))


def _passes(program: Program, forward_only: bool) -> Iterator[Violation]:
    runs = [[one for one in row if isinstance(one, Run)] for row in program.instructions]
    for stage, own in enumerate(runs):
        yield from check_shares(stage, own)
    rows = tuple(map(whole_passes, runs))
    schedule = Schedule(program.placement, program.num_microbatches, rows)
    if not forward_only:
        yield from check(schedule)
        return
    for stage, row in enumerate(schedule.passes):
        count = Counter(row)
        for chunk in range(program.placement.num_chunks(stage)):
            for microbatch in range(program.num_microbatches):
                one = Pass(Kind.F, microbatch, chunk)
                times = count.pop(one, 0)
                if times != 1:
                    yield Violation(Rule.COUNT, stage, one, f"runs {times} times, not once")
        for one in count:
            yield Violation(Rule.RANGE, stage, one, "is not a chunk and microbatch of this stage")


def _giver(placement: Placement, flow: Flow, chunk: _Chunk) -> _Chunk | None:
    """The chunk whose result this one reads; None if there is none, or no such chunk."""
    return _neighbour(placement, chunk, -1 if flow is Flow.FORWARD else 1)


def _taker(placement: Placement, flow: Flow, chunk: _Chunk) -> _Chunk | None:
    """The chunk that reads this one's result; None if there is none, or no such chunk."""
    return _neighbour(placement, chunk, 1 if flow is Flow.FORWARD else -1)


def _neighbour(placement: Placement, chunk: _Chunk, step: int) -> _Chunk | None:
    stage, number = chunk
    if not 0 <= number < placement.num_chunks(stage):
        return None
    position = placement.positions[stage][number] + step
    return placement.owner(position) if 0 <= position < placement.num_positions else None


def _flow(what: Pass) -> Flow | None:
    """The flow of what other chunks may read of a pass; W and R make nothing for them."""
    if what.kind in (Kind.W, Kind.R):
        return None
    return Flow.FORWARD if what.kind is Kind.F else Flow.BACKWARD


class _Lane:
    """What one chunk of a stage takes and gives in one flow; the sets hold microbatches."""

    def __init__(self, placement: Placement, stage: int, flow: Flow, chunk: int) -> None:
        self.giver = _giver(placement, flow, (stage, chunk))
        self.taker = _taker(placement, flow, (stage, chunk))
        self.from_channel = Channel(self.giver[0], stage, flow) if self.giver else None
        self.to_channel = Channel(stage, self.taker[0], flow) if self.taker else None
        self.taken = set[int]()
        """What has been received or handed over."""
        self.made = set[int]()
        self.given = set[int]()
        """What has been sent or handed over."""


class _Stage:
    """Walks through one stage's instructions and remembers what is there already."""

    def __init__(self, placement: Placement, stage: int, forward_only: bool) -> None:
        self.placement = placement
        self.stage = stage
        self.forward_only = forward_only
        self.lanes: dict[tuple[Flow, int], _Lane] = {}
        self.found: list[Violation] = []

    def check(self, row: tuple[Instruction, ...]) -> list[Violation]:
        for index, one in enumerate(row):
            match one:
                case Run():
                    self._run(one)
                case Send():
                    self._send(one)
                case Receive():
                    self._receive(one)
                case HandOver():
                    self._hand_over(one)
                case Finalize():
                    self._finalize(one, last=index == len(row) - 1)
        if not self.forward_only and not any(isinstance(one, Finalize) for one in row):
            self._add(Rule.COUNT, Finalize(), "is missing at the end")
        for one in row:
            flow = _flow(one.what) if isinstance(one, Run) else None
            if isinstance(one, Run) and flow is not None:
                lane = self._lane(flow, one.what.chunk)
                if lane.taker and one.what.microbatch not in lane.given:
                    self._add(Rule.MESSAGE, one, "its result is never passed on")
        return self.found

    def _add(self, rule: Rule, one: Instruction, detail: str) -> None:
        self.found.append(Violation(rule, self.stage, one, detail))

    def _lane(self, flow: Flow, chunk: int) -> _Lane:
        lane = self.lanes.get((flow, chunk))
        if lane is None:
            lane = self.lanes[flow, chunk] = _Lane(self.placement, self.stage, flow, chunk)
        return lane

    def _run(self, one: Run) -> None:
        flow = _flow(one.what)
        if flow is None:
            return
        lane = self._lane(flow, one.what.chunk)
        if lane.giver and one.what.microbatch not in lane.taken:
            self._add(Rule.ORDER, one, "runs before its input is received or handed over")
        lane.made.add(one.what.microbatch)

    def _send(self, one: Send) -> None:
        lane = self._lane(one.channel.flow, one.chunk)
        self._require_channel(one, lane.to_channel)
        self._give(one, lane)

    def _receive(self, one: Receive) -> None:
        lane = self._lane(one.channel.flow, one.chunk)
        self._require_channel(one, lane.from_channel)
        self._take(one, lane)

    def _hand_over(self, one: HandOver) -> None:
        lane = self._lane(one.flow, one.source_chunk)
        if lane.taker != (self.stage, one.target_chunk):
            self._add(Rule.MESSAGE, one, f"the result goes to (stage, chunk) {lane.taker}")
        self._give(one, lane)
        self._take(one, self._lane(one.flow, one.target_chunk))

    def _require_channel(self, one: Send | Receive, wanted: Channel | None) -> None:
        if one.channel != wanted:
            expected = wanted or "no message"
            self._add(Rule.MESSAGE, one, f"is on channel {one.channel}, expected {expected}")

    def _give(self, one: Send | HandOver, lane: _Lane) -> None:
        if one.microbatch not in lane.made:
            self._add(Rule.ORDER, one, "comes before the pass that makes the result")
        if one.microbatch in lane.given:
            self._add(Rule.MESSAGE, one, "passes the same result on a second time")
        lane.given.add(one.microbatch)

    def _take(self, one: Receive | HandOver, lane: _Lane) -> None:
        if one.microbatch in lane.taken:
            self._add(Rule.MESSAGE, one, "brings the same input a second time")
        lane.taken.add(one.microbatch)

    def _finalize(self, one: Finalize, last: bool) -> None:
        if self.forward_only:
            self._add(Rule.COUNT, one, "there are no gradients in a forward-only program")
        elif not last:
            self._add(Rule.ORDER, one, "is not the last instruction")


def _pairs(program: Program) -> Iterator[Violation]:
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
        takers: dict[_Chunk, _Chunk | None] = {}
        pairs = zip_longest(sends[channel], receives[channel])
        for index, (sent, received) in enumerate(pairs):
            if received is None:
                yield Violation(Rule.MESSAGE, sent[0], sent[1], f"has no Receive on {channel}")
            elif sent is None:
                yield Violation(Rule.MESSAGE, received[0], received[1], f"has no Send on {channel}")
            else:
                stage, send = sent
                giver = stage, send.chunk
                if giver not in takers:
                    takers[giver] = _taker(program.placement, channel.flow, giver)
                other, receive = received
                if (takers[giver], send.microbatch) != ((other, receive.chunk), receive.microbatch):
                    detail = f"message {index} of {channel} meets {receive} of stage {other}"
                    yield Violation(Rule.MESSAGE, stage, send, detail)
                    break  # all later ones are displaced as well


class _Line:
    """How far a channel is."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.sent = 0
        self.numbers: dict[tuple[int, int], int] = {}
        """Which message brings the input of (chunk, microbatch), for all receives posted."""


class _Execution:
    """How far each stage has come, for a program whose messages match."""

    def __init__(self, program: Program) -> None:
        self.rows = program.instructions
        self.at = [0] * len(self.rows)
        """The instruction of each stage that is next."""
        self.takes: list[dict[tuple[Flow, int], _Line]] = [{} for _ in self.rows]
        """Of each stage: the line by which a (flow, chunk) gets its inputs; none if handed over."""
        self.gives: list[dict[tuple[Flow, int], _Line]] = [{} for _ in self.rows]
        lines: dict[Channel, _Line] = {}
        for stage, row in enumerate(self.rows):
            for one in row:
                if isinstance(one, (Send, Receive)):
                    ends = self.gives if isinstance(one, Send) else self.takes
                    key = one.channel.flow, one.chunk
                    if key not in ends[stage]:
                        line = lines.setdefault(one.channel, _Line(one.channel))
                        ends[stage][key] = line

    def run(self) -> None:
        """Execute until nothing moves."""
        pending = list(range(len(self.rows)))
        while pending:
            pending += self._advance(pending.pop()).difference(pending)

    def awaited(self, stage: int) -> tuple[_Line, int] | None:
        """The message without which a stage's next instruction can't run; None if it can.

        Its receive has been posted, and so have those of all earlier messages of the line.
        """
        one = self.rows[stage][self.at[stage]]
        flow = _flow(one.what) if isinstance(one, Run) else None
        if not isinstance(one, Run) or flow is None:
            return None
        line = self.takes[stage].get((flow, one.what.chunk))
        if line is None:
            return None
        number = line.numbers[one.what.chunk, one.what.microbatch]
        return None if number < line.sent else (line, number)

    def _advance(self, stage: int) -> set[int]:
        """Execute a stage until it blocks or ends; the stages that it has sent to."""
        row, takes, gives = self.rows[stage], self.takes[stage], self.gives[stage]
        sent_to = set()
        while self.at[stage] < len(row) and not self.awaited(stage):
            one = row[self.at[stage]]
            if isinstance(one, Send):
                line = gives[one.channel.flow, one.chunk]
                line.sent += 1
                sent_to.add(line.channel.target)
            elif isinstance(one, Receive):
                line = takes[one.channel.flow, one.chunk]
                line.numbers[one.chunk, one.microbatch] = len(line.numbers)
            self.at[stage] += 1
        return sent_to


def _deadlocks(program: Program) -> Iterator[Violation]:
    execution = _Execution(program)
    execution.run()
    for stage, row in enumerate(program.instructions):
        message = execution.awaited(stage) if execution.at[stage] < len(row) else None
        if message is not None:
            line, number = message
            detail = (
                f"waits for ever for message {number} of {line.channel}: {line.sent} sent, "
                f"{len(line.numbers)} received"
            )
            yield Violation(Rule.DEADLOCK, stage, row[execution.at[stage]], detail)
