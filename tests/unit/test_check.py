"""The checker accepts what is legal and names the pass that is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, parse, random_order
from zero_bubble.builders import one_f_one_b, zb_h1, zb_h2
from zero_bubble.check import Rule, bit_identical_order, check
from zero_bubble.costs import Costs
from zero_bubble.placement import interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule

SEEDS = st.integers(0, 10**6)


def edited(schedule: Schedule, stage: int, row: list[Pass]) -> Schedule:
    rows = list(schedule.passes)
    rows[stage] = tuple(row)
    return Schedule(schedule.placement, schedule.num_microbatches, tuple(rows))


def texts(schedule: Schedule) -> list[str]:
    return [str(one) for one in check(schedule)]


@settings(max_examples=60)
@given(seed=SEEDS, microbatches=st.integers(1, 4), stages=st.integers(1, 4))
def test_any_executable_order_is_legal(seed: int, microbatches: int, stages: int) -> None:
    for placement in (linear(stages), v_shape(stages), interleaved(stages, 2)):
        assert check(random_order(placement, microbatches, seed)) == []


@given(seed=SEEDS, data=st.data())
def test_a_dropped_pass_is_missed(seed: int, data: st.DataObject) -> None:
    schedule = random_order(v_shape(3), 3, seed)
    stage = data.draw(st.integers(0, 2))
    row = list(schedule.passes[stage])
    dropped = row.pop(data.draw(st.integers(0, len(row) - 1)))
    # Without its fused backward, a microbatch has neither B nor W.
    kinds = (Kind.B, Kind.W) if dropped.kind is Kind.BW else (dropped.kind,)
    assert texts(edited(schedule, stage, row)) == [
        f"stage {stage}, {Pass(kind, dropped.microbatch, dropped.chunk)}: "
        "count: runs 0 times, not once"
        for kind in kinds
    ]


@given(seed=SEEDS, data=st.data())
def test_a_second_run_is_found(seed: int, data: st.DataObject) -> None:
    schedule = random_order(v_shape(3), 3, seed)
    stage = data.draw(st.integers(0, 2))
    row = list(schedule.passes[stage])
    index = data.draw(st.integers(0, len(row) - 1))
    row.insert(index, row[index])
    found = texts(edited(schedule, stage, row))
    assert f"stage {stage}, {row[index]}: count: runs 2 times, not once" in found


@given(seed=SEEDS, data=st.data())
def test_a_chunk_s_own_order_turned_round_is_found(seed: int, data: st.DataObject) -> None:
    schedule = random_order(interleaved(3, 2), 3, seed)
    stage = data.draw(st.integers(0, 2))
    row = list(schedule.passes[stage])
    forward = next(one for one in row if one.kind is Kind.F)
    backward = next(
        one
        for one in row
        if one.kind in (Kind.B, Kind.BW)
        and (one.microbatch, one.chunk) == (forward.microbatch, forward.chunk)
    )
    first, second = row.index(forward), row.index(backward)
    row[first], row[second] = row[second], row[first]
    found = texts(edited(schedule, stage, row))
    assert f"stage {stage}, {backward}: order: runs before {forward}" in found


def test_a_pass_moved_to_another_stage_is_found_on_both() -> None:
    schedule = zb_h1(2, 2)
    first, second = map(list, schedule.passes)
    moved = first.pop()
    rows = (tuple(first), (*second, moved))
    assert texts(Schedule(schedule.placement, 2, rows)) == [
        "stage 0, 0W1: count: runs 0 times, not once",
        "stage 1, 0W1: count: runs 2 times, not once",
    ]


def test_weights_before_their_gradient() -> None:
    assert texts(parse(linear(1), 1, "0F0 0W0 0I0")) == [
        "stage 0, 0W0: order: runs before 0I0",
    ]


def test_split_and_fused_backward_together() -> None:
    found = texts(parse(linear(1), 1, "0F0 0B0 0I0 0W0"))
    assert found == ["stage 0, 0B0: count: runs beside 0I0: either B and W or BW is needed"]


def test_a_batch_without_any_backward() -> None:
    assert texts(parse(linear(1), 1, "0F0")) == [
        "stage 0, 0I0: count: runs 0 times, not once",
        "stage 0, 0W0: count: runs 0 times, not once",
    ]


def test_chunks_and_microbatches_that_do_not_exist() -> None:
    assert texts(parse(linear(1), 1, "0F0 0B0 1F0 0F3")) == [
        "stage 0, 1F0: range: chunk 1 is not one of this stage's 0..0",
        "stage 0, 0F3: range: microbatch 3 is not one of 0..0",
    ]


def test_a_deadlock_across_stages_names_each_waiting_pass() -> None:
    schedule = parse(linear(2), 2, "0F0 0B0 0F1 0B1\n0F0 0F1 0B0 0B1")
    assert texts(schedule) == [
        "stage 0, 0B0: deadlock: waits for ever for 0I0 of stage 1",
        "stage 1, 0F1: deadlock: waits for ever for 0F1 of stage 0",
    ]


def test_a_deadlock_around_the_turn_of_a_v() -> None:
    schedule = parse(v_shape(2), 1, "0F0 1F0 1B0 0B0\n1F0 0F0 1B0 0B0")
    assert texts(schedule) == [
        "stage 0, 1F0: deadlock: waits for ever for 1F0 of stage 1",
        "stage 1, 1F0: deadlock: waits for ever for 0F0 of stage 1",
    ]


def test_memory_limits() -> None:
    schedule = one_f_one_b(3, 6)
    assert check(schedule, memory_limit=3) == []
    assert check(schedule, memory_limit=[3, 2, 1]) == []
    (found,) = check(schedule, memory_limit=[3, 1.5, 1])
    assert str(found) == "stage 1, 0F1: memory: holds 2, limit 1.5"


def test_the_papers_memory_bounds_hold_for_any_share_of_w() -> None:
    for share in (0.0, 0.3, 1.0):
        costs = Costs.uniform(linear(5), 1, 1, 1, m_b=100, m_w=100 * share)
        assert check(zb_h1(5, 20), costs=costs, memory_limit=500) == []
        assert check(zb_h2(5, 20), costs=costs, memory_limit=900) == []
        assert check(zb_h2(5, 20), costs=costs, memory_limit=899)[0].rule is Rule.MEMORY


def test_limits_and_costs_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="2 memory limits for 3 stages"):
        check(zb_h1(3, 3), memory_limit=[1, 2])
    with pytest.raises(ValueError, match="the costs are for stages"):
        check(zb_h1(3, 3), costs=Costs.uniform(linear(2), 1, 1, 1))


@pytest.mark.parametrize("split", [True, False])
def test_ascending_microbatches_are_bit_identical(split: bool) -> None:
    for placement in (linear(3), v_shape(3), interleaved(3, 2)):
        assert bit_identical_order(all_forwards_first(placement, 4, split=split)) == []


def test_a_descending_order_is_legal_but_noted() -> None:
    schedule = parse(linear(1), 2, "0F0 0F1 0I0 0I1 0W1 0W0")
    assert check(schedule) == []
    assert [str(one) for one in bit_identical_order(schedule)] == [
        "stage 0, 0W0: not bit-identical: runs after 0W1: W's of a chunk must ascend"
    ]


def test_a_fused_backward_counts_as_both_halves() -> None:
    schedule = parse(linear(1), 2, "0F0 0F1 0B1 0I0 0W0")
    found = [str(one) for one in bit_identical_order(schedule)]
    assert [one.split(":")[0] for one in found] == ["stage 0, 0I0", "stage 0, 0W0"]
