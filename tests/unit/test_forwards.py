"""Forwards only: legal on any placement, in order, and no stage waits that could run."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_bubble.builders import forwards
from zero_bubble.check_program import check_program
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule


@st.composite
def any_placement(draw: st.DrawFn) -> Placement:
    """Positions in any order on any stage, each stage with at least one."""
    stages = draw(st.integers(1, 6))
    extra = draw(st.lists(st.integers(0, stages - 1), max_size=8))
    owners = draw(st.permutations([*range(stages), *extra]))
    return Placement(
        tuple(
            tuple(draw(st.permutations([at for at, owner in enumerate(owners) if owner == stage])))
            for stage in range(stages)
        )
    )


PLACEMENTS = st.one_of(
    st.builds(linear, st.integers(1, 8)),
    st.builds(v_shape, st.integers(1, 6)),
    st.builds(interleaved, st.integers(1, 6), st.integers(2, 4)),
    any_placement(),
)


def replay(schedule: Schedule) -> tuple[int, list[str]]:
    """Steps of a pass a stage until all is done, and where a stage waited that could run.

    Knows of the schedule only what each stage still has to run.
    """
    placement, rows = schedule.placement, schedule.passes
    done = set[tuple[int, int]]()  # (position, microbatch)
    left = [list(row) for row in rows]
    steps, idle = 0, list[str]()

    def ready(stage: int, one: Pass) -> bool:
        position = placement.positions[stage][one.chunk]
        return position == 0 or (position - 1, one.microbatch) in done

    while any(left):
        ran = []
        for stage, row in enumerate(left):
            if row and ready(stage, row[0]):
                one = row.pop(0)
                ran.append((placement.positions[stage][one.chunk], one.microbatch))
            elif any(ready(stage, one) for one in row):
                idle.append(f"stage {stage}, step {steps}")
        assert ran, "all stages wait for each other"
        done.update(ran)
        steps += 1
    return steps, idle


def test_small_ones_as_drawn() -> None:
    assert str(forwards(linear(2), 3)) == "0F0 0F1 0F2\n0F0 0F1 0F2"
    assert str(forwards(v_shape(2), 3)) == "0F0 0F1 0F2 1F0 1F1 1F2\n0F0 1F0 0F1 1F1 0F2 1F2"
    assert str(forwards(interleaved(2, 2), 3)) == (
        "0F0 0F1 1F0 1F1 0F2 1F2\n0F0 0F1 1F0 1F1 0F2 1F2"
    )
    assert str(forwards(Placement(((0, 3), (2,), (1,))), 2)) == "0F0 0F1 1F0 1F1\n0F0 0F1\n0F0 0F1"


@settings(max_examples=150)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 9), prefetch=st.integers(0, 3))
def test_any_placement_is_legal(placement: Placement, microbatches: int, prefetch: int) -> None:
    schedule = forwards(placement, microbatches)
    assert schedule.placement == placement
    assert check_program(lower(schedule, forward_only=True, prefetch=prefetch)) == []
    for stage, row in enumerate(schedule.passes):
        assert {one.kind for one in row} == {Kind.F}
        for chunk in range(placement.num_chunks(stage)):
            assert [one.microbatch for one in row if one.chunk == chunk] == [*range(microbatches)]


@settings(max_examples=150)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 12))
def test_no_stage_waits_that_could_run(placement: Placement, microbatches: int) -> None:
    assert replay(forwards(placement, microbatches))[1] == []


@given(stages=st.integers(2, 8), microbatches=st.integers(1, 20))
def test_a_v_takes_the_least_possible(stages: int, microbatches: int) -> None:
    """The stage of the turn has 2m to run, p-1 steps before it and p-1 after."""
    steps, _ = replay(forwards(v_shape(stages), microbatches))
    assert steps == 2 * microbatches + 2 * (stages - 1)


@given(stages=st.integers(1, 8), chunks=st.integers(1, 4), rounds=st.integers(1, 4))
def test_an_interleaved_one_takes_the_least_possible(stages: int, chunks: int, rounds: int) -> None:
    """The last stage has mv to run, and p-1 steps before it."""
    steps, _ = replay(forwards(interleaved(stages, chunks), rounds * stages))
    assert steps == rounds * stages * chunks + stages - 1


@given(stages=st.integers(1, 8), chunks=st.integers(1, 4), microbatches=st.integers(1, 20))
def test_an_interleaved_one_takes_at_most_the_way_of_one_more(
    stages: int, chunks: int, microbatches: int
) -> None:
    steps, _ = replay(forwards(interleaved(stages, chunks), microbatches))
    assert steps <= microbatches * chunks + stages * chunks - 1


def test_no_microbatch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 microbatch is needed, not 0"):
        forwards(linear(2), 0)
