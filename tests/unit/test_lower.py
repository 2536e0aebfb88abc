"""Programs: what is added to a schedule, where, and that nothing can block."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, parse, random_order
from zero_bubble.builders import BUILDERS, build
from zero_bubble.check_program import check_program
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.program import Channel, Finalize, Flow, HandOver, Program, Receive, Run, Send
from zero_bubble.schedule import Kind

PLACEMENTS = st.one_of(
    st.builds(linear, st.integers(1, 5)),
    st.builds(v_shape, st.integers(1, 4)),
    st.builds(interleaved, st.integers(1, 4), st.integers(2, 3)),
    st.just(Placement(((0, 2), (1, 3, 4)))),
)


@given(
    name=st.sampled_from(list(BUILDERS)),
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 9),
    forward_only=st.booleans(),
    prefetch=st.integers(0, 4),
)
def test_programs_of_the_builders_run(
    name: str, stages: int, microbatches: int, forward_only: bool, prefetch: int
) -> None:
    schedule = build(name, stages, microbatches)
    program = lower(schedule, forward_only=forward_only, prefetch=prefetch)
    assert check_program(program) == []


@settings(max_examples=80)
@given(
    placement=PLACEMENTS,
    microbatches=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    forward_only=st.booleans(),
    prefetch=st.integers(0, 3),
)
def test_programs_of_any_order_run(
    placement: Placement, microbatches: int, seed: int, forward_only: bool, prefetch: int
) -> None:
    schedule = random_order(placement, microbatches, seed)
    program = lower(schedule, forward_only=forward_only, prefetch=prefetch)
    assert check_program(program) == []


@settings(max_examples=40)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 5), split=st.booleans())
def test_a_program_holds_the_schedule_and_one_message_a_neighbour(
    placement: Placement, microbatches: int, split: bool
) -> None:
    schedule = all_forwards_first(placement, microbatches, split=split)
    program = lower(schedule)
    assert check_program(program) == []
    count: Counter[type] = Counter()
    for row, passes in zip(program.instructions, schedule.passes, strict=True):
        assert tuple(one.what for one in row if isinstance(one, Run)) == passes
        assert isinstance(row[-1], Finalize)
        count.update(map(type, row))
    owners = [placement.owner(position)[0] for position in range(placement.num_positions)]
    apart = sum(here != there for here, there in pairwise(owners))
    turns = len(owners) - 1 - apart
    assert count[Send] == count[Receive] == 2 * microbatches * apart
    assert count[HandOver] == 2 * microbatches * turns


@given(name=st.sampled_from(list(BUILDERS)), stages=st.integers(2, 5), prefetch=st.integers(0, 4))
def test_few_buffers_wait(name: str, stages: int, prefetch: int) -> None:
    schedule = build(name, stages, 8)
    placement = schedule.placement
    for stage, row in enumerate(lower(schedule, prefetch=prefetch).instructions):
        waiting: Counter[Channel] = Counter()
        for one in row:
            if isinstance(one, Receive):
                waiting[one.channel] += 1
                assert waiting[one.channel] <= prefetch + 1
            elif isinstance(one, Run) and one.what.kind is not Kind.W:
                forward = one.what.kind is Kind.F
                reads = placement.before if forward else placement.after
                source = reads(stage, one.what.chunk)
                if source is not None and source[0] != stage:
                    flow = Flow.FORWARD if forward else Flow.BACKWARD
                    waiting[Channel(source[0], stage, flow)] -= 1
        assert not any(waiting.values())


def test_two_stages_as_drawn() -> None:
    program = lower(build("zb-h1", 2, 2), prefetch=1)
    assert str(program).splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0I0 0W0 0I1 0W1 FINALIZE",
        "0RECV_F0 0RECV_F1 0F0 0I0 0SEND_B0 0F1 0I1 0SEND_B1 0W0 0W1 FINALIZE",
    ]


def test_a_receive_is_posted_a_pass_ahead_unless_prefetch_is_0() -> None:
    program = lower(build("1f1b", 2, 1), prefetch=0)
    assert str(program) == (
        "0F0 0SEND_F0 0RECV_B0 0B0 FINALIZE\n0RECV_F0 0F0 0B0 0SEND_B0 FINALIZE"
    )


def test_a_v_hands_over_at_its_turn() -> None:
    program = lower(all_forwards_first(v_shape(2), 1, split=True))
    assert str(program).splitlines() == [
        "1RECV_F0 0F0 0SEND_F0 1F0 1I0 1SEND_B0 0RECV_B0 1W0 0I0 0W0 FINALIZE",
        "0RECV_F0 0F0 0TURN_F0 1RECV_B0 1F0 1SEND_F0 1I0 1TURN_B0 1W0 0I0 0SEND_B0 0W0 FINALIZE",
    ]


def test_forward_only_keeps_only_forwards() -> None:
    program = lower(build("zb-h2", 2, 2), forward_only=True)
    assert str(program) == "0F0 0SEND_F0 0F1 0SEND_F1\n0RECV_F0 0RECV_F1 0F0 0F1"


def test_what_cannot_be_lowered() -> None:
    with pytest.raises(ValueError, match="prefetch must be at least 0, not -1"):
        lower(build("1f1b", 2, 2), prefetch=-1)
    with pytest.raises(ValueError, match="stage 1 has 0F1, but stage 0 never makes its input"):
        lower(parse(linear(2), 2, "0F0 0B0\n0F0 0F1 0B0 0B1"))


def edited(program: Program, stage: int, *changes: tuple[str, str]) -> list[str]:
    """What the checker says of a program with instructions of a stage renamed, moved or removed.

    ``("x", "")`` removes x, ``("x", "y")`` puts x right after y, ``("x", "x")`` doubles it.
    """
    row = list(program.instructions[stage])
    for name, after in changes:
        one = next(item for item in row if str(item) == name)
        if name != after:
            row.remove(one)
        if after == "START":
            row.insert(0, one)
        elif after:
            row.insert([str(item) for item in row].index(after) + 1, one)
    rows = (*program.instructions[:stage], tuple(row), *program.instructions[stage + 1 :])
    changed = Program(program.placement, program.num_microbatches, rows)
    return [str(violation) for violation in check_program(changed)]


H1 = lower(build("zb-h1", 2, 3), prefetch=1)


@pytest.mark.parametrize(
    ("stage", "changes", "message"),
    [
        (0, [("0SEND_F1", "")], "stage 0, 0F1: message: its result is never passed on"),
        (
            0,
            [("0SEND_F0", "0F1")],
            "",
        ),
        (
            0,
            [("0SEND_F0", "0SEND_F1")],
            "stage 0, 0SEND_F1: message: message 0 of F:0->1 meets 0RECV_F0 of stage 1",
        ),
        (0, [("0SEND_F1", "0F0")], "stage 0, 0SEND_F1: order: comes before the pass that makes"),
        (0, [("0SEND_F1", "0SEND_F1")], "stage 0, 0SEND_F1: message: passes the same result on a"),
        (1, [("0RECV_F0", "")], "stage 1, 0F0: order: runs before its input is received"),
        (1, [("0RECV_F2", "")], "stage 0, 0SEND_F2: message: has no Receive on F:0->1"),
        (1, [("0RECV_F1", "0RECV_F1")], "stage 1, 0RECV_F1: message: brings the same input a sec"),
        (1, [("0RECV_F1", "START")], "stage 0, 0SEND_F0: message: message 0 of F:0->1 meets 0RECV"),
        (1, [("FINALIZE", "")], "stage 1, FINALIZE: count: is missing at the end"),
        (1, [("FINALIZE", "0I2")], "stage 1, FINALIZE: order: is not the last instruction"),
        (1, [("0I1", "")], "stage 1, 0I1: count: runs 0 times, not once"),
    ],
)
def test_edited_programs(stage: int, changes: list[tuple[str, str]], message: str) -> None:
    found = edited(H1, stage, *changes)
    if not message:
        assert found == []  # a later Send is slow, not wrong
    else:
        assert any(one.startswith(message) for one in found), found


def test_a_message_on_the_wrong_channel() -> None:
    row = [
        Send(Channel(0, 1, one.channel.flow), one.microbatch, 3) if isinstance(one, Send) else one
        for one in H1.instructions[0]
    ]
    found = check_program(Program(H1.placement, 3, (tuple(row), H1.instructions[1])))
    assert "is on channel F:0->1, expected no message" in str(found[0])


def test_a_turn_left_out_or_turned_wrong() -> None:
    program = lower(all_forwards_first(v_shape(2), 1, split=True))
    found = edited(program, 1, ("0TURN_F0", ""))
    assert "stage 1, 1F0: order: runs before its input is received or handed over" in found
    assert "stage 1, 0F0: message: its result is never passed on" in found


def test_a_send_behind_a_wait_for_its_answer_deadlocks() -> None:
    program = lower(parse(linear(2), 2, "0F1 0F0 0B0 0B1\n0F0 0F1 0B0 0B1"), prefetch=0)
    assert check_program(program) == []
    # The passes are in the same order as before: only the program shows that this can't run.
    assert edited(program, 0, ("0SEND_F0", "0B0")) == [
        "stage 0, 0B0: deadlock: waits for ever for message 0 of B:1->0: 0 sent, 1 received",
        "stage 1, 0F0: deadlock: waits for ever for message 1 of F:0->1: 1 sent, 2 received",
    ]


def test_a_forward_only_program_is_counted_too() -> None:
    program = lower(build("1f1b", 2, 2), forward_only=True)
    assert edited(program, 1, ("0F1", "")) == ["stage 1, 0F1: count: runs 0 times, not once"]
    rows = (program.instructions[0], (*program.instructions[1], Finalize()))
    (found,) = check_program(Program(program.placement, 2, rows))
    assert "no gradients in a forward-only program" in str(found)
