"""The checker of programs accepts exactly what a small machine executes to its end."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import random_order
from zero_bubble.check_program import check_program
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
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
from zero_bubble.schedule import Kind

PLACEMENTS = [linear(2), linear(3), v_shape(1), v_shape(2), interleaved(2, 2)]


class Refused(Exception):
    """The machine cannot go on."""


class Machine:
    """Stages with tensors by name: executes what it can, and refuses all else.

    A tensor is (flow, chunk, microbatch), of the chunk that reads it for an input and of the chunk
    that made it for a result.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.place = program.placement
        stages = range(self.place.num_stages)
        self.inputs: list[dict[tuple[Flow, int, int], bool]] = [{} for _ in stages]
        """Whether an input has arrived, for all that are asked for."""
        self.results: list[set[tuple[Flow, int, int]]] = [set() for _ in stages]
        """Made, and not passed on yet."""
        self.done: list[set[tuple[Kind, int, int]]] = [set() for _ in stages]
        self.finalized: set[int] = set()
        self.sent: dict[Channel, list[tuple[int, int, int]]] = defaultdict(list)
        self.asked: dict[Channel, list[tuple[int, int, int]]] = defaultdict(list)

    def reader(self, flow: Flow, stage: int, chunk: int) -> tuple[int, int] | None:
        return (self.place.after if flow is Flow.FORWARD else self.place.before)(stage, chunk)

    def writer(self, flow: Flow, stage: int, chunk: int) -> tuple[int, int] | None:
        return (self.place.before if flow is Flow.FORWARD else self.place.after)(stage, chunk)

    def execute(self) -> None:
        rows = self.program.instructions
        at = [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for stage, row in enumerate(rows):
                while at[stage] < len(row) and self.step(stage, row[at[stage]]):
                    at[stage] += 1
                    moved = True
        if at != [len(row) for row in rows]:
            raise Refused("blocked")
        self.require_all_done()

    def step(self, stage: int, one: Instruction) -> bool:
        """Execute an instruction; False if it has to wait."""
        match one:
            case Run():
                return self.run(stage, one)
            case Send(channel, microbatch, chunk):
                self.pass_on(stage, channel.flow, chunk, microbatch)
                reader = self.reader(channel.flow, stage, chunk)
                if reader is None or channel != Channel(stage, reader[0], channel.flow):
                    raise Refused("a Send to nobody who reads it")
                self.sent[channel].append((reader[0], reader[1], microbatch))
                self.deliver(channel)
            case Receive(channel, microbatch, chunk):
                writer = self.writer(channel.flow, stage, chunk)
                if writer is None or channel != Channel(writer[0], stage, channel.flow):
                    raise Refused("a Receive from nobody who writes it")
                self.ask(stage, channel.flow, chunk, microbatch)
                self.asked[channel].append((stage, chunk, microbatch))
                self.deliver(channel)
            case HandOver(flow, microbatch, source, target):
                self.pass_on(stage, flow, source, microbatch)
                if self.reader(flow, stage, source) != (stage, target):
                    raise Refused("a turn to another chunk")
                self.ask(stage, flow, target, microbatch)
                self.inputs[stage][flow, target, microbatch] = True
            case Finalize():
                self.require_all_done(stage)
                if stage in self.finalized:
                    raise Refused("gradients are reduced twice")
                self.finalized.add(stage)
        return True

    def ask(self, stage: int, flow: Flow, chunk: int, microbatch: int) -> None:
        if (flow, chunk, microbatch) in self.inputs[stage]:
            raise Refused("an input comes twice")
        self.inputs[stage][flow, chunk, microbatch] = False

    def pass_on(self, stage: int, flow: Flow, chunk: int, microbatch: int) -> None:
        if (flow, chunk, microbatch) not in self.results[stage]:
            raise Refused("nothing to pass on")
        self.results[stage].remove((flow, chunk, microbatch))

    def deliver(self, channel: Channel) -> None:
        number = min(len(self.sent[channel]), len(self.asked[channel]))
        if self.sent[channel][:number] != self.asked[channel][:number]:
            raise Refused("a message meets another's Receive")
        for stage, chunk, microbatch in self.sent[channel][:number]:
            self.inputs[stage][channel.flow, chunk, microbatch] = True

    def run(self, stage: int, one: Run) -> bool:
        kind, microbatch, chunk = one.what.kind, one.what.microbatch, one.what.chunk
        done = self.done[stage]
        if any((part, chunk, microbatch) in done for part in kind):
            raise Refused("a pass runs twice")
        if kind is Kind.W:
            if (Kind.B, chunk, microbatch) not in done:
                raise Refused("W without its B")
        else:
            flow = Flow.FORWARD if kind is Kind.F else Flow.BACKWARD
            if flow is Flow.BACKWARD and (Kind.F, chunk, microbatch) not in done:
                raise Refused("a backward without its forward")
            if self.writer(flow, stage, chunk) is not None:
                arrived = self.inputs[stage].get((flow, chunk, microbatch))
                if arrived is None:
                    raise Refused("nobody has asked for the input")
                if not arrived:
                    return False
            if self.reader(flow, stage, chunk) is not None:
                self.results[stage].add((flow, chunk, microbatch))
        done.update((Kind(part), chunk, microbatch) for part in kind)
        return True

    def require_all_done(self, stage: int | None = None) -> None:
        training = any(
            isinstance(one, Finalize) for row in self.program.instructions for one in row
        )
        kinds = (Kind.F, Kind.B, Kind.W) if training else (Kind.F,)
        for one in range(self.place.num_stages) if stage is None else [stage]:
            wanted = {
                (kind, chunk, microbatch)
                for kind in kinds
                for chunk in range(self.place.num_chunks(one))
                for microbatch in range(self.program.num_microbatches)
            }
            if self.done[one] != wanted or self.results[one]:
                raise Refused("something is left to do, or too much was done")
        if stage is None and self.sent != self.asked:
            raise Refused("messages are left")
        if stage is None and training and len(self.finalized) < self.place.num_stages:
            raise Refused("gradients are not reduced")


def spoiled(program: Program, draw: random.Random) -> Program:
    """One instruction dropped, doubled, moved, or exchanged with another, on one stage or two."""
    rows = [list(row) for row in program.instructions]
    row, other = draw.choice(rows), draw.choice(rows)
    at, to = draw.randrange(len(row)), draw.randrange(len(other))
    match draw.randrange(5):
        case 0:
            del row[at]
        case 1:
            other.insert(to, row[at])
        case 2:
            row.insert(draw.randrange(len(row)), row.pop(at))
        case 3:
            row[at], other[to] = other[to], row[at]
        case _:
            # The likeliest to be harmless: neighbours change places.
            row[at - 1], row[at] = row[at], row[at - 1]
    return replace(program, instructions=tuple(map(tuple, rows)))


def executes(program: Program) -> bool:
    try:
        Machine(program).execute()
    except Refused:
        return False
    return True


@settings(max_examples=400)
@given(
    placement=st.sampled_from(PLACEMENTS),
    microbatches=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    forward_only=st.booleans(),
    prefetch=st.integers(0, 2),
    changes=st.integers(0, 2),
)
def test_accepted_programs_are_those_that_execute(
    placement: Placement,
    microbatches: int,
    seed: int,
    forward_only: bool,
    prefetch: int,
    changes: int,
) -> None:
    schedule = random_order(placement, microbatches, seed)
    program = lower(schedule, forward_only=forward_only, prefetch=prefetch)
    draw = random.Random(seed)
    for _ in range(changes):
        program = spoiled(program, draw)
    assert (check_program(program) == []) == executes(program)
