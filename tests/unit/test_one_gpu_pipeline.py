"""tools/profile/one_gpu_pipeline.py, all of it that needs no GPU."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.unit.trace_runs import made_run
from tools.profile.one_gpu import device
from tools.profile.one_gpu.device import Unavailable, mps, rank_environment, shared_environment
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
    DEFAULT_SCHEDULES,
    FUSED,
    Job,
    Plan,
    Size,
    jobs_of,
    megatron_flags,
    plan_of,
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
from tools.profile.one_gpu_pipeline import main
from zero_bubble.builders import build
from zero_bubble.check import check
from zero_bubble.costs import Costs
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate
from zero_bubble.trace.merge import merge
from zero_bubble.trace.rank_file import RankTrace, TracedIteration, TracedPass, save_rank

SIZE = Size(layers=8, hidden=64, heads=4, sequence=32, microbatch_size=2, microbatches=12)
FAKE = """#!/bin/sh
if [ "$1" = -d ]; then
  echo "start $CUDA_MPS_PIPE_DIRECTORY $CUDA_VISIBLE_DEVICES" >> "$RECORD"
  sleep 60 & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
  [ -z "$BROKEN" ] || { echo "it is not allowed"; exit 1; }
else
  read word; echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> "$RECORD"
  [ -z "$DEAF" ] || exit 1
  kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid")
fi
"""


# What ranks need.


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for MPS's control program on PATH; what it was told is in the file returned."""
    program = tmp_path / "bin" / device.CONTROL
    program.parent.mkdir()
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    return tmp_path / "record"


def told(record: Path) -> list[str]:
    return [line.split()[0] for line in record.read_text().splitlines()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_each_rank_has_its_share_and_is_a_host_of_its_own() -> None:
    shares = [shared_environment("cuda", ranks) for ranks in (2, 4, 8)]
    assert [one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] for one in shares] == ["50", "25", "12"]
    assert all(one["NCCL_SHM_DISABLE"] == one["NCCL_P2P_DISABLE"] == "1" for one in shares)
    ranks = [rank_environment("cuda", rank) for rank in range(4)]
    assert len({one["NCCL_HOSTID"] for one in ranks}) == 4
    assert {one["LOCAL_RANK"] for one in ranks} == {"0"}


def test_what_is_given_wins_and_a_cpu_needs_nothing() -> None:
    assert shared_environment("cuda", 4, {"NCCL_SOCKET_IFNAME": "eth0"})["NCCL_SOCKET_IFNAME"] == (
        "eth0"
    )
    assert shared_environment("cpu", 4) == {"ZERO_BUBBLE_DEVICE": "cpu"}
    assert rank_environment("cpu", 3) == {}


def test_mps_is_started_with_its_own_directories_and_stopped(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    with mps() as clients:
        pipes = clients["CUDA_MPS_PIPE_DIRECTORY"]
        assert fake.read_text() == f"start {pipes} 3\n"
        assert Path(clients["CUDA_MPS_LOG_DIRECTORY"]).is_dir()
    assert fake.read_text().splitlines()[1:] == [f"quit {pipes}"]
    assert not Path(pipes).parent.exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_mps_is_stopped_whatever_happens(fake: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), mps():
        raise error
    assert told(fake) == ["start", "quit"]


def test_mps_that_does_not_start_says_why(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(Unavailable, match="ended with code 1: it is not allowed"), mps():
        pytest.fail("it has not started")
    assert told(fake) == ["start", "quit"]


def test_mps_that_does_not_listen_is_ended(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEAF", "1")
    with mps() as clients:
        process = int((Path(clients["CUDA_MPS_PIPE_DIRECTORY"]) / device.PID_FILE).read_text())
        assert is_running(process)
    end = time.monotonic() + 10
    while is_running(process) and time.monotonic() < end:
        time.sleep(0.01)
    assert not is_running(process)


# Exit codes.


def test_without_mps_the_code_is_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([]) == 3
    assert f"there is no {device.CONTROL} on PATH" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_without_a_gpu_the_code_is_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device, "_multiprocessors", lambda: 0)
    assert main([]) == 3
    assert "torch.cuda finds no device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--schedules zb-h7", "--schedules zb-h7: no such schedule"),
        ("--schedules auto-0p", "--schedules auto-0p: no such schedule"),
        ("--ranks 1", "--ranks 1: a pipeline has at least 2"),
        ("--layers 12", "--layers 12: expected a multiple of 8"),
        ("--schedules zb-h1 --layers 6", "--layers 6: expected a multiple of 4"),
        ("--microbatches 6", "--microbatches 6: interleaved schedules need a multiple of"),
        ("--heads 3", "--hidden 64: expected a multiple of --heads 3"),
        ("--hidden 0", "--hidden 0: at least 1"),
        ("--rounds 0", "--rounds 0: at least 1"),
        ("--post-validation maybe", "--post-validation maybe: give off, on, or off,on"),
        ("--env NCCL", "--env NCCL: expected NAME=VALUE"),
        ("--json /no/such/place.json", "--json /no/such/place.json"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_a_users_error_has_code_2(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", *words.split()]) == 2
    assert says in capsys.readouterr().err


def test_logs_of_two_calls_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank0.jsonl").touch()
    assert main(["--device", "cpu", "--logs", str(tmp_path)]) == 2
    assert "it is not empty" in capsys.readouterr().err


def test_without_numba_searches_are_left_out_or_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.profile.one_gpu.options._has_numba", lambda: False)
    monkeypatch.setenv("PATH", "")
    assert main([]) == 3
    assert capsys.readouterr().out.strip().endswith(": auto-1p, auto-2p, zb-v, v-half")
    assert main(["--schedules", "zb-h1,zb-v"]) == 2
    assert "--schedules zb-v: it is searched for, which needs numba" in capsys.readouterr().err


# What runs.


def test_the_default_jobs() -> None:
    assert jobs_of(DEFAULT_SCHEDULES, ["off", "on"]) == [
        Job("linear", False, ("megatron", "1f1b", "zb-h1", "auto-1p", "auto-2p")),
        Job("interleaved", False, ("interleaved", "megatron-interleaved")),
        Job("v", False, ("zb-v", "v-half")),
        Job("linear", True, ("zb-h1", "auto-1p", "auto-2p")),
        Job("v", True, ("zb-v", "v-half")),
    ]


def test_only_with_post_validation_megatrons_1f1b_runs_all_the_same() -> None:
    assert jobs_of(["v-half"], ["on"]) == [
        Job("linear", False, ("megatron", "1f1b", "zb-h1")),
        Job("v", True, ("v-half",)),
    ]


def test_schedules_take_turns_and_the_first_job_searches(tmp_path: Path) -> None:
    jobs = jobs_of(["auto-1.5p"], ["off", "on"])
    plain, validated = (plan_of(one, 2, "cpu", tmp_path) for one in jobs)
    names = ["megatron", "1f1b", "zb-h1", "auto-1.5p"]
    assert [one.label for one in plain.turns] == names * 2
    assert [one.limit for one in plain.turns] == [None, None, None, 1.5] * 2
    file = str(tmp_path / "auto-1.5p.json")
    assert [(one.schedule, one.limit) for one in validated.turns] == [(file, None)] * 2
    assert plain.turns[3].schedule == file
    plain.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plain


def test_megatron_is_told_the_job(tmp_path: Path) -> None:
    job = Job("v", True, ("zb-v",))
    plan = plan_of(job, 3, "cuda", tmp_path)
    flags = megatron_flags(job, plan, 4, SIZE, tmp_path)
    values = dict(pairwise(flags))
    assert values["--pipeline-schedule"] == str(tmp_path / "zb-v.json")
    assert values["--global-batch-size"] == "24"
    assert values["--train-iters"] == "15"  # three turns of five
    assert {"--bf16", "--optimizer-post-validation"} <= set(flags)
    plain = megatron_flags(replace(job, validates=False), replace(plan, device="cpu"), 4, SIZE,
                           tmp_path)  # fmt: skip
    assert not {"--bf16", "--optimizer-post-validation"} & set(plain)


def test_a_model_is_built_by_a_known_schedule() -> None:
    firsts = [one.first for one in jobs_of(["auto-1p", "megatron-interleaved"], ["on"])]
    assert firsts == ["1f1b", "interleaved", "zb-h1"]


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
    turns[3] = of("zb-h1", 20, 1.25)
    different = results_of({job: turns}, 3, replace(SIZE, microbatches=6))[1].different
    assert different == "loss of iteration 1: 1.25 instead of 1.5"


# All of it.


@pytest.mark.slow
def test_on_two_cpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"""--device cpu --ranks 2 --layers 4 --microbatches 4 --rounds 2
        --schedules zb-v,auto-1p --post-validation off,on
        --json {tmp_path / "figures.json"} --svg {tmp_path / "picture.svg"}"""
    assert main(words.split()) == 0
    assert "times mean nothing for GPUs" in capsys.readouterr().out
    rows = json.loads((tmp_path / "figures.json").read_text())["schedules"]
    assert [(one["schedule"], one["validates"]) for one in rows] == [
        ("megatron", False),
        ("1f1b", False),
        ("zb-h1", False),
        ("auto-1p", False),
        ("zb-v", False),
        ("auto-1p", True),
        ("zb-v", True),
    ]
    assert all(one["different"] is None for one in rows)
    assert "zb-v, validated" in (tmp_path / "picture.svg").read_text()
