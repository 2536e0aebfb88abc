"""What runs before the previous iteration's result is known, against a machine that executes it.

The machine runs iterations with their validation. It knows nothing of run-aheads but what it is
told to execute.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, random_order
from zero_bubble.builders import BUILDERS, build
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
from zero_bubble.run_ahead import run_ahead, sent_ahead
from zero_bubble.schedule import Kind

ITERATIONS = 3
PLACEMENTS = st.one_of(
    st.builds(linear, st.integers(1, 6)),
    st.builds(v_shape, st.integers(1, 5)),
    st.builds(interleaved, st.integers(2, 4), st.integers(2, 3)),
    st.sampled_from(
        [
            Placement(((0, 2), (1, 3, 4))),
            Placement(((3, 0), (1, 4), (5, 2))),
            Placement(((2,), (0,), (1,))),
            Placement(((0, 5), (4, 1), (2, 3))),
        ]
    ),
)
PROGRAMS = st.one_of(
    st.builds(
        lambda name, stages, microbatches, prefetch: lower(
            build(name, stages, microbatches), prefetch=prefetch
        ),
        st.sampled_from(list(BUILDERS)),
        st.integers(2, 8),
        st.integers(1, 20),
        st.integers(0, 4),
    ),
    st.builds(
        lambda placement, microbatches, seed, prefetch: lower(
            random_order(placement, microbatches, seed), prefetch=prefetch
        ),
        PLACEMENTS,
        st.integers(1, 4),
        st.integers(0, 10**6),
        st.integers(0, 3),
    ),
    st.builds(
        lambda placement, microbatches: lower(
            all_forwards_first(placement, microbatches, split=True)
        ),
        PLACEMENTS,
        st.integers(1, 6),
    ),
)

type Step = Callable[[], bool]
"""Does something, or returns False if it has to wait."""


class Machine:
    """Stages that send without waiting, and take the messages of a line in order.

    A message moves once both sides have asked for it; that its sender knows it has left is a step
    of its own, at the end of an iteration.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sent: dict[Channel, list[tuple[int, int, int]]] = defaultdict(list)
        """As (iteration, microbatch, chunk that reads it)."""
        self.asked: dict[Channel, list[tuple[int, int, int]]] = defaultdict(list)
        self.given: Counter[str] = Counter()
        """Messages of the validation."""
        self.handed: set[tuple[int, int, Flow, int, int]] = set()
        self.done = [0] * len(program.instructions)
        """Steps of each stage."""

    def execute(self, scripts: Sequence[Sequence[Step]]) -> list[int]:
        """Run until nothing moves; how many steps each stage has done in all."""
        moved = True
        while moved:
            moved = False
            for stage, script in enumerate(scripts):
                while self.done[stage] < len(script) and script[self.done[stage]]():
                    self.done[stage] += 1
                    moved = True
        return self.done

    def part(
        self, stage: int, iteration: int, begin: int = 0, end: int | None = None
    ) -> list[Step]:
        """Instructions of a stage in an iteration."""
        row = self.program.instructions[stage][begin:end]
        return [lambda one=one: self.step(stage, iteration, one) for one in row]  # type: ignore[misc]

    def step(self, stage: int, iteration: int, one: Instruction) -> bool:
        match one:
            case Run(what) if what.kind is not Kind.W:
                flow = Flow.FORWARD if what.kind is Kind.F else Flow.BACKWARD
                return self.there(stage, iteration, flow, what.chunk, what.microbatch)
            case Send(channel, microbatch, chunk):
                place = self.program.placement
                reader = (place.after if channel.flow is Flow.FORWARD else place.before)(
                    stage, chunk
                )
                assert reader is not None
                self.sent[channel].append((iteration, microbatch, reader[1]))
            case Receive(channel, microbatch, chunk):
                self.asked[channel].append((iteration, microbatch, chunk))
            case HandOver(flow, microbatch, _, chunk):
                self.handed.add((stage, iteration, flow, chunk, microbatch))
        return True

    def there(self, stage: int, iteration: int, flow: Flow, chunk: int, microbatch: int) -> bool:
        place = self.program.placement
        writer = (place.before if flow is Flow.FORWARD else place.after)(stage, chunk)
        if writer is None:
            return True
        if writer[0] == stage:
            return (stage, iteration, flow, chunk, microbatch) in self.handed
        channel = Channel(writer[0], stage, flow)
        number = self.asked[channel].index((iteration, microbatch, chunk))
        if number >= len(self.sent[channel]):
            return False
        # Each message must meet the Receive that is meant for it, iteration included.
        assert self.sent[channel][: number + 1] == self.asked[channel][: number + 1]
        return True

    def left(self, stage: int) -> Step:
        """Wait until all that the stage has sent has been asked for."""
        return lambda: all(
            len(self.asked[channel]) >= len(sent)
            for channel, sent in self.sent.items()
            if channel.source == stage
        )

    def give(self, what: str) -> Step:
        return lambda: self.given.update([what]) is None

    def take(self, what: str) -> Step:
        return lambda: self.given[what] > 0


def iterations(machine: Machine, stage: int, length: int, number: int) -> list[Step]:
    """A stage's steps: totals go down the stages, the result comes back up."""
    last = len(machine.program.instructions) - 1
    script = machine.part(stage, 0)
    for iteration in range(number):
        script.append(machine.left(stage))
        if stage > 0:
            script.append(machine.take(f"total {iteration} to {stage}"))
        if stage < last:
            script.append(machine.give(f"total {iteration} to {stage + 1}"))
        script += machine.part(stage, iteration + 1, end=length)
        if stage < last:
            script.append(machine.take(f"result {iteration} to {stage}"))
        if stage > 0:
            script.append(machine.give(f"result {iteration} to {stage - 1}"))
        script += machine.part(stage, iteration + 1, length)
    return script


def longest(program: Program, stage: int, lengths: Sequence[int]) -> int:
    """How far a stage gets by F's before the loss while no later one does anything, and earlier
    ones only what ``lengths`` says; Receives before a pass that does not run are not counted."""
    if stage == len(program.instructions) - 1:
        return 0
    row = program.instructions[stage]
    last = program.placement.owner(program.placement.num_positions - 1)
    forwards = next(
        index
        for index, one in enumerate((*row, Finalize()))
        if isinstance(one, Finalize)
        or (
            isinstance(one, Run)
            and (one.what.kind is not Kind.F or (stage, one.what.chunk) == last)
        )
    )
    machine = Machine(program)
    scripts = [machine.part(earlier, 0, end=lengths[earlier]) for earlier in range(stage)]
    length = machine.execute([*scripts, machine.part(stage, 0, end=forwards)])[stage]
    while length and isinstance(row[length - 1], Receive):
        length -= 1
    return length


@settings(max_examples=300)
@given(program=PROGRAMS)
def test_iterations_that_overlap_reach_their_end(program: Program) -> None:
    lengths = run_ahead(program)
    machine = Machine(program)
    scripts = [
        iterations(machine, stage, length, ITERATIONS) for stage, length in enumerate(lengths)
    ]
    assert machine.execute(scripts) == [len(script) for script in scripts]
    assert machine.sent == machine.asked


@settings(max_examples=300)
@given(program=PROGRAMS)
def test_a_run_ahead_is_as_long_as_it_can_be(program: Program) -> None:
    lengths = run_ahead(program)
    for stage, length in enumerate(lengths):
        assert length == longest(program, stage, lengths)


@settings(max_examples=100)
@given(program=PROGRAMS, data=st.data())
def test_nothing_waits_for_what_a_later_stage_does_after_its_last_b(
    program: Program, data: st.DataObject
) -> None:
    stuck = data.draw(st.integers(0, len(program.instructions) - 1))
    lengths = run_ahead(program)
    machine = Machine(program)
    scripts = []
    for stage, length in enumerate(lengths):
        script = iterations(machine, stage, length, 1)
        if stage == stuck:
            script = script[: after_last_b(program.instructions[stage])]
        scripts.append(script)
    reached = machine.execute(scripts)
    for stage in range(stuck):
        # Its own instructions, messages gone, the total taken and given, its run-ahead.
        expected = len(program.instructions[stage]) + 2 + (stage > 0) + lengths[stage]
        assert reached[stage] == expected


def after_last_b(row: Sequence[Instruction]) -> int:
    """How many instructions there are up to the last B and the sending of its gradient."""
    index = max(
        index
        for index, one in enumerate(row)
        if isinstance(one, Run) and one.what.kind in (Kind.B, Kind.BW)
    )
    sends = index + 1 < len(row) and isinstance(row[index + 1], Send | HandOver)
    return index + 1 + sends


@given(program=PROGRAMS)
def test_what_is_sent_ahead_is_the_first_that_a_channel_carries(program: Program) -> None:
    lengths = run_ahead(program)
    for stage, length in enumerate(lengths):
        machine = Machine(program)
        # Whether inputs are there does not matter to what is sent.
        for one in program.instructions[stage][:length]:
            if not isinstance(one, Run):
                machine.step(stage, 0, one)
        sent = {channel: len(messages) for channel, messages in machine.sent.items()}
        assert sent_ahead(program, lengths, stage) == sent


@pytest.mark.parametrize("stages", range(2, 9))
@pytest.mark.parametrize("microbatches", [1, 3, 8, 24])
def test_linear_schedules_run_their_warm_up_ahead(stages: int, microbatches: int) -> None:
    ahead = range(stages - 1)
    warm_up = [min(stages - stage, microbatches) for stage in ahead]
    longer = [min(2 * (stages - stage) - 1, microbatches) for stage in ahead]
    assert forwards_ahead(lower(build("1f1b", stages, microbatches))) == [*warm_up, 0]
    assert forwards_ahead(lower(build("zb-h1", stages, microbatches))) == [*warm_up, 0]
    assert forwards_ahead(lower(build("zb-h2", stages, microbatches))) == [*longer, 0]
    assert forwards_ahead(lower(build("gpipe", stages, microbatches))) == [
        *(microbatches for _ in ahead),
        0,
    ]


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "interleaved", "zb-interleaved"])
@pytest.mark.parametrize("stages", range(2, 9))
def test_with_more_chunks_the_first_chunk_runs_ahead(name: str, stages: int) -> None:
    schedule = build(name, stages, 3 * stages)
    expected = []
    for row in schedule.passes[:-1]:
        others = (index for index, one in enumerate(row) if (one.kind, one.chunk) != (Kind.F, 0))
        expected.append(next(others))
    assert forwards_ahead(lower(schedule)) == [*expected, 0]


def test_what_needs_a_later_stage_does_not_run_ahead() -> None:
    # The model begins on stage 1, goes on on stage 0, and comes back.
    placement = Placement(((1, 4), (0, 2), (3,)))
    program = lower(all_forwards_first(placement, 2, split=True))
    assert forwards_ahead(program) == [0, 2, 0]


def test_the_loss_does_not_run_ahead_even_where_it_could() -> None:
    program = lower(all_forwards_first(Placement(((0, 1), ())), 3, split=True))
    assert forwards_ahead(program) == [3, 0]


def test_two_stages_as_drawn() -> None:
    program = lower(build("zb-h1", 2, 4))
    lengths = run_ahead(program)
    ahead = [row[:length] for row, length in zip(program.instructions, lengths, strict=True)]
    assert [" ".join(map(str, row)) for row in ahead] == [
        "0F0 0SEND_F0 0RECV_B0 0RECV_B1 0F1 0SEND_F1",
        "",
    ]
    assert sent_ahead(program, lengths, 0) == {Channel(0, 1, Flow.FORWARD): 2}
    assert sent_ahead(program, lengths, 1) == {}


def test_a_turn_runs_ahead_where_no_later_stage_is_needed() -> None:
    placement = Placement(((0, 1), (2, 3)))
    program = lower(all_forwards_first(placement, 2, split=False))
    (ahead, _), row = run_ahead(program), program.instructions[0]
    # The receives of gradients are posted a pass before they are needed.
    assert " ".join(map(str, row[:ahead])) == (
        "0F0 0TURN_F0 0F1 0TURN_F1 1F0 1SEND_F0 1RECV_B0 1RECV_B1 1F1 1SEND_F1"
    )


def forwards_ahead(program: Program) -> list[int]:
    return [
        sum(isinstance(one, Run) for one in row[:length])
        for row, length in zip(program.instructions, run_ahead(program), strict=True)
    ]
