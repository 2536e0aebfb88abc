"""What a rank reports of its batches: medians, outliers, and the way through JSON."""

from __future__ import annotations

import pytest

from zero_bubble.profile.report import RankReport
from zero_bubble.schedule import Kind

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def test_a_batch_counts_with_the_median_of_its_passes() -> None:
    """Medians of the batches are 2, 4 and 3, so 3; all nine passes together have 4."""
    batches = [{(F, 0): [1.0, 2.0, 9.0]}, {(F, 0): [4.0, 4.0, 5.0]}, {(F, 0): [3.0, 3.0, 5.0]}]
    report = RankReport.of(5, 2, 1, batches)
    assert (report.rank, report.stage, report.batches) == (5, 2, 3)
    assert report.times == {F: (3.0,)}


def test_passes_above_one_and_a_half_medians_are_told_of() -> None:
    """The median is 2: 3 is 1.5 times it, which is not above; 3.1 and 8 are."""
    report = RankReport.of(0, 0, 1, [{(F, 0): [2.0, 2.0, 2.0, 3.0, 2.0, 3.1, 8.0]}])
    assert report.times == {F: (2.0,)}
    assert report.outliers == 2
    assert report.worst == 4.0


def test_an_outlier_is_measured_by_its_own_kind_and_chunk() -> None:
    even = {(F, 0): [1.0, 1.0], (F, 1): [10.0, 10.0], (B, 0): [30.0], (B, 1): [90.0]}
    report = RankReport.of(0, 0, 2, [even])
    assert report.times == {F: (1.0, 10.0), B: (30.0, 90.0)}
    assert (report.outliers, report.worst) == (0, 1.0)
    uneven = {**even, (F, 0): [1.0, 1.0, 7.0]}
    report = RankReport.of(0, 0, 2, [even, uneven, even])
    assert (report.outliers, report.worst) == (1, 7.0)


def test_a_slow_batch_does_not_move_the_times() -> None:
    """The first iteration compiles and allocates: it is told of and not counted."""
    usual = {(F, 0): [2.0, 2.0], (BW, 0): [5.0, 5.0]}
    slow = {(F, 0): [20.0, 8.0], (BW, 0): [6.0, 5.0]}
    report = RankReport.of(0, 0, 1, [slow, usual, usual])
    assert report.times == {F: (2.0,), BW: (5.0,)}
    assert (report.outliers, report.worst) == (2, 10.0)


def test_only_kinds_that_every_chunk_has() -> None:
    batch = {(F, 0): [1.0], (F, 1): [2.0], (BW, 0): [3.0], (B, 1): [4.0], (W, 1): [5.0]}
    assert RankReport.of(0, 0, 2, [batch]).times == {F: (1.0, 2.0)}


def test_a_chunk_without_recomputation_beside_one_with_it_takes_no_time_for_it() -> None:
    report = RankReport.of(0, 0, 2, [{(F, 0): [1.0], (F, 1): [1.0], (Kind.R, 1): [0.5, 0.7]}])
    assert report.times == {F: (1.0, 1.0), Kind.R: (0.0, 0.6)}


def test_passes_that_take_no_time() -> None:
    report = RankReport.of(0, 0, 1, [{(F, 0): [0.0, 0.0]}])
    assert (report.times, report.outliers, report.worst) == ({F: (0.0,)}, 0, 1.0)


def test_a_report_needs_a_batch() -> None:
    with pytest.raises(ValueError, match="at least one batch"):
        RankReport.of(0, 0, 1, [])


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {
            "m_b": (3e9, 2e9),
            "m_w": (1e9, 5e8),
            "room": 6.5e10,
            "edges": ((0, 1, 0.25), (1, 0, 0.5)),
            "iteration_ms": 740.5,
        },
    ],
)
def test_json_and_back(measured: dict[str, object]) -> None:
    batch = {(kind, chunk): [0.1 + chunk, 0.3, 9.0] for kind in (F, B, W) for chunk in (0, 1)}
    report = RankReport.of(3, 1, 2, [batch, batch], **measured)
    back = RankReport.from_json(report.to_json())
    assert back == report
    assert [*back.times] == [F, B, W]  # kinds, not their names
    assert all(isinstance(kind, Kind) for kind in back.times)
    assert back.edges == measured.get("edges", ())
    assert back.m_b == measured.get("m_b", ())
