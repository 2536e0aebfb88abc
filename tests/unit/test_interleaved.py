"""Interleaved 1F1B is Megatron's order, with the memory and bubble that the literature gives."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cpu_mode import checks_of
from zero_bubble.builders import build, one_f_one_b
from zero_bubble.builders.interleaved import group_size, interleaved_1f1b
from zero_bubble.check import bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.placement import interleaved
from zero_bubble.schedule import Kind, Pass
from zero_bubble.simulate import simulate

SIZES = {
    "stages": st.integers(1, 8),
    "chunks": st.integers(1, 4),
    "microbatches": st.integers(1, 20),
}


def accepted_by_megatron(stages: int, microbatches: int, group: int) -> bool:
    """The conditions at the start of forward_backward_pipelining_with_interleaving."""
    rest = microbatches % group
    return stages <= group <= microbatches and not 0 < rest < stages


def test_two_stages_of_two_chunks_as_drawn() -> None:
    assert str(interleaved_1f1b(2, 4)) == (
        "0F0 0F1 1F0 1F1 0F2 1B0 0F3 1B1 1F2 0B0 1F3 0B1 1B2 1B3 0B2 0B3\n"
        "0F0 0F1 1F0 1B0 1F1 1B1 0F2 0B0 0F3 0B1 1F2 1B2 1F3 1B3 0B2 0B3"
    )


def test_the_order_is_megatrons() -> None:
    """Its own functions give the warm-up and the table; one forward, one backward follows."""
    sizes = [
        (stages, chunks, microbatches, group_size(stages, microbatches))
        for stages in (2, 3, 4, 8)
        for chunks in (1, 2, 3, 4)
        for microbatches in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 24)
    ]
    numbers = checks_of("tests.unit.interleaved_checks")("numbers_of_megatron", sizes=sizes)
    all_in_warm_up = 0
    for (stages, chunks, microbatches, _), (warm_ups, table) in zip(sizes, numbers, strict=True):
        schedule = build("interleaved", stages, microbatches, chunks=chunks)
        for row, warm_up in zip(schedule.passes, warm_ups, strict=True):
            expected: list[Pass] = []
            backwards = 0
            for index, (microbatch, chunk) in enumerate(table):
                expected.append(Pass(Kind.F, microbatch, chunk))
                if index >= warm_up:
                    microbatch, chunk = table[backwards]
                    expected.append(Pass(Kind.BW, microbatch, chunks - 1 - chunk))
                    backwards += 1
            for microbatch, chunk in table[backwards:]:
                expected.append(Pass(Kind.BW, microbatch, chunks - 1 - chunk))
            assert list(row) == expected
            all_in_warm_up += warm_up == len(table)
    assert all_in_warm_up > 0


@given(stages=st.integers(2, 12), microbatches=st.integers(1, 60))
def test_groups_are_the_smallest_that_megatron_accepts(stages: int, microbatches: int) -> None:
    size = group_size(stages, microbatches)
    if microbatches < stages:
        assert size == stages
        return
    assert accepted_by_megatron(stages, microbatches, size)
    assert not any(accepted_by_megatron(stages, microbatches, one) for one in range(1, size))
    assert (size == stages) == (microbatches % stages == 0)


@settings(max_examples=60)
@given(**SIZES)
def test_every_size_is_legal_and_its_program_runs(
    stages: int, chunks: int, microbatches: int
) -> None:
    schedule = build("interleaved", stages, microbatches, chunks=chunks)
    assert schedule.placement == interleaved(stages, chunks)
    assert check(schedule) == []
    assert bit_identical_order(schedule) == []
    assert check_program(lower(schedule)) == []


@settings(max_examples=60)
@given(
    stages=st.integers(1, 8),
    chunks=st.integers(2, 4),
    rounds=st.integers(2, 4),
    t_f=st.integers(1, 5),
    t_b=st.integers(1, 5),
)
def test_bubble_and_memory_of_the_literature(
    stages: int, chunks: int, rounds: int, t_f: int, t_b: int
) -> None:
    """Bubble (p-1)(T_F+T_B)/v; memory 1 + (p-1)/(pv) times that of 1F1B, on the first stage."""
    microbatches = rounds * stages
    schedule = build("interleaved", stages, microbatches, chunks=chunks)
    # A chunk is 1/v of a stage, in time and in memory.
    placement = schedule.placement
    whole = Costs.uniform(placement, t_f, t_b, 0, m_b=1)
    timeline = simulate(schedule, whole)
    work = chunks * microbatches * (t_f + t_b)
    assert timeline.cost == work + (stages - 1) * (t_f + t_b)
    in_stages = Fraction(int(timeline.peak_memory[0]), chunks)
    assert in_stages == stages * (1 + Fraction(stages - 1, stages * chunks))
    assert max(timeline.peak_memory) == timeline.peak_memory[0]


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 20))
def test_one_chunk_is_1f1b(stages: int, microbatches: int) -> None:
    assert build("interleaved", stages, microbatches, chunks=1) == one_f_one_b(stages, microbatches)


def test_two_chunks_unless_told() -> None:
    assert build("interleaved", 4, 8) == build("interleaved", 4, 8, chunks=2)


def test_no_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 stage and 1 chunk, not 4 and 0"):
        build("interleaved", 4, 8, chunks=0)
