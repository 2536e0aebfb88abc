"""Times and memory of a schedule, against a second way to compute them."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, parse, random_costs, random_order
from zero_bubble.builders import zb_h2
from zero_bubble.check import check
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.simulate import simulate

PLACEMENTS = st.one_of(
    st.builds(linear, st.integers(1, 5)),
    st.builds(v_shape, st.integers(1, 4)),
    st.builds(interleaved, st.integers(1, 4), st.integers(2, 3)),
)
SEEDS = st.integers(0, 10**6)


def starts_by_relaxation(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Earliest starts by raising all of them until every constraint holds."""
    place = schedule.placement
    starts = [[0.0] * len(row) for row in schedule.passes]
    at: dict[tuple[Kind, int, int, int], tuple[int, int]] = {
        (Kind.B if one.kind is Kind.BW else one.kind, stage, one.chunk, one.microbatch): (
            stage,
            index,
        )
        for stage, row in enumerate(schedule.passes)
        for index, one in enumerate(row)
    }

    def end(stage: int, index: int) -> float:
        one = schedule.passes[stage][index]
        return starts[stage][index] + costs.duration(one.kind, stage, one.chunk)

    changed = True
    while changed:
        changed = False
        for stage, row in enumerate(schedule.passes):
            for index, one in enumerate(row):
                earliest = end(stage, index - 1) if index else 0.0
                before = place.before(stage, one.chunk)
                after = place.after(stage, one.chunk)
                if one.kind is Kind.F:
                    needed = (Kind.F, *before) if before else None
                elif one.kind is Kind.W:
                    needed = (Kind.B, stage, one.chunk)
                else:
                    needed = (Kind.B, *after) if after else (Kind.F, stage, one.chunk)
                if needed is not None:
                    source = at[(*needed, one.microbatch)]
                    earliest = max(earliest, end(*source) + costs.comm(source[0], stage))
                if earliest > starts[stage][index]:
                    starts[stage][index] = earliest
                    changed = True
    return starts


@settings(max_examples=60)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 4), order=SEEDS, cost=SEEDS)
def test_starts_are_the_earliest_possible(
    placement: Placement, microbatches: int, order: int, cost: int
) -> None:
    schedule, costs = random_order(placement, microbatches, order), random_costs(placement, cost)
    timeline = simulate(schedule, costs)
    expected = starts_by_relaxation(schedule, costs)
    for spans, starts in zip(timeline.spans, expected, strict=True):
        assert [span.start for span in spans] == pytest.approx(starts)


@settings(max_examples=60)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 4), order=SEEDS, cost=SEEDS)
def test_simulator_and_checker_agree_on_memory(
    placement: Placement, microbatches: int, order: int, cost: int
) -> None:
    schedule, costs = random_order(placement, microbatches, order), random_costs(placement, cost)
    peaks = simulate(schedule, costs).peak_memory
    assert check(schedule, costs=costs, memory_limit=[peak * 1.0001 for peak in peaks]) == []
    tight = check(schedule, costs=costs, memory_limit=[peak * 0.999 for peak in peaks])
    assert [one.stage for one in tight] == list(range(placement.num_stages))


def test_a_timeline_by_hand() -> None:
    schedule = parse(linear(2), 2, "0F0 0F1 0I0 0W0 0I1 0W1\n0F0 0I0 0F1 0I1 0W0 0W1")
    timeline = simulate(schedule, Costs.uniform(linear(2), 2, 3, 1, 0.5, m_b=10, m_w=4))
    starts = [[(str(one.what), one.start) for one in row] for row in timeline.spans]
    assert starts == [
        [("0F0", 0), ("0F1", 2), ("0I0", 8), ("0W0", 11), ("0I1", 13), ("0W1", 16)],
        [("0F0", 2.5), ("0I0", 4.5), ("0F1", 7.5), ("0I1", 9.5), ("0W0", 12.5), ("0W1", 13.5)],
    ]
    assert timeline.cost == 17
    assert timeline.work == (12, 12)
    assert timeline.idle == (5, 5)
    assert timeline.bubble_rate == pytest.approx(5 / 17)
    assert timeline.peak_memory == (20, 14)
    assert timeline.peak_weight_store == (1, 2)


def test_unequal_stages_are_measured_by_the_busiest() -> None:
    costs = Costs(
        t_f=((1.0,), (3.0,)),
        t_b=((1.0,), (3.0,)),
        t_w=((1.0,), (3.0,)),
        m_b=((1.0,), (1.0,)),
        m_w=((1.0,), (1.0,)),
    )
    schedule = all_forwards_first(linear(2), 3, split=True)
    timeline = simulate(schedule, costs)
    assert timeline.work == (9, 27)
    assert timeline.bubble_rate == pytest.approx((timeline.cost - 27) / timeline.cost)


def test_the_turn_of_a_v_takes_no_message() -> None:
    schedule = parse(v_shape(1), 1, "0F0 1F0 1B0 0B0")
    assert simulate(schedule, Costs.uniform(v_shape(1), 1, 1, 1, t_comm=9)).cost == 6


def test_a_deadlock_says_who_waits_for_what() -> None:
    schedule = parse(linear(2), 2, "0F0 0B0 0F1 0B1\n0F0 0F1 0B0 0B1")
    with pytest.raises(ValueError, match="stage 0 waits at 0B0 for 0I0 of stage 1") as error:
        simulate(schedule, Costs.uniform(linear(2), 1, 1, 1))
    assert "stage 1 waits at 0F1 for 0F1 of stage 0" in str(error.value)


def test_a_pass_of_no_chunk_or_microbatch_is_named() -> None:
    costs = Costs.uniform(linear(1), 1, 1, 1)
    for text in ("1F0", "0F7"):
        with pytest.raises(ValueError, match=f"stage 0 has the pass {text}"):
            simulate(parse(linear(1), 2, text), costs)


def test_costs_of_another_placement_are_refused() -> None:
    with pytest.raises(ValueError, match="the costs are for stages"):
        simulate(zb_h2(4, 4), Costs.uniform(linear(3), 1, 1, 1))


def test_a_large_schedule_is_quick() -> None:
    schedule, costs = zb_h2(32, 256), Costs.uniform(linear(32), 1, 1, 1)
    begin = time.process_time()
    simulate(schedule, costs)
    assert time.process_time() - begin < 2  # 0.15 s on an idle machine
