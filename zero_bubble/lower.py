"""From a schedule to the program that stages execute: the same passes with their messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

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

__all__ = ["lower"]


def lower(schedule: Schedule, *, forward_only: bool = False, prefetch: int = 2) -> Program:
    """The program of a legal schedule (`zero_bubble.check` says whether it is one).

    Results are sent right after the pass that made them, or handed over if the next chunk of the
    model lies on the same stage. Receives are posted in the order in which the other side sends,
    each at the latest before the pass that needs it. When a pass takes a message, the receives for
    the next ``prefetch`` passes that take one from the same channel are posted too, so that a
    message moves while the stage computes, and no more than ``prefetch + 1`` buffers wait as long
    as a stage takes messages in the order they are sent. The first ones of a channel are posted one
    pass ahead, not at the start, so that no transfer waits all through the warm-up.

    A training program ends with Finalize on every stage. ``forward_only`` keeps only the F's.
    ValueError for a negative ``prefetch``, or a pass whose input no pass of the schedule makes.
    """
    if prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, not {prefetch}")
    rows = schedule.passes
    if forward_only:
        rows = tuple(tuple(one for one in row if one.kind is Kind.F) for row in rows)
    lanes = _lanes(schedule.placement)
    _number_messages(lanes, rows)
    instructions = tuple(
        tuple(_row(stage, row, lanes[stage], prefetch)) + (() if forward_only else (Finalize(),))
        for stage, row in enumerate(rows)
    )
    return Program(schedule.placement, schedule.num_microbatches, instructions, schedule.name)


@dataclass(slots=True)
class _Line:
    """What a channel carries, in the order sent."""

    channel: Channel
    messages: list[Receive] = field(default_factory=list)
    """As the receives that take them."""
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    """Place in ``messages`` of what (microbatch, chunk) of the target needs."""

    def append(self, microbatch: int, chunk: int) -> None:
        self.numbers[microbatch, chunk] = len(self.messages)
        self.messages.append(Receive(self.channel, microbatch, chunk))


@dataclass(frozen=True, slots=True)
class _Lane:
    """How one kind of pass of one chunk gets its inputs, and where its results go."""

    flow: Flow
    source: _Line | None
    """None if there is no input, or it comes from the same stage."""
    target: _Line | None
    """None if nobody reads the result, or the same stage does."""
    reader: int | None
    """The chunk that reads the result, on whichever stage; None if there is none."""


type _Lanes = dict[Kind, list[_Lane]]
"""Of one stage, by kind and chunk; W, which makes nothing for others, has none."""


def _lanes(placement: Placement) -> list[_Lanes]:
    lines: dict[Channel, _Line] = {}

    def line(source: int, target: int, flow: Flow) -> _Line | None:
        if source == target:
            return None
        channel = Channel(source, target, flow)
        return lines.setdefault(channel, _Line(channel))

    def lane(stage: int, chunk: int, flow: Flow) -> _Lane:
        source, target = placement.before(stage, chunk), placement.after(stage, chunk)
        if flow is Flow.BACKWARD:
            source, target = target, source
        return _Lane(
            flow,
            source and line(source[0], stage, flow),
            target and line(stage, target[0], flow),
            target and target[1],
        )

    lanes: list[_Lanes] = []
    for stage, held in enumerate(placement.positions):
        forward = [lane(stage, chunk, Flow.FORWARD) for chunk in range(len(held))]
        backward = [lane(stage, chunk, Flow.BACKWARD) for chunk in range(len(held))]
        lanes.append({Kind.F: forward, Kind.B: backward, Kind.BW: backward})
    return lanes


def _number_messages(lanes: list[_Lanes], rows: tuple[tuple[Pass, ...], ...]) -> None:
    for here, row in zip(lanes, rows, strict=True):
        for what in row:
            if what.kind in here:
                lane = here[what.kind][what.chunk]
                if lane.target is not None and lane.reader is not None:
                    lane.target.append(what.microbatch, lane.reader)


def _row(stage: int, row: tuple[Pass, ...], lanes: _Lanes, prefetch: int) -> Iterator[Instruction]:
    posts = _posts(stage, row, lanes, prefetch)
    for index, what in enumerate(row):
        if index in posts:
            yield from posts[index]
        yield Run(what)
        if what.kind not in lanes:
            continue
        lane = lanes[what.kind][what.chunk]
        if lane.target is not None:
            yield Send(lane.target.channel, what.microbatch, what.chunk)
        elif lane.reader is not None:
            yield HandOver(lane.flow, what.microbatch, what.chunk, lane.reader)


def _posts(
    stage: int, row: tuple[Pass, ...], lanes: _Lanes, prefetch: int
) -> dict[int, list[Receive]]:
    """The receives to post before the pass at each index of the row."""
    # By channel: the passes that take a message, and the message's number.
    uses: dict[Channel, tuple[_Line, list[int], list[int]]] = {}
    for index, what in enumerate(row):
        line = lanes[what.kind][what.chunk].source if what.kind in lanes else None
        if line is None:
            continue
        number = line.numbers.get((what.microbatch, what.chunk))
        if number is None:
            raise ValueError(
                f"stage {stage} has {what}, but stage {line.channel.source} never makes its input: "
                "only a schedule that passes zero_bubble.check can be lowered"
            )
        _, indices, numbers = uses.setdefault(line.channel, (line, [], []))
        indices.append(index)
        numbers.append(number)

    posts: dict[int, list[Receive]] = defaultdict(list)
    for channel in sorted(uses):
        line, indices, numbers = uses[channel]
        posted = 0
        for use, number in enumerate(numbers):
            if number >= posted:
                at = indices[use - prefetch] if use >= prefetch else max(0, indices[0] - 1)
                posts[at] += line.messages[posted : number + 1]
                posted = number + 1
    return posts
