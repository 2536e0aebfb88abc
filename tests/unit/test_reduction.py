"""Reduction of gradients: cases by hand, a formula, and the bar on the paper's 1.5B profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import parse, random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.lower import lower
from zero_bubble.placement import linear, v_shape
from zero_bubble.profile.rearrange import rearranged
from zero_bubble.program_times import time_program
from zero_bubble.reduction import exposed_reduction, reduction_times
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

BUCKETS = 8


def test_two_buckets_of_one_stage_by_hand() -> None:
    """Three W's of 2 ms from 9 to 15; the last one completes its buckets at 14 and 15."""
    schedule = parse(linear(1), 3, "0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2")
    costs = Costs.uniform(linear(1), 1, 2, 2, t_reduce=8)
    timeline = simulate(schedule, costs)
    plain = exposed_reduction(timeline, 2, reordered=False)
    assert plain.ends == (14 + 8,)
    assert plain.exposed == (7,)
    # Shares of 1 ms: the first bucket is complete at 12 and reduced until 16, the other until 20.
    reordered = exposed_reduction(timeline, 2, reordered=True)
    assert reordered.ends == (12 + 8,)
    assert (reordered.exposed, reordered.behind_barrier) == ((5,), 5)


def test_a_fused_backward_completes_its_buckets_evenly() -> None:
    schedule = parse(linear(1), 1, "0F0 0B0")
    timeline = simulate(schedule, Costs.uniform(linear(1), 1, 2, 2, t_reduce=1))
    assert exposed_reduction(timeline, 4, reordered=True).ends == (5.25,)


def test_chunks_share_the_network() -> None:
    """Chunk 1 is complete at 4 and reduced until 14; chunk 0, complete at 6, waits for it."""
    schedule = parse(v_shape(1), 1, "0F0 1F0 1I0 1W0 0I0 0W0")
    timeline = simulate(schedule, Costs.uniform(v_shape(1), 1, 1, 1, t_reduce=10))
    assert exposed_reduction(timeline, 1, reordered=False).ends == (24,)


@settings(max_examples=40)
@given(
    name=st.sampled_from(["zb-h1", "zb-h2"]),
    stages=st.integers(2, 6),
    more=st.integers(0, 6),
    buckets=st.integers(1, 9),
    reduction=st.floats(0.01, 20),
    t_w=st.floats(0.2, 2),
)
def test_what_a_tail_hides(
    name: str, stages: int, more: int, buckets: int, reduction: float, t_w: float
) -> None:
    """With a tail of k W's and n buckets: R + aW/n - kW is exposed, at least the last bucket's R/n.

    The first bucket is complete a shares after the last B. That is the last microbatch's alone
    where W's stand between the last F and the last B: they can be shares of this bucket.
    """
    schedule = build(name, stages, 2 * stages + more)
    costs = Costs.uniform(linear(stages), 1, 1, t_w, t_reduce=reduction)
    timeline = simulate(schedule, costs)
    plain = exposed_reduction(timeline, buckets, reordered=False).exposed
    reordered = exposed_reduction(timeline, buckets, reordered=True).exposed
    for row, before, after in zip(schedule.passes, plain, reordered, strict=True):
        hidden = t_w - t_w / buckets
        assert before == pytest.approx(max(reduction / buckets, reduction - hidden))
        kinds = "".join(one.kind for one in row)
        tail = len(kinds) - len(kinds.rstrip("W"))
        last = kinds[kinds.rindex("F") :].count("W")
        first = last - min((last - tail) * buckets, last - 1)
        hidden = tail * t_w - first * t_w / buckets
        assert after == pytest.approx(max(reduction / buckets, reduction - hidden))


@settings(max_examples=40)
@given(
    schedule=st.builds(
        random_order,
        st.sampled_from([linear(3), v_shape(2), v_shape(3)]),
        st.integers(1, 4),
        st.integers(0, 10**6),
    ),
    seed=st.integers(0, 10**6),
)
def test_a_program_takes_as_long_as_its_schedule(schedule: Schedule, seed: int) -> None:
    costs = random_costs(schedule.placement, seed)
    times = [(one.start, one.end) for row in simulate(schedule, costs).spans for one in row]
    rows = time_program(lower(schedule), costs)
    assert [(one.start, one.end) for row in rows for one in row] == pytest.approx(times)


def test_a_ring_sends_twice_what_a_scatter_does() -> None:
    # 8 ranks: 7/8 of 4e9 bytes at 7e9 bytes a second is half a second.
    assert reduction_times(((4e9, 2e9),), ranks=8, bandwidth=7e9) == ((1000, 500),)
    assert reduction_times(((4e9,),), ranks=8, bandwidth=7e9, scatter=True) == ((500,),)
    assert reduction_times(((4e9,),), ranks=1, bandwidth=7e9) == ((0,),)
    with pytest.raises(ValueError, match="ranks must be at least 1, not 0"):
        reduction_times(((4e9,),), ranks=0, bandwidth=7e9)
    with pytest.raises(ValueError, match="bandwidth must be above 0"):
        reduction_times(((4e9,),), ranks=2, bandwidth=0)


def test_what_is_missing_is_said() -> None:
    timeline = simulate(build("zb-h1", 2, 4), Costs.uniform(linear(2), 1, 1, 1))
    with pytest.raises(ValueError, match="t_reduce"):
        exposed_reduction(timeline, 4, reordered=True)
    costs = Costs.uniform(linear(2), 1, 1, 1, t_reduce=1)
    with pytest.raises(ValueError, match="buckets must be at least 1, not 0"):
        exposed_reduction(simulate(timeline.schedule, costs), 0, reordered=True)


class TestOfThePaper:
    """The 1.5B profile, 8 stages, 32 microbatches; a stage's reduction takes as long as 8 W's."""

    profile = paper_profiles()[1]
    linear_costs = profile.costs
    v_costs = rearranged(profile.costs, linear(8), v_shape(8))

    def exposed(self, schedule: Schedule, costs: Costs) -> tuple[tuple[float, ...], ...]:
        """Without reordering and with it: the sum over stages, behind a barrier; in W's."""
        assert (self.profile.model, self.profile.microbatches) == ("1.5B", 32)
        w = self.profile.costs.t_w[0][0]
        times = tuple((8 * w / len(row),) * len(row) for row in costs.t_w)
        timeline = simulate(schedule, replace(costs, t_reduce=times))
        found = [exposed_reduction(timeline, BUCKETS, reordered=one) for one in (False, True)]
        return tuple((sum(one.exposed) / w, one.behind_barrier / w) for one in found)

    @pytest.mark.slow
    def test_with_twice_the_memory_a_seventh_is_left_of_an_iteration(self) -> None:
        problem = Problem.of(linear(8), self.linear_costs, 32, 16.0)
        schedule = auto(problem, effort="quick").schedule
        (total, iteration), (total_reordered, reordered) = self.exposed(schedule, self.linear_costs)
        assert iteration == pytest.approx(7.125)  # 8 less what a W hides, and its first eighth
        assert reordered == pytest.approx(1)  # the last bucket
        assert total_reordered <= total / 2

    def test_with_a_v_less_than_half_is_left_of_an_iteration(self) -> None:
        schedule = build("zb-v", 8, 32, costs=self.v_costs)
        (total, iteration), (total_reordered, reordered) = self.exposed(schedule, self.v_costs)
        assert reordered <= iteration / 2
        assert total_reordered <= total / 2

    @pytest.mark.parametrize(("name", "share"), [("zb-h1", 0.525), ("zb-h2", 0.36)])
    def test_behind_a_barrier_stage_0_stays(self, name: str, share: float) -> None:
        """One W follows its last B, so nothing of it can be hidden; it is the last to end."""
        schedule = build(name, 8, 32)
        assert [one.kind for one in schedule.passes[0]][-2:] == [Kind.B, Kind.W]
        (total, iteration), (total_reordered, reordered) = self.exposed(schedule, self.linear_costs)
        assert iteration == reordered == pytest.approx(7.125)
        assert total_reordered / total == pytest.approx(share, abs=0.005)
