"""W's at the tail by parameter: drawn cases, and what holds for any program."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import any_schedules, parse
from zero_bubble.builders import build
from zero_bubble.check_program import check_program
from zero_bubble.lower import lower
from zero_bubble.placement import linear, v_shape
from zero_bubble.program import Program, Run
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.tail import reorder_row, reorder_tail

ANY = any_schedules(4, 6)


def drawn(program: Program) -> str:
    """The passes alone."""
    rows = program.instructions
    return "\n".join(" ".join(str(one) for one in row if isinstance(one, Run)) for row in rows)


def shares(row: tuple[Run, ...], parts: int) -> list[tuple[int, int, int]]:
    """(chunk, microbatch, part) of all W's in order, whole ones as their shares."""
    return [
        (one.what.chunk, one.what.microbatch, part)
        for one in row
        if one.what.kind in (Kind.W, Kind.BW)
        for part in ((one.part,) if one.parts > 1 else range(parts))
    ]


def runs_of(program: Program, stage: int) -> tuple[Run, ...]:
    return tuple(one for one in program.instructions[stage] if isinstance(one, Run))


def test_a_tail_of_one_stage_drawn() -> None:
    schedule = parse(linear(1), 3, "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2")
    expected = "0F0 0F1 0F2 0I0 0I1 0I2 0W0.0/2 0W1.0/2 0W2.0/2 0W0.1/2 0W1.1/2 0W2.1/2"
    assert drawn(reorder_tail(lower(schedule), 2)) == expected


def test_before_the_last_b_run_the_shares_that_end_first() -> None:
    """0W0 could be whole there; but its second share is not needed before 0W1's second one."""
    schedule = parse(linear(1), 3, "0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2")
    expected = "0F0 0F1 0F2 0I0 0I1 0W0.0/2 0W1.0/2 0I2 0W2.0/2 0W0.1/2 0W1.1/2 0W2.1/2"
    assert drawn(reorder_tail(lower(schedule), 2)) == expected


def test_the_chunk_whose_last_b_is_first_comes_first() -> None:
    schedule = parse(v_shape(1), 2, "0F0 1F0 0F1 1F1 1I0 1I1 0I0 0W0 0I1 0W1 1W0 1W1")
    expected = (
        "0F0 1F0 0F1 1F1 1I0 1I1 0I0 1W0.0/2 1W1.0/2 0I1 1W0.1/2 1W1.1/2 "
        "0W0.0/2 0W1.0/2 0W0.1/2 0W1.1/2"
    )
    assert drawn(reorder_tail(lower(schedule), 2)) == expected


def test_where_nothing_can_be_gained_nothing_changes() -> None:
    program = lower(build("zb-h1", 4, 8))
    assert reorder_tail(program, 4).instructions[0] == program.instructions[0]
    assert reorder_tail(program, 1) == program
    # No half of 0W2 may come before 0B1, and none of 0W0 after it: that is the order of the sums.
    mixed = lower(parse(linear(1), 3, "0F0 0F1 0F2 0I0 0I2 0W0 0B1 0W2"))
    assert reorder_tail(mixed, 2) == mixed
    assert reorder_tail(lower(build("1f1b", 4, 8)), 4) == lower(build("1f1b", 4, 8))


def test_a_number_for_each_stage() -> None:
    program = lower(build("zb-h1", 3, 6))
    rows = reorder_tail(program, (4, 1, 2)).instructions
    assert rows[1] == program.instructions[1]
    assert {one.parts for one in rows[2] if isinstance(one, Run)} == {1, 2}
    with pytest.raises(ValueError, match="2 numbers of parts for 3 stages"):
        reorder_tail(program, (4, 1))
    with pytest.raises(ValueError, match="at least 1, not 0"):
        reorder_tail(program, 0)


@settings(max_examples=80)
@given(schedule=ANY, parts=st.integers(2, 5))
def test_any_program_stays_legal_and_keeps_the_order_of_its_sums(
    schedule: Schedule, parts: int
) -> None:
    program = lower(schedule)
    changed = reorder_tail(program, parts)
    assert check_program(changed) == []
    for stage, row in enumerate(changed.instructions):
        before, after = runs_of(program, stage), runs_of(changed, stage)
        # Everything but W's stands as before, with as much of W's between.
        weight = (Kind.W,)
        assert others(row, weight) == others(program.instructions[stage], weight)
        assert amounts(after, parts) == amounts(before, parts)
        # The sums of each share of a chunk.
        for part in range(parts):
            for chunk in range(schedule.placement.num_chunks(stage)):
                lane = [one for one in shares(after, parts) if (one[0], one[2]) == (chunk, part)]
                whole = [one for one in shares(before, parts) if (one[0], one[2]) == (chunk, part)]
                assert lane == whole


def others(row: tuple[object, ...], kinds: tuple[Kind, ...]) -> list[object]:
    return [one for one in row if not (isinstance(one, Run) and one.what.kind in kinds)]


def amounts(runs: tuple[Run, ...], parts: int) -> list[int]:
    """How many shares of W's have run before each other pass."""
    done, found = 0, []
    for one in runs:
        if one.what.kind is Kind.W:
            done += 1 if one.parts > 1 else parts
        else:
            found.append(done)
    return [*found, done]


@pytest.mark.parametrize("text", [
    "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2",
    "0F0 0F1 0F2 0I0 0I1 0W0 0I2 0W1 0W2",
    "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
    "0F0 0I0 0F1 0F2 0I1 0W0 0I2 0W1 0W2",
])  # fmt: skip
@pytest.mark.parametrize("reduction", [0.3, 1.0, 1.7, 5.0])
def test_no_order_ends_the_reductions_earlier(text: str, reduction: float) -> None:
    """Against all orders of two shares; a share and a place for it take 1."""
    row = lower(parse(linear(1), 3, text)).instructions[0]
    own = runs_of_row(reorder_row(row, 2))
    best = min(last_reduction(one, reduction) for one in all_orders(runs_of_row(row)))
    assert last_reduction(shares(own, 2), reduction) == pytest.approx(best)


def runs_of_row(row: tuple[object, ...]) -> tuple[Run, ...]:
    return tuple(one for one in row if isinstance(one, Run))


def all_orders(row: tuple[Run, ...]) -> list[list[tuple[int, int, int]]]:
    """All ways to put shares where W's are, each behind its B and in the order of microbatches."""
    whole = shares(row, 2)
    backward = {one.what.microbatch: at for at, one in enumerate(row) if one.what.kind is Kind.B}
    places = [at for at, one in enumerate(row) if one.what.kind is Kind.W for _ in range(2)]
    found = []
    for order in permutations(whole):
        lanes = [[one for one in order if one[2] == part] for part in range(2)]
        if all(lane == sorted(lane) for lane in lanes) and all(
            backward[one[1]] < at for one, at in zip(order, places, strict=True)
        ):
            found.append(list(order))
    return found


def last_reduction(order: list[tuple[int, int, int]], reduction: float) -> float:
    """When the second reduction ends, if shares run without a gap."""
    ends = {part: at + 1.0 for at, (_, _, part) in enumerate(order)}
    now = 0.0
    for end in sorted(ends.values()):
        now = max(now, end) + reduction
    return now


def test_how_shares_print() -> None:
    assert str(Run(Pass(Kind.W, 3), 1, 4)) == "0W3.1/4"
    assert str(Run(Pass(Kind.W, 3))) == "0W3"
