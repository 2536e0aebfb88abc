"""Messages in the order PyTorch's runtime needs, and whether a file's messages are right.

PyTorch has one line between two ranks, for activations and gradients alike and in both directions:
the two ranks must name the messages between them in one order. `zero_bubble.lower` gives each flow
a channel of its own, and posts receives of one ahead of another's. So the messages of its program
are put into one global order here, that of an execution in which a message is sent and received at
once; any two ranks then agree, and no rank can wait for ever.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from zero_bubble.lower import lower
from zero_bubble.placement import Placement
from zero_bubble.program import Flow, HandOver, Program, Run, Send
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["Message", "check_messages", "with_messages"]


@dataclass(frozen=True, slots=True)
class Message:
    """One side of a message: what ``position`` sends or receives."""

    is_send: bool
    flow: str
    position: int
    microbatch: int

    def __str__(self) -> str:
        side = "SEND" if self.is_send else "RECV"
        return f"{self.position}{side}_{self.flow}{self.microbatch}"

    @property
    def other_side(self) -> Message:
        """The RECV of this SEND, or the SEND of this RECV."""
        ahead = 1 if (self.flow == Flow.FORWARD) == self.is_send else -1
        return Message(not self.is_send, self.flow, self.position + ahead, self.microbatch)


def with_messages(schedule: Schedule) -> list[list[str]]:
    """The cells of each rank's row: the passes and messages of the schedule's program.

    The order is that of stages that take one step at a time together, each running its next pass
    if its input is there, and then exchanging what they made. ValueError for a schedule that
    deadlocks.
    """
    program = lower(schedule)
    placement = program.placement
    waiting = _steps(program)
    arrived: set[tuple[Flow, int, int]] = set()
    cells: list[list[str]] = [[] for _ in waiting]
    while any(waiting):
        ready = [stage for stage, row in enumerate(waiting) if row and row[-1].needs <= arrived]
        if not ready:
            raise ValueError("the schedule deadlocks: no stage can go on")
        steps = [(stage, waiting[stage].pop()) for stage in ready]
        for stage, step in steps:
            cells[stage].append(step.cell)
        for stage, step in steps:
            arrived |= step.makes
            if step.sent is not None:
                received = step.sent.other_side
                cells[stage].append(str(step.sent))
                cells[placement.owner(received.position)[0]].append(str(received))
    for stage, held in enumerate(placement.positions):
        cells[stage] += [f"{position}REDUCE_GRAD" for position in sorted(held)]
    return cells


@dataclass(frozen=True, slots=True)
class _Step:
    """A pass and what leaves with it; inputs are (flow, position, microbatch)."""

    cell: str
    needs: set[tuple[Flow, int, int]]
    makes: set[tuple[Flow, int, int]]
    sent: Message | None


def _steps(program: Program) -> list[list[_Step]]:
    """Each stage's steps, the first one last."""
    placement = program.placement
    rows = []
    for stage, instructions in enumerate(program.instructions):
        held = placement.positions[stage]
        steps: list[_Step] = []
        for one in instructions:
            match one:
                case Run(what):
                    cell = str(Pass(what.kind, what.microbatch, held[what.chunk]))
                    needs = _needs(what, held[what.chunk], placement.num_positions)
                    steps.append(_Step(cell, needs, set(), None))
                case Send(channel, microbatch, chunk):
                    sent = Message(True, channel.flow, held[chunk], microbatch)
                    made = (channel.flow, sent.other_side.position, microbatch)
                    steps[-1] = _Step(steps[-1].cell, steps[-1].needs, {made}, sent)
                case HandOver(flow, microbatch, _, chunk):
                    steps[-1].makes.add((flow, held[chunk], microbatch))
                case _:
                    pass  # receives follow from the sends, reductions come at the end
        rows.append(steps[::-1])
    return rows


def _needs(what: Pass, position: int, positions: int) -> set[tuple[Flow, int, int]]:
    """What must have arrived before the pass runs; on its own stage the order sees to it."""
    match what.kind:
        case Kind.F if position > 0:
            return {(Flow.FORWARD, position, what.microbatch)}
        case Kind.B | Kind.BW if position + 1 < positions:
            return {(Flow.BACKWARD, position, what.microbatch)}
        case _:
            return set()


def check_messages(placement: Placement, rows: list[list[Pass | Message]]) -> None:
    """ValueError unless a file's messages, if it has any, are those its passes need.

    Passes carry the model position as their chunk. The error names row, cell and what is wrong.
    """
    messages = [[one for one in row if isinstance(one, Message)] for row in rows]
    if not any(messages):
        return
    rank_of = {position: rank for rank, held in enumerate(placement.positions) for position in held}
    for rank, row in enumerate(rows):
        _check_row(rank, row, rank_of)
    _check_pairs(messages, rank_of)


def _check_row(rank: int, row: list[Pass | Message], rank_of: dict[int, int]) -> None:
    """One row: a SEND for each result another rank needs, after it; a RECV before each use."""
    where = f"row {rank + 1} (rank {rank})"
    wanted: Counter[Message] = Counter()
    for one in row:
        if isinstance(one, Pass):
            wanted.update(_messages_of(one, rank, rank_of))
    found = Counter(one for one in row if isinstance(one, Message))
    if extra := [one for one in found if found[one] > wanted[one]]:
        raise ValueError(
            f"{where}: {extra[0]} is there {found[extra[0]]} times, of which "
            f"{wanted[extra[0]]} belong to a pass of this rank"
        )
    if missing := [one for one in wanted if found[one] < wanted[one]]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    done: set[Message] = set()
    for one in row:
        if isinstance(one, Message):
            if one.is_send and one not in done:
                raise ValueError(f"{where}: {one} comes before the pass that makes its content")
            done.add(one)
            continue
        for message in _messages_of(one, rank, rank_of):
            if message.is_send:
                done.add(message)
            elif message not in done:
                raise ValueError(f"{where}: {one} comes before its {message}")


def _messages_of(one: Pass, rank: int, rank_of: dict[int, int]) -> list[Message]:
    """The RECV that a pass takes, and the SEND of what it makes, where other ranks have part."""
    if one.kind is Kind.W:
        return []
    flow, ahead = (Flow.FORWARD, 1) if one.kind is Kind.F else (Flow.BACKWARD, -1)
    sides = ((one.chunk - ahead, False), (one.chunk + ahead, True))
    return [
        Message(is_send, flow, one.chunk, one.microbatch)
        for position, is_send in sides
        if rank_of.get(position, rank) != rank
    ]


def _check_pairs(messages: list[list[Message]], rank_of: dict[int, int]) -> None:
    """Two ranks send and receive what is between them in one order."""
    lines: dict[tuple[int, int], tuple[list[Message], list[Message]]]
    lines = defaultdict(lambda: ([], []))
    for rank, row in enumerate(messages):
        for one in row:
            other = rank_of[one.other_side.position]
            if one.is_send:
                lines[rank, other][0].append(one)
            else:
                lines[other, rank][1].append(one.other_side)
    for (source, target), (sent, received) in lines.items():
        for here, there in zip(sent, received, strict=True):
            if here != there:
                raise ValueError(
                    f"rank {source} has {here} where rank {target} has {there.other_side}: "
                    "the messages between two ranks need one order"
                )
