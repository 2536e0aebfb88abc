"""What tools/profile/one_gpu_pipeline.py makes of what it measured, and what it says of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trace_runs import made_run
from tools.profile.one_gpu.measured import (
    MeasuredTurn,
    costs_of,
    iteration_ms,
    load_turns,
    megatrons_bubble,
    search,
    split_ratio,
    traces_of,
)
from tools.profile.one_gpu.plan import (
    FUSED,
    Job,
    Size,
)
from tools.profile.one_gpu.report import (
    Result,
    difference,
    lines,
    memory_error,
    results_of,
    share_of,
    verdicts,
)
from zero_bubble.builders import build
from zero_bubble.check import check
from zero_bubble.costs import Costs
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate
from zero_bubble.trace.merge import merge
from zero_bubble.trace.rank_file import RankTrace, TracedIteration, TracedPass, save_rank

SIZE = Size(layers=8, hidden=64, heads=4, sequence=32, microbatch_size=2, microbatches=12)


# What was measured.


def rank_report(marks: Sequence[float] = (0, 9, 10, 11, 12, 19), **fields: Any) -> dict[str, Any]:
    return {
        "label": "megatron",
        "marks": list(marks),
        "losses": [],
        "digests": {},
        "allocated": 0,
        "multiprocessors": 0,
    } | fields


def test_the_first_and_the_last_iteration_of_a_turn_do_not_count() -> None:
    # Iterations take 9, 2, 3, 4 and 50 ms, on the other rank 9, 4, 4, 4 and 1.
    one, other = rank_report([0, 9, 11, 14, 18, 68]), rank_report([0, 9, 13, 17, 21, 22])
    assert iteration_ms([one]) == 3
    assert iteration_ms([one, other]) == 4


def test_megatrons_bubble_is_what_its_busiest_stage_does_not_compute() -> None:
    warm_up = [(0.0, 100.0)]
    # The longest stage is there for 10 ms; the busiest one computes for 6 of them.
    first = rank_report(passes=[warm_up, [(0.0, 3.0), (9.0, 10.0)]])
    second = rank_report(passes=[warm_up, [(3.0, 6.0), (6.0, 9.0)]])
    assert megatrons_bubble([first, second]) == pytest.approx(0.4)
    assert megatrons_bubble([rank_report()]) is None


def traces(schedule: Schedule, costs: Costs) -> list[RankTrace]:
    """A turn of two iterations that run as simulated; the first takes ten times as long."""
    timeline = simulate(schedule, costs)
    held = {"F": costs.m_b, "BW": costs.m_b, "B": costs.m_b, "W": costs.m_w}
    ranks = []
    for stage, row in enumerate(timeline.spans):
        iterations = []
        for number, factor in ((1, 10.0), (2, 1.0)):
            now, passes = 0, []
            for span in row:
                kind, chunk = str(span.what.kind), span.what.chunk
                amount = int(held[kind][stage][chunk])
                left = int(costs.m_w[stage][chunk]) if kind == "B" else 0
                now += amount if kind == "F" else left - amount
                start, end = span.start * factor, span.end * factor
                passes.append(
                    TracedPass(span.what, start, start, end, now if number == 1 else None)
                )
            iterations.append(
                TracedIteration(number, schedule.name, schedule.num_microbatches, tuple(passes))
            )
        edges = tuple((a, b, costs.t_comm) for a, b in ((stage, stage + 1), (stage + 1, stage))
                      if b < schedule.num_stages and a < schedule.num_stages)  # fmt: skip
        ranks.append(
            RankTrace(
                stage,
                stage,
                tuple(range(schedule.num_stages)),
                schedule.placement,
                0.0,
                edges,
                tuple(iterations),
            )
        )
    return ranks


@pytest.fixture
def costs() -> Costs:
    """Of a pipeline whose stages all differ."""
    return Costs(
        t_f=((5.0,), (6.0,), (7.0,)),
        t_b=((6.0,), (6.5,), (8.0,)),
        t_w=((4.0,), (3.0,), (5.0,)),
        t_bw=((9.0,), (9.5,), (12.0,)),
        m_b=((3000.0,), (3100.0,), (2900.0,)),
        m_w=((1000.0,), (1100.0,), (900.0,)),
        t_comm=0.5,
        t_edges=tuple((a, b, 0.5) for a, b in ((0, 1), (1, 0), (1, 2), (2, 1))),
    )


def test_costs_are_those_that_made_the_traces(costs: Costs) -> None:
    turns = [merge(traces(build(name, 3, 6), costs)).measured for name in ("1f1b", "zb-h1")]
    found = costs_of(turns[0][0].placement, turns, FUSED)
    for name in ("t_f", "t_b", "t_w", "t_bw"):
        for row, expected in zip(getattr(found, name), getattr(costs, name), strict=True):
            assert row == pytest.approx(expected)
    assert (found.m_b, found.m_w, found.t_edges) == (costs.m_b, costs.m_w, costs.t_edges)
    # 32.5 ms of B and W and W of all stages beside 30.5 ms fused.
    assert split_ratio(turns, found) == pytest.approx(32.5 / 30.5)


def test_of_fused_backwards_only_the_sum_is_known(costs: Costs) -> None:
    turn = merge(traces(build("1f1b", 3, 6), costs)).measured
    found = costs_of(turn[0].placement, [turn], FUSED)
    assert [b[0] + w[0] for b, w in zip(found.t_b, found.t_w, strict=True)] == pytest.approx(
        [9.0, 9.5, 12.0]
    )
    assert split_ratio([turn], found) is None
    with pytest.raises(ValueError, match="no schedule of this placement has been traced"):
        costs_of(turn[0].placement, [], FUSED)


def test_a_search_stays_within_its_limit_of_what_was_measured(tmp_path: Path, costs: Costs) -> None:
    for number, name in enumerate(("1f1b", "zb-h1")):
        for one in traces(build(name, 3, 6), costs):
            save_rank(one, tmp_path / f"turn{number:03d}")
    for limit in (1.0, 2.0):
        found = search(tmp_path, limit, FUSED)
        assert not check(found)
        peaks = simulate(found, costs).peak_memory
        assert all(
            peak <= limit * 3 * row[0] * (1 + 1e-9)
            for peak, row in zip(peaks, costs.m_b, strict=True)
        )
        known = min(simulate(build(one, 3, 6), costs).cost for one in ("1f1b", "zb-h1"))
        assert simulate(found, costs).cost <= known
    assert len(traces_of(tmp_path)) == 2


def test_turns_that_all_ranks_have_written(tmp_path: Path) -> None:
    assert load_turns(tmp_path, 2) == []
    for rank, labels in enumerate((["megatron", "zb-h1", "1f1b"], ["megatron", "zb-h1"])):
        reports = [rank_report(label=one, digests={f"p{rank}": 7}) for one in labels]
        (tmp_path / f"rank{rank}.jsonl").write_text("\n".join(map(json.dumps, reports)))
    for one in made_run(build("zb-h1", 2, 4), iterations=(1, 2)):
        save_rank(one, tmp_path / "turn001")
    turns = load_turns(tmp_path, 2)
    assert [one.label for one in turns] == ["megatron", "zb-h1"]
    assert turns[0].digests == {"p0": 7, "p1": 7}
    assert [len(one.iterations) for one in turns] == [0, 2]


# What is said of it.


def turn(losses: list[float], digests: dict[str, int]) -> MeasuredTurn:
    return MeasuredTurn("x", (rank_report(), rank_report(losses=losses, digests=digests)))


@pytest.mark.parametrize(
    ("losses", "digests", "says"),
    [
        ([4.5, 4.25], {"a": 1, "b": 2}, None),
        ([4.5, 4.25000001], {"a": 1, "b": 2}, "loss of iteration 2: 4.25000001 instead of 4.25"),
        ([4.5], {"a": 1, "b": 2}, "1 losses instead of 2"),
        ([4.5, 4.25], {"a": 1, "b": 3}, "parameter b"),
        ([4.5, 4.25], {"a": 1}, "parameter b is not in both"),
    ],
)
def test_the_first_difference_is_named(
    losses: list[float], digests: dict[str, int], says: str | None
) -> None:
    assert difference(turn([4.5, 4.25], {"a": 1, "b": 2}), turn(losses, digests)) == says


@pytest.fixture
def result() -> Result:
    return Result(
        schedule="auto-2p",
        validates=False,
        iteration_ms=500.0,
        samples_per_second=24.0,
        ratio=1.12,
        bubble=0.05,
        predicted_bubble=0.04,
        memory=(1099, 901),
        predicted_memory=(1000.0, 1000.0),
        allocated=3 << 30,
        different=None,
        split_ratio=1.01,
    )


def test_memory_may_be_a_tenth_off(result: Result) -> None:
    assert [met for met, _ in verdicts([result], 4, SIZE, times_count=False)] == [True, True]
    off = replace(result, memory=(1000, 899))
    assert memory_error(off) == pytest.approx(-0.101)
    (_, (met, says)) = verdicts([result, off], 4, SIZE, times_count=False)
    assert (met, says) == (
        False,
        "activations within 10.1% of the prediction (worst: auto-2p), bar 10%",
    )
    assert memory_error(replace(result, memory=(None, None))) is None


@pytest.mark.parametrize(("ratio", "met"), [(1.12, True), (1.119, False)])
def test_the_gain_has_a_bar_on_a_gpu(result: Result, ratio: float, met: bool) -> None:
    slower = replace(result, validates=True, ratio=1.0)
    found = verdicts([slower, replace(result, ratio=ratio)], 4, SIZE, times_count=True)
    assert found[-1] == (met, f"auto-2p at {ratio:.3f} of Megatron's 1F1B, bar 1.12")
    # Elsewhere nothing is promised.
    assert len(verdicts([result], 8, SIZE, times_count=True)) == 2


def test_bits_have_a_bar(result: Result) -> None:
    other = replace(result, validates=True, different="loss of iteration 2: 1.0 instead of 2.0")
    met, says = verdicts([result, other], 4, SIZE, times_count=False)[0]
    assert not met
    assert says.endswith("but for auto-2p, validated")
    assert any("auto-2p, validated differs: loss of iteration 2" in one for one in lines([other]))


def test_the_table(result: Result) -> None:
    megatron = replace(result, schedule="megatron", bubble=None, memory=(None, None), ratio=1.0)
    text = "\n".join(lines([megatron, result]))
    first = text.split("activations")[0]  # the second table has the same names
    rows = {line.split()[0]: line.split()[1:] for line in first.splitlines() if line}
    assert rows["auto-2p"] == ["500.0", "24.00", "1.120", "5.0%", "4.0%", "yes", "3.0"]
    assert rows["megatron"][3] == "-"
    assert "(B + W) / fused backward: 1.010" in text


def test_without_mps_each_rank_sees_the_whole_gpu() -> None:
    job = Job("linear", False, ("megatron",))

    def seen(each: int) -> bool:
        report = rank_report(multiprocessors=each)
        return share_of({job: [MeasuredTurn("megatron", (report,) * 4)]}, 4, 132)[0]

    assert seen(32)
    assert seen(34)  # rounded
    assert not seen(132)


def test_rows_compare_with_megatrons_turn_of_the_same_round(costs: Costs) -> None:
    job = Job("linear", False, ("megatron", "zb-h1"))
    measured = merge(traces(build("zb-h1", 3, 6), costs)).measured

    def of(label: str, ms: float, loss: float) -> MeasuredTurn:
        report = rank_report([0, 1, 1 + ms, 1 + 2 * ms, 1 + 3 * ms, 0], losses=[loss])
        return MeasuredTurn(label, (report,) * 3, measured if label == "zb-h1" else ())

    # A machine that slows down meets both; what happens in one turn alone is no matter.
    turns = [of("megatron", 12, 1.5), of("zb-h1", 10, 1.5),
             of("megatron", 24, 1.5), of("zb-h1", 20, 1.5),
             of("megatron", 30, 1.5), of("zb-h1", 10, 1.5)]  # fmt: skip
    megatron, ours = results_of({job: turns}, 3, replace(SIZE, microbatches=6))
    assert megatron.ratio == 1.0
    assert ours.ratio == pytest.approx(1.2)
    assert ours.iteration_ms == 10.0
    assert ours.samples_per_second == pytest.approx(12 / 0.010)
    expected = simulate(build("zb-h1", 3, 6), replace(costs, t_bw=None))
    assert ours.bubble == pytest.approx(expected.bubble_rate)
    assert ours.predicted_bubble == pytest.approx(expected.bubble_rate)
    assert ours.memory == ours.predicted_memory == expected.peak_memory
    assert ours.different is None
    assert ours.timeline is not None
    assert ours.timeline.cost == pytest.approx(expected.cost)
    assert ours.timeline.peak_memory == expected.peak_memory
    # Measured in another job of the same placement, the fused backward predicts as well.
    fused = merge(traces(build("1f1b", 3, 6), costs)).measured
    other = replace(turns[0], label="1f1b", iterations=fused)
    delaying = Job("linear", False, ("zb-h1",), delays=True)
    rows = results_of(
        {Job("linear", False, ("megatron", "1f1b")): [turns[0], other], delaying: [turns[1]]},
        3,
        replace(SIZE, microbatches=6),
    )
    assert [one.schedule for one in rows] == ["megatron", "1f1b", "zb-h1"]
    assert rows[2].split_ratio == pytest.approx(32.5 / 30.5)
    turns[3] = of("zb-h1", 20, 1.25)
    different = results_of({job: turns}, 3, replace(SIZE, microbatches=6))[1].different
    assert different == "loss of iteration 1: 1.25 instead of 1.5"
