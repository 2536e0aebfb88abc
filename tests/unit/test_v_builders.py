"""The V schedules: no bubble at 1F1B's memory, half of it at half, two thirds at a third."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.builders import build
from zero_bubble.check import bit_identical_order, check
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs, paper_v_profiles
from zero_bubble.lower import lower
from zero_bubble.placement import interleaved, linear, v_shape
from zero_bubble.simulate import Timeline, simulate

STAGES = range(2, 17)
PUBLISHED_MICROBATCHES: dict[str, Callable[[int], int]] = {
    # Paper, section 6; the others as published with "Pipeline Parallelism with Controllable
    # Memory" (arXiv 2405.15362).
    "zb-v": lambda p: p,
    "v-half": lambda p: (p + 2) // 2,
    "v-min": lambda p: (p + 4) // 3,
}
NAMES = list(PUBLISHED_MICROBATCHES)


def at_equal_times(name: str, stages: int, microbatches: int) -> Timeline:
    """A stage's F, B and W take 2 each; its two chunks keep 1 M_B together."""
    schedule = build(name, stages, microbatches)
    held = len(schedule.placement.positions[0])
    costs = Costs.uniform(schedule.placement, *(2 / held,) * 3, m_b=1 / held)
    return simulate(schedule, costs)


@pytest.mark.parametrize("stages", STAGES)
def test_zb_v_has_no_bubble_at_the_memory_of_1f1b(stages: int) -> None:
    for microbatches in (2 * stages - 1, 2 * stages, 3 * stages + 1):
        timeline = at_equal_times("zb-v", stages, microbatches)
        assert timeline.cost == 6 * microbatches
        assert set(timeline.idle) == {0.0}
        assert max(timeline.peak_memory) == stages


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [1, *STAGES])
def test_peaks_are_the_published_ones(name: str, stages: int) -> None:
    peak = PUBLISHED_MICROBATCHES[name](stages)
    for microbatches in (stages, 3 * stages):
        assert max(at_equal_times(name, stages, microbatches).peak_memory) == peak
    assert max(at_equal_times(name, stages, 1).peak_memory) == 1


@pytest.mark.parametrize(("name", "share"), [("v-half", 1 / 2), ("v-min", 2 / 3)])
@pytest.mark.parametrize("stages", STAGES)
def test_bubbles_are_below_the_published_share_of_1f1b_s(
    name: str, share: float, stages: int
) -> None:
    """1F1B's is (p-1)(T_F + T_B + T_W) (paper, Table 2)."""
    for microbatches in (stages, 3 * stages):
        bubble = at_equal_times(name, stages, microbatches).cost - 6 * microbatches
        assert bubble < share * 6 * (stages - 1)


@pytest.mark.parametrize("stages", STAGES)
def test_the_bubbles_that_the_docstrings_state(stages: int) -> None:
    half = at_equal_times("v-half", stages, 2 * stages).cost - 12 * stages
    assert half == (3 * stages - 4 if stages % 2 else max(0, 3 * stages - 7))
    third = at_equal_times("v-min", stages, 2 * stages).cost - 12 * stages
    assert third <= 4 * stages - 5


@settings(max_examples=40)
@given(
    name=st.sampled_from(NAMES),
    stages=st.integers(1, 8),
    microbatches=st.integers(1, 20),
    seed=st.integers(0, 10**6),
)
def test_legal_in_order_and_never_worse_for_knowing_the_costs(
    name: str, stages: int, microbatches: int, seed: int
) -> None:
    costs = random_costs(v_shape(stages), seed)
    in_flight = PUBLISHED_MICROBATCHES[name](stages)
    plain = build(name, stages, microbatches)
    fitted = build(name, stages, microbatches, costs=costs)
    assert check(plain, memory_limit=2 * in_flight) == []
    # Each chunk in its own unit: what M_B is makes no difference to the order.
    units = Costs(
        t_f=costs.t_f,
        t_b=costs.t_b,
        t_w=costs.t_w,
        m_b=tuple((1.0, 1.0) for _ in costs.m_b),
        m_w=tuple(
            tuple(part / whole for part, whole in zip(*rows, strict=True))
            for rows in zip(costs.m_w, costs.m_b, strict=True)
        ),
    )
    assert check(fitted, costs=units, memory_limit=2 * in_flight) == []
    for schedule in (plain, fitted):
        assert schedule.name == name
        assert bit_identical_order(schedule) == []
        assert check_program(lower(schedule)) == []
    assert simulate(fitted, costs).cost <= simulate(plain, costs).cost * (1 + 1e-9)


@pytest.mark.parametrize("row", [0, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_zb_v_beside_the_paper_s_table_8(row: int) -> None:
    profile = paper_v_profiles()[row]
    schedule = build("zb-v", profile.stages, profile.microbatches, costs=profile.costs)
    assert check(schedule, costs=profile.costs, memory_limit=profile.stages) == []
    rate = simulate(schedule, profile.costs).bubble_rate
    assert rate <= profile.bubble_rates["zb-v"] + 0.003


def test_times_matter_to_v_half() -> None:
    """Where messages take a tenth of F, an order for equal times is a bad one."""
    profile = paper_v_profiles()[0]
    size = profile.stages, profile.microbatches
    fitted = simulate(build("v-half", *size, costs=profile.costs), profile.costs)
    plain = simulate(build("v-half", *size), profile.costs)
    assert fitted.bubble_rate < plain.bubble_rate - 0.05


@pytest.mark.parametrize("name", NAMES)
def test_costs_of_another_placement_are_refused(name: str) -> None:
    for placement in (linear(4), interleaved(4, 3), v_shape(3)):
        with pytest.raises(ValueError, match="profile the placement that the schedule uses"):
            build(name, 4, 8, costs=Costs.uniform(placement, 1, 1, 1))


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 8])
def test_behind_a_barrier_a_v_idles_half_as_long_as_zb_h1_and_zb_h2(stages: int) -> None:
    """All stages starting and ending together, as before an optimizer's step that waits for all."""
    microbatches = 3 * stages
    idle = {}
    for name in ("zb-h1", "zb-h2", "zb-v"):
        schedule = build(name, stages, microbatches)
        one = 1 / schedule.placement.num_chunks(0)  # T of a stage is 1
        timeline = simulate(schedule, Costs.uniform(schedule.placement, one, one, one))
        end = max(row[-1].end for row in timeline.spans)
        idle[name] = end - 3 * microbatches
    whole = stages - 1
    assert idle == pytest.approx({"zb-h1": whole, "zb-h2": whole, "zb-v": whole / 2})
