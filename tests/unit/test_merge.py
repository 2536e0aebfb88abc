"""One profile from the reports of all ranks: whose numbers count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zero_bubble.costs import Costs
from zero_bubble.placement import linear, v_shape
from zero_bubble.profile.merge import change, merge, outlier_line
from zero_bubble.profile.profile import Profile
from zero_bubble.profile.report import RankReport
from zero_bubble.schedule import Kind

TWO = linear(2)
JOB = {"hidden_size": 64}


def report(rank: int, stage: int, ms: float = 1.0, **fields: Any) -> RankReport:
    """F, B and W of ``ms``, twice and three times that; memory unless told otherwise."""
    given: dict[str, Any] = {
        "rank": rank,
        "stage": stage,
        "batches": 5,
        "times": {Kind.F: (ms,), Kind.B: (2 * ms,), Kind.W: (3 * ms,)},
        "m_b": (100.0,),
        "m_w": (40.0,),
    }
    return RankReport(**(given | fields))


def test_the_slowest_rank_of_a_stage_counts_kind_by_kind() -> None:
    """Rank 0 has the slowest F, rank 2 the slowest B and W."""
    reports = [
        report(0, 0, times={Kind.F: (5.0,), Kind.B: (2.0,), Kind.W: (1.0,)}),
        report(2, 0, times={Kind.F: (4.0,), Kind.B: (6.0,), Kind.W: (3.0,)}),
        report(1, 1, 7.0),
    ]
    profile = merge(TWO, reports, JOB)
    costs = profile.costs
    assert (costs.t_f, costs.t_b, costs.t_w) == (
        ((5.0,), (7.0,)),
        ((6.0,), (14.0,)),
        ((3.0,), (21.0,)),
    )
    assert profile.placement == TWO
    assert profile.job == JOB


def test_chunks_keep_their_order_and_are_compared_one_by_one() -> None:
    def of_chunks(rank: int, stage: int, *ms: float) -> RankReport:
        return report(
            rank, stage, times=dict.fromkeys((Kind.F, Kind.B, Kind.W), ms), m_b=ms, m_w=ms
        )

    reports = [of_chunks(0, 0, 1.0, 4.0), of_chunks(1, 0, 3.0, 2.0), of_chunks(2, 1, 9.0, 8.0)]
    costs = merge(v_shape(2), reports, JOB).costs
    assert costs.t_b == costs.m_b == costs.m_w == ((3.0, 4.0), (9.0, 8.0))


def test_most_memory_and_least_room_count() -> None:
    """Of stage 0, rank 0 keeps most and rank 1 has least room; M_B is at least what W keeps."""
    reports = [
        report(0, 0, m_b=(200.0,), m_w=(50.0,), room=9e9),
        report(1, 0, m_b=(100.0,), m_w=(80.0,), room=4e9),
        report(2, 1, m_b=(100.0,), m_w=(120.0,), room=None),
        report(3, 1, m_b=(90.0,), m_w=(10.0,), room=6e9),
    ]
    profile = merge(TWO, reports, JOB)
    assert profile.costs.m_b == ((200.0,), (120.0,))
    assert profile.costs.m_w == ((80.0,), (120.0,))
    assert profile.room == (4e9, 6e9)


def test_recomputation_is_a_pass_of_its_own_where_all_ranks_timed_it() -> None:
    def of(rank: int, stage: int, ms: float, m_r: float) -> RankReport:
        times = {Kind.F: (1.0,), Kind.B: (2.0,), Kind.W: (3.0,), Kind.R: (ms,)}
        return report(rank, stage, times=times, m_r=(m_r,))

    reports = [of(0, 0, 0.5, 7.0), of(1, 0, 0.7, 5.0), of(2, 1, 0.6, 6.0)]
    profile = merge(TWO, reports, JOB)
    assert (profile.costs.t_r, profile.costs.m_r) == (((0.7,), (0.6,)), ((7.0,), (6.0,)))
    assert profile.costs.m_b == ((100.0,), (100.0,))
    again = [replace(one, m_b=(), m_w=(), m_r=()) for one in reports]
    drifted = merge(TWO, again, JOB, before=profile).costs
    assert drifted == profile.costs
    longer = [replace(one, times={**one.times, Kind.R: (1.4,)}) for one in reports]
    assert change(profile.costs, merge(TWO, longer, JOB).costs) == pytest.approx(1.4 / 0.6 - 1)
    without = merge(TWO, [report(0, 0), report(1, 1)], JOB).costs
    assert (without.t_r, without.m_r) == (None, None)


def test_a_stage_with_nothing_to_compute_again_takes_no_time_for_it() -> None:
    """Its R's are left out by a search; those of the other stages are not forgotten for that."""
    times = {Kind.F: (1.0,), Kind.B: (2.0,), Kind.W: (3.0,), Kind.R: (0.5,)}
    reports = [report(0, 0), report(1, 1, times=times, m_r=(7.0,))]
    costs = merge(TWO, reports, JOB).costs
    assert (costs.t_r, costs.m_r) == (((0.0,), (0.5,)), ((100.0,), (7.0,)))


def test_room_that_no_rank_knows_stays_unknown() -> None:
    assert merge(TWO, [report(0, 0), report(1, 1)], JOB).room == (None, None)


def test_a_message_takes_the_median_of_what_was_measured() -> None:
    """Three replicas measured 0 to 1; one of them is far off. One measured the way back."""
    reports = [
        report(0, 0, edges=((0, 1, 0.2), (1, 0, 0.5))),
        report(1, 0, edges=((0, 1, 0.3),)),
        report(2, 0, edges=((0, 1, 9.0),)),
        report(3, 1),
    ]
    assert merge(TWO, reports, JOB).costs.t_edges == ((0, 1, 0.3), (1, 0, 0.5))


def test_the_iteration_is_the_median_of_ranks_that_know_it() -> None:
    reports = [report(0, 0, iteration_ms=50.0), report(1, 1), report(2, 1, iteration_ms=70.0)]
    assert merge(TWO, reports, JOB).iteration_ms == 60.0
    assert merge(TWO, [report(0, 0), report(1, 1)], JOB).iteration_ms == 0.0


def test_what_a_later_round_does_not_measure_is_taken_from_the_profile_before() -> None:
    costs = Costs.uniform(TWO, 1.0, 1.0, 1.0, m_b=300.0, m_w=70.0)
    before = Profile(
        placement=TWO, costs=replace(costs, t_edges=((0, 1, 0.7), (1, 0, 0.9))), room=(5.0, None)
    )
    short = [report(0, 0, 2.0, m_b=(), m_w=()), report(1, 1, 3.0, m_b=(), m_w=())]
    after = merge(TWO, short, JOB, before=before)
    assert after.costs.t_f == ((2.0,), (3.0,))
    assert after.costs.m_b == ((300.0,), (300.0,))
    assert after.costs.m_w == ((70.0,), (70.0,))
    assert after.costs.t_edges == before.costs.t_edges
    assert after.room == (5.0, None)


def test_what_a_later_round_does_measure_replaces_the_profile_before() -> None:
    costs = Costs.uniform(TWO, 1.0, 1.0, 1.0, m_b=300.0, m_w=70.0)
    before = Profile(
        placement=TWO, costs=replace(costs, t_edges=((0, 1, 0.7), (1, 0, 0.9))), room=(5.0, 5.0)
    )
    whole = [report(0, 0, edges=((0, 1, 0.1), (1, 0, 0.1)), room=8.0), report(1, 1, room=9.0)]
    after = merge(TWO, whole, JOB, before=before)
    assert after.costs.m_b == ((100.0,), (100.0,))
    assert after.costs.t_edges == ((0, 1, 0.1), (1, 0, 0.1))
    assert after.room == (8.0, 9.0)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="stage 1 has no report"):
        merge(TWO, [report(0, 0)], JOB)
    fused = report(4, 1, times={Kind.F: (1.0,), Kind.BW: (1.0,)})
    with pytest.raises(ValueError, match="rank 4, stage 1: no B was timed"):
        merge(TWO, [report(0, 0), fused], JOB)
    with pytest.raises(ValueError, match="no rank has measured memory, and there is no profile"):
        merge(TWO, [report(0, 0, m_b=()), report(1, 1, m_b=())], JOB)


@pytest.mark.parametrize(
    ("table", "values", "expected"),
    [
        ("t_f", (11.0, 10.0), 0.1),
        ("t_b", (20.0, 15.0), 0.25),  # faster counts like slower
        ("t_w", (30.0, 30.3), 0.01),
        ("t_f", (10.0, 10.0), 0.0),
    ],
)
def test_change_is_the_greatest_of_any_pass(
    table: str, values: tuple[float, float], expected: float
) -> None:
    before = Costs.uniform(TWO, 10.0, 20.0, 30.0)
    moved: dict[str, Any] = {table: tuple((one,) for one in values)}
    after = replace(before, **moved)
    assert change(before, after) == pytest.approx(expected)


def test_change_from_nothing_is_none() -> None:
    """A stage without layers has F's that take no time at all."""
    none, some = Costs.uniform(TWO, 0.0, 0.0, 0.0), Costs.uniform(TWO, 1.0, 1.0, 1.0)
    assert change(none, some) == 0.0


def test_outliers_are_told_of_with_the_worst_and_its_rank() -> None:
    even, uneven = report(0, 0), report(3, 1, outliers=2, worst=1.8)
    worst = report(2, 0, outliers=1, worst=4.25)
    assert outlier_line([even]) is None
    line = outlier_line([even, uneven, worst])
    assert line is not None
    assert "on 2 of 3 ranks" in line
    assert "the worst 4.2 times, on rank 2 (stage 0)" in line
