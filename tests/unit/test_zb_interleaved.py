"""Interleaved ZB has the order and memory of interleaved 1F1B, and little of its bubble."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_bubble.builders import build, zb_h1, zb_interleaved
from zero_bubble.check import bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs
from zero_bubble.export.pytorch_csv import load_csv
from zero_bubble.lower import lower
from zero_bubble.placement import interleaved
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import Timeline, simulate

SIZES = {
    "stages": st.integers(1, 8),
    "chunks": st.integers(1, 4),
    "microbatches": st.integers(1, 20),
}
WHOLE = st.integers(1, 9)


def at_equal_times(schedule: Schedule) -> Timeline:
    """Every pass takes 1 ms, messages take none, a chunk holds 1 a microbatch."""
    return simulate(schedule, Costs.uniform(schedule.placement, 1, 1, 1))


def span(timeline: Timeline) -> float:
    """From the first start to the last end on any stage, in ms."""
    return max(row[-1].end for row in timeline.spans)


def test_two_stages_of_two_chunks_as_drawn() -> None:
    assert str(zb_interleaved(2, 4)) == (
        "0F0 0F1 1F0 1F1 0F2 1I0 1W0 0F3 1I1 1W1 1F2 0I0 0W0 1F3 0I1 0W1 "
        "1I2 1W2 1I3 1W3 0I2 0W2 0I3 0W3\n"
        "0F0 0F1 1F0 1I0 1F1 1I1 0F2 0I0 1W0 0F3 0I1 1W1 1F2 1I2 0W0 1F3 1I3 0W1 "
        "0I2 1W2 0I3 1W3 0W2 0W3"
    )


@settings(max_examples=80)
@given(**SIZES)
def test_forwards_and_backwards_are_those_of_interleaved_1f1b(
    stages: int, chunks: int, microbatches: int
) -> None:
    ours = build("zb-interleaved", stages, microbatches, chunks=chunks)
    theirs = build("interleaved", stages, microbatches, chunks=chunks)
    assert ours.placement == interleaved(stages, chunks)
    for row, fused in zip(ours.passes, theirs.passes, strict=True):
        assert [one for one in row if one.kind is not Kind.W] == [
            Pass(Kind.B if one.kind is Kind.BW else one.kind, one.microbatch, one.chunk)
            for one in fused
        ]


@settings(max_examples=60)
@given(**SIZES)
def test_every_size_is_legal_in_order_and_its_program_runs(
    stages: int, chunks: int, microbatches: int
) -> None:
    schedule = build("zb-interleaved", stages, microbatches, chunks=chunks)
    assert check(schedule) == []
    assert bit_identical_order(schedule) == []
    assert check_program(lower(schedule)) == []
    assert check_program(lower(schedule, forward_only=True)) == []


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 20))
def test_one_chunk_is_zb_h1(stages: int, microbatches: int) -> None:
    assert build("zb-interleaved", stages, microbatches, chunks=1) == zb_h1(stages, microbatches)


@settings(max_examples=80)
@given(part=st.integers(0, 8), **SIZES)
def test_no_more_memory_than_interleaved_1f1b(
    part: int, stages: int, chunks: int, microbatches: int
) -> None:
    """On the fullest stage, whatever part of M_B stays until W."""
    costs = Costs.uniform(interleaved(stages, chunks), 1, 1, 1, m_b=8, m_w=part)
    split, fused = (
        max(simulate(build(name, stages, microbatches, chunks=chunks), costs).peak_memory)
        for name in ("zb-interleaved", "interleaved")
    )
    assert split <= fused


@given(stages=st.integers(1, 8), chunks=st.integers(2, 4), rounds=st.integers(2, 4))
def test_memory_of_the_literature(stages: int, chunks: int, rounds: int) -> None:
    """(p + (p-1)/v) M_B of interleaved 1F1B, on the first stage."""
    peaks = at_equal_times(zb_interleaved(stages, rounds * stages, chunks)).peak_memory
    assert Fraction(int(peaks[0]), chunks) == stages + Fraction(stages - 1, chunks)
    assert max(peaks) == peaks[0]


@given(stages=st.integers(1, 9), chunks=st.integers(2, 4), rounds=st.integers(1, 4))
def test_bubble_where_p_divides_m(stages: int, chunks: int, rounds: int) -> None:
    """Of its own work: p-4 chunks' passes, p-1 where one group of microbatches is all."""
    microbatches = rounds * stages
    timeline = at_equal_times(zb_interleaved(stages, microbatches, chunks))
    bubble = stages - 1 if rounds == 1 else max(0, stages - 4)
    assert timeline.cost == 3 * chunks * microbatches + bubble


@given(stages=st.integers(1, 9), chunks=st.integers(2, 4), more=st.integers(0, 20))
def test_the_pipeline_is_as_short_as_it_can_be(stages: int, chunks: int, more: int) -> None:
    """The last stage cannot start before p-1 F's; after that it never waits, nor does another."""
    microbatches = stages + more
    timeline = at_equal_times(zb_interleaved(stages, microbatches, chunks))
    assert span(timeline) == 3 * chunks * microbatches + stages - 1
    assert timeline.cost <= 3 * chunks * microbatches + stages - 1


@settings(max_examples=80)
@given(
    stages=st.integers(1, 6),
    chunks=st.integers(2, 4),
    microbatches=st.integers(1, 14),
    times=st.tuples(WHOLE, WHOLE, WHOLE),
    t_comm=st.integers(0, 9),
)
def test_never_slower_than_interleaved_1f1b(
    stages: int, chunks: int, microbatches: int, times: tuple[int, int, int], t_comm: int
) -> None:
    costs = Costs.uniform(interleaved(stages, chunks), *times, t_comm)
    split, fused = (
        simulate(build(name, stages, microbatches, chunks=chunks), costs)
        for name in ("zb-interleaved", "interleaved")
    )
    assert split.cost <= fused.cost
    assert span(split) <= span(fused)


@pytest.mark.parametrize(
    ("stages", "chunks", "rounds"), [*product((2, 3, 4, 6), (2, 3), (1, 2, 4))]
)
def test_never_slower_than_pytorch_s(stages: int, chunks: int, rounds: int, tmp_path: Path) -> None:
    from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

    microbatches = rounds * stages
    named_only = [
        SimpleNamespace(
            stage_index=chunk * stages,
            num_stages=chunks * stages,
            group_size=stages,
            group_rank=0,
            group=None,
            submod=None,
            is_last=False,
        )
        for chunk in range(chunks)
    ]
    path = tmp_path / "one.csv"
    ScheduleInterleavedZeroBubble(named_only, microbatches)._dump_csv(
        str(path), format="compute_only"
    )
    theirs = at_equal_times(load_csv(path))
    ours = at_equal_times(zb_interleaved(stages, microbatches, chunks))
    assert ours.work == theirs.work
    assert ours.cost <= theirs.cost
    assert span(ours) <= span(theirs)


def test_two_chunks_unless_told() -> None:
    assert build("zb-interleaved", 4, 8) == build("zb-interleaved", 4, 8, chunks=2)


def test_no_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 stage and 1 chunk, not 4 and 0"):
        build("zb-interleaved", 4, 8, chunks=0)
