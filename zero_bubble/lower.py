"""From a schedule to the program that stages execute: the same passes with their messages."""

from __future__ import annotations

from collections import defaultdict

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
    sent = _messages(schedule.placement, rows)
    instructions = tuple(
        _row(schedule.placement, stage, row, sent, prefetch)
        + (() if forward_only else (Finalize(),))
        for stage, row in enumerate(rows)
    )
    return Program(schedule.placement, schedule.num_microbatches, instructions, schedule.name)


def _messages(
    placement: Placement, rows: tuple[tuple[Pass, ...], ...]
) -> dict[Channel, list[Receive]]:
    """What each channel carries, in the order sent, as the receives that take it."""
    sent: dict[Channel, list[Receive]] = defaultdict(list)
    for stage, row in enumerate(rows):
        for what in row:
            flow, target = _flow(what), _target(placement, stage, what)
            if flow is not None and target is not None and target[0] != stage:
                channel = Channel(stage, target[0], flow)
                sent[channel].append(Receive(channel, what.microbatch, target[1]))
    return sent


def _row(
    placement: Placement,
    stage: int,
    row: tuple[Pass, ...],
    sent: dict[Channel, list[Receive]],
    prefetch: int,
) -> tuple[Instruction, ...]:
    receives = _receives(placement, stage, row, sent, prefetch)
    instructions: list[Instruction] = []
    for index, what in enumerate(row):
        instructions += receives[index]
        instructions.append(Run(what))
        flow, target = _flow(what), _target(placement, stage, what)
        if flow is None or target is None:
            continue
        other, chunk = target
        if other == stage:
            instructions.append(HandOver(flow, what.microbatch, what.chunk, chunk))
        else:
            instructions.append(Send(Channel(stage, other, flow), what.microbatch, what.chunk))
    return tuple(instructions)


def _receives(
    placement: Placement,
    stage: int,
    row: tuple[Pass, ...],
    sent: dict[Channel, list[Receive]],
    prefetch: int,
) -> dict[int, list[Receive]]:
    """The receives to post before the pass at each index of the row."""
    numbers = {
        one: number
        for channel, messages in sent.items()
        if channel.target == stage
        for number, one in enumerate(messages)
    }
    uses: dict[Channel, list[tuple[int, int]]] = defaultdict(list)
    for index, what in enumerate(row):
        flow, source = _flow(what), _source(placement, stage, what)
        if flow is not None and source is not None and source[0] != stage:
            channel = Channel(source[0], stage, flow)
            needed = Receive(channel, what.microbatch, what.chunk)
            if needed not in numbers:
                raise ValueError(
                    f"stage {stage} has {what}, but stage {source[0]} never makes its input: "
                    "only a schedule that passes zero_bubble.check can be lowered"
                )
            uses[channel].append((index, numbers[needed]))

    posts: dict[int, list[Receive]] = defaultdict(list)
    for channel in sorted(uses):
        indices = [index for index, _ in uses[channel]]
        posted = 0
        for use, (_, number) in enumerate(uses[channel]):
            at = indices[use - prefetch] if use >= prefetch else max(0, indices[0] - 1)
            posts[at] += sent[channel][posted : number + 1]
            posted = max(posted, number + 1)
    return posts


def _flow(what: Pass) -> Flow | None:
    match what.kind:
        case Kind.F:
            return Flow.FORWARD
        case Kind.B | Kind.BW:
            return Flow.BACKWARD
        case Kind.W:
            return None


def _target(placement: Placement, stage: int, what: Pass) -> tuple[int, int] | None:
    """(stage, chunk) that reads what the pass makes."""
    if what.kind is Kind.F:
        return placement.after(stage, what.chunk)
    return placement.before(stage, what.chunk)


def _source(placement: Placement, stage: int, what: Pass) -> tuple[int, int] | None:
    """(stage, chunk) that makes what the pass reads."""
    if what.kind is Kind.F:
        return placement.before(stage, what.chunk)
    return placement.after(stage, what.chunk)
