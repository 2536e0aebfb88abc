"""The replay: what runs is the program, no pass starts before it may, and the figures are right.

Real clocks give lower bounds only: a pass never ends early, a message never comes early.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.profile import replay as replay_module
from megatron.zero_bubble.profile.replay import PausedCompute, Sleeper, StageLog, timeline_of
from megatron.zero_bubble.profile.replay_job import Iteration, Replayed, ReplayFailed, replay
from megatron.zero_bubble.profile.replay_plan import (
    Plan,
    default_least_pause,
    plan_of,
    preset_of,
    scaled,
)
from megatron.zero_bubble.runtime.interpreter import Event
from tests.unit.orders import parse, random_order
from tools.profile.replay import figures_of, main, parser
from zero_bubble.builders import BUILDERS, build
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_costs, save_schedule
from zero_bubble.lower import lower
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.program import Run
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import Span, Timeline, simulate
from zero_bubble.trace.merge import load_traces

CLOCK_MS = 1e-5
"""What a time loses when it is written as ms from the first start."""


def tiny(placement: Placement) -> Costs:
    """Costs that differ for every kind, with a message that takes longer than any pass."""
    return Costs.uniform(placement, 0.3, 0.2, 0.1, t_comm=0.7, t_bw=0.4)


def check_replay(schedule: Schedule) -> None:
    """Run it; all passes as the program says, each as long as it should be and no earlier."""
    costs = tiny(schedule.placement)
    found = replay(schedule, costs, repeats=1, warm_up=0, real_time=False)
    (iteration,) = found.iterations
    for log, instructions in zip(iteration.logs, lower(schedule).instructions, strict=True):
        assert tuple(event.instruction for event in log.events) == instructions
    check_times(iteration.timeline)


def check_times(measured: Timeline) -> None:
    """The rules that `simulate` computes the earliest times from, each by itself."""
    placement, costs = measured.schedule.placement, measured.costs
    made: dict[tuple[str, int, int, int], float] = {}
    for stage, row in enumerate(measured.spans):
        for one in row:
            end = one.start + costs.duration(one.what.kind, stage, one.what.chunk)
            for kind in one.what.kind:  # BW is a B too
                made[kind, stage, one.what.chunk, one.what.microbatch] = end
    for stage, row in enumerate(measured.spans):
        for before, after in pairwise(row):
            assert after.start >= before.end - CLOCK_MS
        for one in row:
            kind, chunk = one.what.kind, one.what.chunk
            duration = costs.duration(kind, stage, chunk)
            assert one.end - one.start >= duration - CLOCK_MS
            if kind is Kind.W:
                continue
            ahead = placement.before if kind is Kind.F else placement.after
            source = ahead(stage, chunk)
            if source is not None:
                result = made["F" if kind is Kind.F else "B", *source, one.what.microbatch]
                arrives = result + costs.comm(source[0], stage)
                assert one.end >= arrives + duration - CLOCK_MS, one.what


@pytest.mark.parametrize("name", BUILDERS)
def test_every_known_schedule_runs_as_its_program_says(name: str) -> None:
    check_replay(build(name, 2, 4))


def test_any_legal_order_runs_fused_passes_included() -> None:
    placement = Placement(((0, 2), (1, 3, 4)))
    schedule = random_order(placement, 3, seed=1)
    kinds = {one.kind for row in schedule.passes for one in row}
    assert kinds == set(Kind) - {Kind.R}
    check_replay(schedule)


def test_a_stage_that_fails_is_named_and_not_those_that_lose_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: PausedCompute, chunk: int, microbatch: int, part: int, parts: int) -> None:
        if self.stage == 1 and microbatch == 2:
            raise ZeroDivisionError("in the model")

    monkeypatch.setattr(PausedCompute, "weight", fail)
    schedule = build("zb-h1", 3, 6)
    with pytest.raises(ReplayFailed, match=r"^stage 1 failed:(.|\n)*pass 0W2(.|\n)*") as caught:
        replay(schedule, tiny(schedule.placement), repeats=1, real_time=False)
    assert "in the model" in str(caught.value)


def test_a_stage_whose_process_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: PausedCompute, chunk: int, microbatch: int, part: int, parts: int) -> None:
        if self.stage == 0:
            os._exit(7)

    monkeypatch.setattr(PausedCompute, "weight", end)
    schedule = build("zb-h1", 2, 3)
    with pytest.raises(ReplayFailed, match="stage 0 failed:\nits process ended with code 7"):
        replay(schedule, tiny(schedule.placement), repeats=1, real_time=False)


@dataclass
class Clock:
    """In place of `time`: sleeps that last 0.1 ms too long, all in ns."""

    now: int = 1_000_000_000
    late: int = 100_000

    def perf_counter_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9) + self.late


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(replay_module, "time", found)
    return found


def test_a_sleeper_allows_for_what_its_sleeps_usually_take_too_long(clock: Clock) -> None:
    sleeper = Sleeper()
    sleeper.until(clock.now + 5_000_000)
    assert clock.now == 1_005_100_000
    sleeper.learn()
    sleeper.until(clock.now + 5_000_000)
    assert clock.now == 1_010_100_000
    clock.late = 2_000_000  # held up: no later sleep makes up for it
    sleeper.until(clock.now + 5_000_000)
    assert clock.now == 1_017_000_000
    sleeper.until(clock.now - 1)
    assert clock.now == 1_017_000_000


def test_a_sleeper_never_allows_for_more_than_a_timer_can_be_late(clock: Clock) -> None:
    clock.late = 2_000_000
    sleeper = Sleeper()
    sleeper.until(clock.now + 5_000_000)
    sleeper.learn()
    assert sleeper.lead_ns == 300_000


def test_passes_last_as_long_as_their_kind_and_messages_say_when_they_ended(clock: Clock) -> None:
    clock.late = 0
    schedule = parse(linear(2), 2, "0F0 0F1 0I0 0B1 0W0\n0F0 0B0 0F1 0B1")
    compute = PausedCompute(0, schedule, tiny(schedule.placement), Sleeper())
    begin = clock.now
    output, message = compute.forward(0, 0, None)
    assert message is not None
    assert message.item() == clock.now == begin + 300_000
    assert compute.backward(0, 0, None, output, output) is None
    assert clock.now == begin + 500_000
    compute.weight(0, 0)
    assert clock.now == begin + 600_000
    compute.backward(0, 1, None, output, output)
    assert clock.now == begin + 1_000_000
    last = PausedCompute(1, schedule, tiny(schedule.placement), Sleeper())
    output, message = last.forward(0, 0, output)
    assert message is None
    gradient = last.backward(0, 0, output, output, None)
    assert gradient is not None
    assert gradient.item() == clock.now


def logs_of(rows: list[list[tuple[str, int, int, int]]]) -> tuple[StageLog, ...]:
    """Of (pass, begin, waited, end) in ms."""
    return tuple(
        StageLog(
            tuple(
                Event(Run(Pass.parse(what)), begin * 10**6, end * 10**6, waited * 10**6)
                for what, begin, waited, end in row
            )
        )
        for row in rows
    )


HAND_MADE = logs_of(
    [
        [("0F0", 100, 0, 110), ("0B0", 110, 23, 146)],
        [("0F0", 90, 22, 121), ("0B0", 121, 0, 132)],
    ]
)
"""Stage 0 takes 46 ms from its first start, stage 1 takes 20 ms: it waited till 112."""


def test_a_timeline_begins_at_the_first_start_and_leaves_waits_out() -> None:
    schedule = parse(linear(2), 1, "0F0 0B0\n0F0 0B0")
    costs = Costs.uniform(linear(2), 10, 5, 5, t_comm=1)
    found = timeline_of(schedule, costs, HAND_MADE)
    forward, backward = Pass(Kind.F, 0), Pass(Kind.BW, 0)
    assert found.spans == (
        (Span(forward, 0, 10), Span(backward, 33, 46)),
        (Span(forward, 12, 21), Span(backward, 21, 32)),
    )
    assert found.cost == 46


def test_another_order_than_the_schedules_is_an_error() -> None:
    schedule = parse(linear(2), 1, "0F0 0I0 0W0\n0F0 0B0")
    costs = Costs.uniform(linear(2), 10, 5, 5)
    with pytest.raises(ValueError, match="stage 0 ran other passes"):
        timeline_of(schedule, costs, HAND_MADE)


def test_the_median_iteration_decides_and_stages_name_their_furthest_pass() -> None:
    schedule = parse(linear(2), 1, "0F0 0B0\n0F0 0B0")
    costs = Costs.uniform(linear(2), 10, 5, 5, t_comm=1)
    middle = timeline_of(schedule, costs, HAND_MADE)

    def other(cost: float) -> Timeline:
        (first, last), row = middle.spans
        return replace(middle, spans=((first, replace(last, end=cost)), row))

    logs = (StageLog((), (0.4,)), StageLog((), (0.6,)))
    found = Replayed(
        tuple(Iteration(one, logs) for one in (other(99.0), middle, other(45.0))), False
    )
    figures = figures_of(Plan(schedule, costs, 1.0, ()), found)
    assert figures["predicted"]["cost"] == 10 + 1 + 10 + 10 + 1 + 10
    assert figures["measured"]["costs"] == [99, 46, 45]
    assert figures["ratio"] == 46 / 42
    # Stage 0 took 10 + 13 ms of 46, not the 20 asked for; of 99, 10 + 66; of 45, 10 + 12.
    assert figures["measured"]["bubble_rates"] == pytest.approx([23 / 99, 23 / 46, 23 / 45])
    assert figures["measured"]["bubble_rate"] == pytest.approx(23 / 46)
    # Predicted ends: 10 and 42, 21 and 31.
    assert figures["stages"] == [
        {"predicted": 42, "measured": 46, "largest_difference": 4, "of_pass": "0B0"},
        {"predicted": 20, "measured": 20, "largest_difference": 1, "of_pass": "0B0"},
    ]
    assert figures["latency"] == {"count": 6, "median": 0.4, "p95": 0.6, "longest": 0.6}
    assert figures["excess"]["longest"] == 99 - 33 - 10


def test_presets_are_the_papers_rows() -> None:
    """Times of Tables 5 and 8, as printed."""
    found = preset_of("1.5B", linear(8), 32)
    assert found.costs.t_f == ((18.513,),) * 8
    assert found.costs.t_w == ((9.331,),) * 8
    assert (found.costs.t_comm, found.costs.m_b) == (0.626, ((1.0,),) * 8)
    assert preset_of("14.6B", linear(16)).microbatches == 48
    v = preset_of("6.2B", v_shape(16), 64)
    assert v.costs.t_b == ((14.393, 14.393),) * 16
    assert (v.costs.t_comm, v.costs.m_b) == (1.621, ((0.5, 0.5),) * 16)
    # No V of this size in the paper: a chunk is half of a stage of Table 5.
    assert preset_of("1.5B", v_shape(8), 24).costs.t_f == ((9.261, 9.261),) * 8
    assert preset_of("1.5B", interleaved(8, 2), 24).costs.t_f == ((9.261, 9.261),) * 8


def test_a_preset_for_other_stages_is_the_nearest_and_says_so() -> None:
    found = preset_of("14.6B", linear(12))
    assert (found.costs.shape, found.costs.t_f[0]) == ((1,) * 12, (11.347,))
    assert found.microbatches == 36
    assert "it has none for 12 stages" in found.text
    assert "it has none" not in preset_of("14.6B", linear(16)).text


def test_scaling_stretches_the_whole_timeline() -> None:
    schedule = build("1f1b", 3, 5)
    costs = replace(tiny(linear(3)), t_edges=((0, 1, 2.0),))
    longer = simulate(schedule, scaled(costs, 4.0))
    assert longer.cost == pytest.approx(4 * simulate(schedule, costs).cost)
    assert scaled(costs, 4.0).m_b == costs.m_b


def plan(*flags: str) -> Plan:
    return plan_of(parser().parse_args(flags))


@pytest.mark.parametrize(("least", "scale"), [("5", 1.0), ("20", 20 / 9.337)])
def test_times_are_stretched_until_the_shortest_pass_is_long_enough(
    least: str, scale: float
) -> None:
    found = plan("--stages", "8", "--schedule", "zb-h1", "--least-pause", least)
    assert found.scale == pytest.approx(scale)
    assert min(found.costs.t_w)[0] == pytest.approx(9.337 * scale)
    assert found.costs.t_comm == pytest.approx(0.601 * scale)
    assert found.schedule == build("zb-h1", 8, 24)


def test_more_stages_to_a_core_pause_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert [default_least_pause(stages) for stages in (1, 8, 32)] == [6, 13, 37]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert default_least_pause(32) == 6


def test_a_file_brings_its_own_costs_unless_others_are_given(tmp_path: Path) -> None:
    schedule, file, costs = build("zb-h1", 2, 3), tmp_path / "s.json", tmp_path / "c.json"
    save_schedule(schedule, file, tiny(linear(2)))
    save_costs(Costs.uniform(linear(2), 7, 8, 9), costs)
    given = ("--schedule", str(file), "--least-pause", "0.01")
    assert plan(*given).costs == tiny(linear(2))
    assert plan(*given).schedule == schedule
    assert plan(*given, "--costs", str(costs)).costs.t_w == ((9,), (9,))
    assert plan(*given, "--preset", "1.5B").costs.t_w == ((9.337,), (9.337,))


def test_auto_searches_within_the_limit() -> None:
    found = plan("--stages", "4", "--microbatches", "8", "--memory-limit", "1p")
    timeline = simulate(found.schedule, found.costs)
    assert max(timeline.peak_memory) <= 4
    assert found.bound is not None
    assert found.bound <= timeline.cost * (1 + 1e-9)
    assert timeline.cost <= simulate(build("zb-h1", 4, 8), found.costs).cost


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--schedule nothing.json", "--schedule nothing.json: neither a file nor one of auto"),
        ("--stages 33", "33 stages (--stages, or the file's): at most 32"),
        ("--stages 0", "--stages 0: at least 1"),
        ("--microbatches 0", "--microbatches 0: at least 1"),
        ("--repeats 0", "--repeats 0: at least 1"),
        ("--bar nan", "--bar nan: a number above 0"),
        ("--least-pause -1", "--least-pause -1: a number above 0"),
        ("--schedule 1f1b --placement v", "--placement v is for --schedule auto: 1f1b has its own"),
        ("--schedule 1f1b --memory-limit 1p", "--memory-limit 1p is for --schedule auto"),
        ("--schedule zb-v --chunks 3", "--chunks 3: zb-v has a fixed number"),
        ("--chunks 3", "--chunks 3: at least 1, and for --placement interleaved"),
        ("--stages 4 --memory-limit 0.1p", "--memory-limit 0.1p: memory limit 0.4 of stage 0"),
        ("--json {tmp}/none/x.json", "--json {tmp}/none/x.json: there is no directory"),
        ("--schedule {tmp}/s.json --stages 2", "--stages 2 is not for a file: {tmp}/s.json"),
        ("--schedule {tmp}/bad.json", "--schedule {tmp}/bad.json cannot run: stage 0, 0I0: order"),
        (
            "--stages 3 --costs {tmp}/c.json",
            "--costs {tmp}/c.json: costs are for 2 stages, --stages is 3",
        ),
        (
            "--schedule {tmp}/s.json --costs {tmp}/three.json",
            "--costs {tmp}/three.json: costs are for 3 stages, the schedule of {tmp}/s.json has 2",
        ),
        (
            "--placement v --costs {tmp}/c.json",
            "--costs {tmp}/c.json: the costs are for stages of (1, 1) chunks",
        ),
        ("--costs {tmp}/zero.json", "all passes take no time"),
        ("--costs {tmp}/gone.json", "{tmp}/gone.json: No such file"),
    ],
)
def test_errors_say_what_is_wrong_and_end_with_2(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_schedule(build("1f1b", 2, 2), tmp_path / "s.json")
    save_schedule(parse(linear(1), 1, "0I0 0F0 0W0"), tmp_path / "bad.json")
    save_costs(tiny(linear(2)), tmp_path / "c.json")
    save_costs(tiny(linear(3)), tmp_path / "three.json")
    save_costs(Costs.uniform(linear(2), 0, 0, 0), tmp_path / "zero.json")
    assert main(flags.format(tmp=tmp_path).split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"replay.py: {message.format(tmp=tmp_path)}")


def test_the_command_prints_and_writes_what_it_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_schedule(build("zb-v", 2, 3), tmp_path / "s.json", tiny(v_shape(2)))
    flags = f"--schedule {tmp_path}/s.json --least-pause 0.1 --repeats 2 --no-real-time --bar 0.001"
    flags += f" --json {tmp_path}/out.json --trace {tmp_path}/trace"
    assert main(flags.split()) == 1  # nothing is a thousand times faster than predicted
    figures: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    predicted = simulate(build("zb-v", 2, 3), tiny(v_shape(2)))
    assert figures["predicted"]["cost"] == pytest.approx(predicted.cost)
    traced = load_traces(tmp_path / "trace")
    assert traced.missing == ()
    assert [one.cost for one in traced.measured] == pytest.approx(
        figures["measured"]["costs"], abs=1e-3
    )
    # A run has one bubble rate, whichever tool says it.
    assert [one.bubble_rate for one in traced.measured] == pytest.approx(
        figures["measured"]["bubble_rates"], abs=1e-3
    )
    printed = capsys.readouterr().out
    assert f"median {figures['measured']['cost']:.1f} ms" in printed
    assert printed.splitlines()[-1].startswith("MISSED: measured over predicted ")

    assert main([*flags.split(), "--bar", "1e9"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("met: ")
