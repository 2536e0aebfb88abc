"""The known schedules are legal, bounded in memory, and cost what the paper says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.builders import (
    BUILDERS,
    Builder,
    build,
    gpipe,
    one_f_one_b,
    zb_h1,
    zb_h2,
)
from zero_bubble.check import bit_identical_order, check
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.simulate import simulate

PARTS = st.integers(0, 64).map(lambda part: part / 64)
SIZES = {"stages": st.integers(1, 9), "microbatches": st.integers(1, 24)}
NAMES = st.sampled_from(list(BUILDERS))
LINEAR_BUILDERS = [name for name, builder in BUILDERS.items() if builder.is_linear]
LINEAR = st.sampled_from(LINEAR_BUILDERS)


def most_held(schedule: Schedule, m_w: float) -> list[float]:
    """Peak memory by looking at each prefix of each stage's order as a set."""
    peaks = []
    for row in schedule.passes:
        peak = 0.0
        for end in range(1, len(row) + 1):
            done = {(one.kind, one.microbatch) for one in row[:end]}
            held = 0.0
            for kind, one in done:
                if kind is Kind.F and (Kind.BW, one) not in done and (Kind.W, one) not in done:
                    held += m_w if (Kind.B, one) in done else 1.0
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def test_small_schedules_as_drawn() -> None:
    assert str(gpipe(2, 2)) == "0F0 0F1 0B0 0B1\n0F0 0F1 0B0 0B1"
    assert str(one_f_one_b(3, 4)) == (
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n"
        "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n"
        "0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3"
    )
    assert str(zb_h1(3, 4)) == (
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n"
        "0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3\n"
        "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0F3 0I3 0W1 0W2 0W3"
    )
    assert str(zb_h2(2, 4)) == (
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3\n"
        "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0F3 0I3 0W1 0W2 0W3"
    )


@given(name=NAMES, **SIZES)
def test_every_size_is_legal_and_accumulates_in_order(
    name: str, stages: int, microbatches: int
) -> None:
    schedule = build(name, stages, microbatches)
    assert check(schedule) == []
    assert bit_identical_order(schedule) == []


@given(m_w=PARTS, **SIZES)
def test_memory_bounds(m_w: float, stages: int, microbatches: int) -> None:
    def worst(name: str) -> float:
        return max(most_held(build(name, stages, microbatches), m_w))

    slack = 1e-9
    assert worst("1f1b") == min(stages, microbatches)
    assert worst("gpipe") == microbatches
    assert worst("zb-h1") <= min(stages, microbatches) + slack
    assert worst("zb-h2") <= min(2 * stages - 1, microbatches) + slack


@given(name=LINEAR, m_w=PARTS, **SIZES)
def test_simulated_memory_is_that_of_the_prefixes(
    name: str, m_w: float, stages: int, microbatches: int
) -> None:
    schedule = build(name, stages, microbatches)
    costs = Costs.uniform(linear(stages), 1, 1, 1, m_w=m_w)
    assert simulate(schedule, costs).peak_memory == pytest.approx(most_held(schedule, m_w))


@pytest.mark.parametrize(
    ("name", "bubble", "memory"), [("1f1b", 9, 4), ("zb-h1", 3, 4), ("zb-h2", 0, 7)]
)
def test_four_stages_of_equal_times(name: str, bubble: float, memory: float) -> None:
    timeline = simulate(build(name, 4, 8), Costs.uniform(linear(4), 1, 1, 1))
    assert timeline.cost == 24 + bubble
    assert max(timeline.peak_memory) == memory


@given(
    stages=st.integers(1, 8),
    more=st.integers(0, 12),
    t_w=st.integers(1, 10),
    over_f=st.integers(0, 5),
    over_b=st.integers(0, 5),
)
def test_bubbles_of_the_paper_s_table_2(
    stages: int, more: int, t_w: int, over_f: int, over_b: int
) -> None:
    """(p-1)(T_F + T_B + k T_W), where W is the shortest and the pipeline can fill."""
    t_f, t_b, microbatches = t_w + over_f, t_w + over_b, 2 * stages - 1 + more
    costs = Costs.uniform(linear(stages), t_f, t_b, t_w)
    for name, factor in {"gpipe": 1, "1f1b": 1, "zb-h1": -1}.items():
        cost = simulate(build(name, stages, microbatches), costs).cost
        bubble = (stages - 1) * (t_f + t_b + factor * t_w)
        assert cost == microbatches * (t_f + t_b + t_w) + bubble


@given(stages=st.integers(1, 8), more=st.integers(0, 12), time=st.integers(1, 10))
def test_zb_h2_has_no_bubble_at_equal_times(stages: int, more: int, time: int) -> None:
    costs = Costs.uniform(linear(stages), time, time, time)
    timeline = simulate(zb_h2(stages, 2 * stages - 1 + more), costs)
    assert timeline.bubble_rate == 0
    assert set(timeline.idle) == {0.0}


@pytest.mark.parametrize("row", range(12))
def test_rates_of_the_paper_s_table_5(row: int) -> None:
    profile = paper_profiles()[row]
    for name in ("1f1b", "zb-h1", "zb-h2"):
        timeline = simulate(build(name, profile.stages, profile.microbatches), profile.costs)
        assert f"{timeline.bubble_rate:.4f}" == f"{profile.bubble_rates[name]:.4f}", name


@pytest.mark.parametrize("name", list(BUILDERS))
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build(name, 0, 4)
    with pytest.raises(ValueError, match="at least 1"):
        build(name, 4, 0)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'zb-h3'; known: gpipe, 1f1b, interleaved, zb-h1, zb-h2"):
        build("zb-h3", 4, 8)


@given(name=NAMES, **SIZES)
def test_a_builder_knows_the_placement_of_its_schedule(
    name: str, stages: int, microbatches: int
) -> None:
    placement = BUILDERS[name].placement(stages)
    assert placement == build(name, stages, microbatches).placement
    if name in LINEAR_BUILDERS:
        assert placement == linear(stages)
    elif stages > 1:
        assert placement != linear(stages)


@given(name=LINEAR, seed=st.integers(0, 10**6), **SIZES)
def test_handcrafted_orders_do_not_depend_on_times(
    name: str, seed: int, stages: int, microbatches: int
) -> None:
    costs = random_costs(linear(stages), seed)
    assert build(name, stages, microbatches, costs=costs) == build(name, stages, microbatches)


@pytest.mark.parametrize("name", LINEAR_BUILDERS)
def test_chunks_are_refused_where_there_is_no_choice(name: str) -> None:
    with pytest.raises(ValueError, match=f"--chunks 2: {name} has a fixed number of chunks"):
        build(name, 4, 8, chunks=2)


def test_a_builder_whose_order_depends_on_times_is_given_them() -> None:
    given: list[Costs | None] = []

    def by_times(stages: int, microbatches: int, costs: Costs | None) -> Schedule:
        given.append(costs)
        return gpipe(stages, microbatches)

    costs = Costs.uniform(linear(2), 1, 1, 1)
    builder = Builder(by_times, takes_costs=True)
    assert builder.build(2, 3, costs=costs) == builder.build(2, 3)
    assert given == [costs, None]
