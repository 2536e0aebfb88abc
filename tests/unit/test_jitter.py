"""Times that vary: the noise, what an order costs under it, and the command that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import parse, random_costs, random_order
from zero_bubble.builders import build
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.cli import main
from zero_bubble.costs import Costs, Table
from zero_bubble.jitter import jittered, mean_cost
from zero_bubble.noise import Noise
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.orders import encode
from zero_bubble.search.problem import Floats, Problem
from zero_bubble.simulate import simulate

PLACEMENTS = st.one_of(
    st.builds(linear, st.integers(1, 4)),
    st.builds(v_shape, st.integers(1, 3)),
    st.builds(interleaved, st.integers(1, 3), st.just(2)),
)
SEEDS = st.integers(0, 10**6)
Capture = pytest.CaptureFixture[str]


def cost_by_recursion(schedule: Schedule, costs: Costs, factors: Floats) -> tuple[float, float]:
    """Cost and the busiest stage's work: each end asks for the ends before it."""
    place, microbatches = schedule.placement, schedule.num_microbatches
    noise = factors.reshape(6, place.num_positions, microbatches).tolist()
    ends: dict[tuple[int, Pass], float] = {}

    def duration(stage: int, one: Pass) -> float:
        position = place.positions[stage][one.chunk]
        f, b, w = (noise[kind][position][one.microbatch] for kind in range(3))
        whole = costs.duration(one.kind, stage, one.chunk)
        if one.kind is Kind.BW:
            t_b, t_w = costs.t_b[stage][one.chunk], costs.t_w[stage][one.chunk]
            return float(whole * (t_b * b + t_w * w) / (t_b + t_w))
        r = noise[5][position][one.microbatch]
        return float(whole * {Kind.F: f, Kind.B: b, Kind.W: w, Kind.R: r}[one.kind])

    def backward(stage: int, chunk: int, microbatch: int) -> float:
        fused = Pass(Kind.BW, microbatch, chunk)
        return end(
            stage, fused if fused in schedule.passes[stage] else Pass(Kind.B, microbatch, chunk)
        )

    def arrival(stage: int, one: Pass) -> float:
        position = place.positions[stage][one.chunk]
        if one.kind is Kind.W:
            return backward(stage, one.chunk, one.microbatch)
        if one.kind is Kind.R:
            return end(stage, Pass(Kind.F, one.microbatch, one.chunk))
        forward = one.kind is Kind.F
        source = (place.before if forward else place.after)(stage, one.chunk)
        if source is None:
            return 0 if forward else end(stage, Pass(Kind.F, one.microbatch, one.chunk))
        factor: float = noise[3 if forward else 4][position][one.microbatch]
        delay = costs.comm(source[0], stage) * factor
        if forward:
            return end(source[0], Pass(Kind.F, one.microbatch, source[1])) + delay
        return backward(*source, one.microbatch) + delay

    def start(stage: int, one: Pass) -> float:
        index = schedule.passes[stage].index(one)
        free = end(stage, schedule.passes[stage][index - 1]) if index else 0.0
        return max(free, arrival(stage, one))

    def end(stage: int, one: Pass) -> float:
        if (stage, one) not in ends:
            ends[stage, one] = start(stage, one) + duration(stage, one)
        return ends[stage, one]

    rows = list(enumerate(schedule.passes))
    return (
        max(end(stage, row[-1]) - start(stage, row[0]) for stage, row in rows),
        max(sum(duration(stage, one) for one in row) for stage, row in rows),
    )


@settings(max_examples=40)
@given(placement=PLACEMENTS, microbatches=st.integers(1, 4), order=SEEDS, cost=SEEDS)
def test_without_noise_it_is_the_simulator(
    placement: Placement, microbatches: int, order: int, cost: int
) -> None:
    schedule, costs = random_order(placement, microbatches, order), random_costs(placement, cost)
    timeline = simulate(schedule, costs)
    found = jittered(schedule, costs, sigma=0, repeats=2)
    assert found.cost == timeline.cost
    assert list(found.costs) == pytest.approx([timeline.cost] * 2)
    assert found.bubble_rate == pytest.approx(timeline.bubble_rate)


@settings(max_examples=40)
@given(
    placement=PLACEMENTS,
    microbatches=st.integers(1, 4),
    order=SEEDS,
    cost=SEEDS,
    seed=st.integers(0, 2**63 - 1),
)
def test_every_repeat_is_the_order_with_its_own_times(
    placement: Placement, microbatches: int, order: int, cost: int, seed: int
) -> None:
    schedule, costs = random_order(placement, microbatches, order), random_costs(placement, cost)
    drift = (placement.num_stages - 1, 1.3)
    noise = Noise(placement, microbatches, sigma=0.4, drift=drift, seed=seed)
    found = jittered(schedule, costs, sigma=0.4, drift=drift, repeats=3, seed=seed)
    for repeat in range(3):
        longest, work = cost_by_recursion(schedule, costs, noise.factors(repeat))
        assert found.costs[repeat] == pytest.approx(longest)
        assert found.bubble_rates[repeat] == pytest.approx((longest - work) / longest)


def test_recomputation_has_noise_of_its_own() -> None:
    schedule = with_recomputation(build("zb-v", 3, 4))
    costs = random_costs(schedule.placement, 3)
    costs = replace(costs, t_r=costs.t_f, m_r=costs.m_w, t_bw=None)
    noise = Noise(schedule.placement, 4, sigma=0.4, drift=(1, 1.3), seed=2)
    found = jittered(schedule, costs, sigma=0.4, drift=(1, 1.3), repeats=3, seed=2)
    arrays = Problem.of(schedule.placement, costs, 4).arrays()
    assert mean_cost(arrays, 4, encode(schedule), noise.table(3)) == pytest.approx(found.mean)
    for repeat in range(3):
        longest, work = cost_by_recursion(schedule, costs, noise.factors(repeat))
        assert found.costs[repeat] == pytest.approx(longest)
        assert found.bubble_rates[repeat] == pytest.approx((longest - work) / longest)


@given(name=st.sampled_from(["zb-h1", "zb-h2"]), stages=st.integers(1, 5), seed=SEEDS)
def test_the_mean_for_a_search_is_the_same(name: str, stages: int, seed: int) -> None:
    schedule = build(name, stages, 7)
    costs = random_costs(schedule.placement, seed)
    arrays = Problem.of(schedule.placement, costs, 7).arrays()
    table = Noise(schedule.placement, 7, sigma=0.2, seed=seed).table(5)
    found = mean_cost(arrays, 7, encode(schedule), table)
    assert found == pytest.approx(jittered(schedule, costs, sigma=0.2, repeats=5, seed=seed).mean)


def test_the_mean_of_a_deadlock_is_minus_one() -> None:
    schedule = parse(linear(2), 2, "0F0 0I0 0W0 0F1 0I1 0W1\n0F1 0I1 0W1 0F0 0I0 0W0")
    arrays = Problem.of(linear(2), Costs.uniform(linear(2), 1, 1, 1), 2).arrays()
    assert mean_cost(arrays, 2, encode(schedule), Noise(linear(2), 2).table(2)) == -1


@given(placement=PLACEMENTS, order=SEEDS, cost=SEEDS, factor=st.floats(0.5, 2), data=st.data())
def test_a_drift_alone_is_a_stage_with_longer_times(
    placement: Placement, order: int, cost: int, factor: float, data: st.DataObject
) -> None:
    schedule, costs = random_order(placement, 3, order), random_costs(placement, cost)
    slow = data.draw(st.integers(0, placement.num_stages - 1))

    def slower(table: Table) -> Table:
        return tuple(
            tuple(time * factor if stage == slow else time for time in row)
            for stage, row in enumerate(table)
        )

    changed = Costs(
        t_f=slower(costs.t_f),
        t_b=slower(costs.t_b),
        t_w=slower(costs.t_w),
        t_bw=None if costs.t_bw is None else slower(costs.t_bw),
        m_b=costs.m_b,
        m_w=costs.m_w,
        t_comm=costs.t_comm,
        t_edges=costs.t_edges,
    )
    found = jittered(schedule, costs, sigma=0, drift=(slow, factor), repeats=1)
    assert found.mean == pytest.approx(simulate(schedule, changed).cost)
    assert found.bubble_rate == pytest.approx(simulate(schedule, changed).bubble_rate)


@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_factors_have_the_mean_and_deviation_promised_and_nothing_in_common(sigma: float) -> None:
    table = Noise(linear(4), 500, sigma=sigma).table(20)
    assert table.mean() == pytest.approx(1, abs=4 * sigma / table.size**0.5)
    assert table.std() == pytest.approx(sigma, rel=0.02)
    logs = np.log(table).reshape(20, 6, 4, 500)
    logs = (logs - logs.mean()) / logs.std()
    assert (np.abs(logs) < 1).mean() == pytest.approx(0.6827, abs=0.01)
    assert (np.abs(logs) < 2).mean() == pytest.approx(0.9545, abs=0.005)
    for axis, size in enumerate(logs.shape):
        ahead, behind = logs.take(range(1, size), axis), logs.take(range(size - 1), axis)
        assert (ahead * behind).mean() == pytest.approx(0, abs=4 / ahead.size**0.5)


def test_a_pass_meets_the_same_noise_in_every_schedule() -> None:
    one = Noise(linear(3), 4, seed=5).factors(2).reshape(6, 3, 4)
    longer = Noise(linear(3), 9, seed=5).factors(2).reshape(6, 3, 9)
    v = Noise(v_shape(3), 4, seed=5).factors(2).reshape(6, 6, 4)
    assert np.array_equal(one, longer[:, :, :4])
    assert np.array_equal(one, v[:, :3])  # the first chunks of the V; their stages are the same
    other = Noise(linear(3), 4, seed=6).factors(2).reshape(6, 3, 4)
    assert not (one == other).any()


def test_a_fused_backward_takes_as_long_as_its_halves() -> None:
    fused = parse(linear(1), 2, "0F0 0B0 0F1 0B1")
    split = parse(linear(1), 2, "0F0 0I0 0W0 0F1 0I1 0W1")
    costs = Costs.uniform(linear(1), 2, 3, 1)
    whole, halves = (jittered(one, costs, sigma=0.3) for one in (fused, split))
    assert list(whole.costs) == pytest.approx(list(halves.costs))


def test_one_stage_has_no_bubble_however_uneven() -> None:
    found = jittered(build("1f1b", 1, 5), Costs.uniform(linear(1), 1, 1, 1), sigma=1.0)
    assert found.deviation > 0.5
    assert np.abs(found.bubble_rates).max() < 1e-9


def test_schedules_are_compared_repeat_by_repeat() -> None:
    costs = Costs.uniform(linear(4), 1, 1, 1, 0.1)
    first, second = (jittered(build(name, 4, 8), costs) for name in ("zb-h2", "1f1b"))
    assert first.beats(second) == 1
    assert second.beats(first) == 0
    assert first.mean < second.mean
    assert np.quantile(first.costs, 0.94) < first.p95 < np.quantile(first.costs, 0.96)
    with pytest.raises(ValueError, match="100 repeats against 3: give both the same number"):
        first.beats(jittered(build("1f1b", 4, 8), costs, repeats=3))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda one, costs: jittered(one, costs, sigma=-0.1), "jitter .* not -0.1"),
        (lambda one, costs: jittered(one, costs, sigma=float("nan")), "jitter .* not nan"),
        (lambda one, costs: jittered(one, costs, sigma=1e200), "more than a number can hold"),
        (lambda one, costs: jittered(one, costs, drift=(0, 1e308)), "more than a number can hold"),
        (lambda one, costs: jittered(one, costs, repeats=0), "at least 1 repeat is needed, not 0"),
        (
            lambda one, costs: jittered(one, costs, drift=(2, 1.1)),
            "drift 2:1.1: stage 2 is not one of 0..1",
        ),
        (
            lambda one, costs: jittered(one, costs, drift=(0, -1)),
            "drift 0:-1: expected a finite factor",
        ),
        (lambda one, costs: jittered(one, costs, seed=-1), "seed must be from 0 .* not -1"),
    ],
)
def test_what_cannot_be_simulated(run: Callable[[Schedule, Costs], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(build("zb-h1", 2, 2), Costs.uniform(linear(2), 1, 1, 1))


SIZE = ["--stages", "4", "--microbatches", "8"]


def test_the_command_without_noise(capsys: Capture) -> None:
    assert main(["simulate", "zb-h1", "1f1b", *SIZE, "--jitter", "0", "--repeats", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["zb-h1", "27", "27", "27", "11.11%"],
        ["1f1b", "33", "33", "33", "27.27%"],
    ]
    assert lines[3] == "zb-h1 beats 1f1b in 100% of 3 repeats"


def test_the_command_with_noise_and_a_slow_stage(capsys: Capture) -> None:
    flags = ["--t-comm", "0.2", "--jitter", "0.2", "--drift", "1:1.5", "--repeats", "7"]
    assert main(["simulate", "zb-h2", *SIZE, *flags, "--seed", "3"]) == 0
    costs = Costs.uniform(linear(4), 1, 1, 1, 0.2)
    expected = jittered(build("zb-h2", 4, 8), costs, sigma=0.2, drift=(1, 1.5), repeats=7, seed=3)
    row = capsys.readouterr().out.splitlines()[1].split()
    assert [float(cell.rstrip("%")) for cell in row[1:]] == pytest.approx(
        [expected.cost, expected.mean, expected.p95, expected.bubble_rate * 100], rel=1e-3
    )


@pytest.mark.parametrize("drift", ["3", "3:", ":1.1", "a:1.1", "-1:1.1", "3:x"])
def test_a_drift_that_cannot_be_read(drift: str, capsys: Capture) -> None:
    assert main(["simulate", "zb-h1", *SIZE, f"--drift={drift}"]) == 2
    assert f"--drift {drift}: expected STAGE:FACTOR, such as 3:1.1" in capsys.readouterr().err


@pytest.mark.parametrize("jitter", ["1", "5", "-0.1", "nan"])
def test_a_jitter_is_a_part_of_the_times(jitter: str, capsys: Capture) -> None:
    assert main(["simulate", "zb-h1", *SIZE, f"--jitter={jitter}"]) == 2
    assert f"--jitter {jitter}: expected at least 0 and less than 1: 0.05 is 5 %" in (
        capsys.readouterr().err
    )


def test_the_examples_in_the_help_work(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", "zb-h1", *SIZE, "--output", "zb-h1.json"]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    examples = re.findall(r"^  zero-bubble (simulate .*)$", capsys.readouterr().out, re.M)
    assert len(examples) == 5
    for example in examples:
        assert main(example.split()) == 0
