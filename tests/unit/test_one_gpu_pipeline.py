"""tools/profile/one_gpu_pipeline.py, all of it that needs no GPU."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tests.unit.processes import is_running
from tools.profile.one_gpu import device
from tools.profile.one_gpu.device import Unavailable, mps, rank_environment, shared_environment
from tools.profile.one_gpu.plan import (
    DEFAULT_SCHEDULES,
    ENGINE,
    Job,
    Plan,
    Size,
    jobs_of,
    megatron_flags,
    plan_of,
)
from tools.profile.one_gpu_pipeline import main

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
        ("--schedules=", "--schedules : no such schedule"),
        ("--schedules auto-0p", "--schedules auto-0p: no such schedule"),
        ("--schedules zb-h1,auto-0.1p", "auto-0.1p: with --ranks 4 that is less than one"),
        ("--schedules auto-0.3p --ranks 3", "auto-0.34p is the least"),
        ("--ranks 1", "--ranks 1: a pipeline has at least 2"),
        ("--layers 12", "--layers 12: expected a multiple of 8"),
        ("--schedules zb-h1 --layers 6", "--layers 6: expected a multiple of 4"),
        ("--microbatches 6", "--microbatches 6: interleaved schedules need a multiple of"),
        ("--heads 3", "--hidden 64: expected a multiple of --heads 3"),
        ("--hidden 0", "--hidden 0: at least 1"),
        ("--rounds 0", "--rounds 0: at least 1"),
        ("--post-validation maybe", "--post-validation maybe: give off, on, or off,on"),
        (f"--transformer-impl {ENGINE}", f"{ENGINE}: Transformer Engine has no layers for"),
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


def test_without_transformer_engine_it_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--transformer-impl", ENGINE]) == 2
    assert f"the package {ENGINE} is not installed" in capsys.readouterr().err


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


def test_layers_that_delay_are_in_jobs_without_megatrons_schedules() -> None:
    assert jobs_of(DEFAULT_SCHEDULES, ["off", "on"], ENGINE) == [
        Job("linear", False, ("megatron", "1f1b")),
        Job("linear", False, ("zb-h1", "auto-1p", "auto-2p"), delays=True),
        Job("interleaved", False, ("interleaved", "megatron-interleaved")),
        Job("v", False, ("zb-v", "v-half"), delays=True),
        Job("linear", True, ("zb-h1", "auto-1p", "auto-2p"), delays=True),
        Job("v", True, ("zb-v", "v-half"), delays=True),
    ]
    jobs = jobs_of(["zb-interleaved", "megatron-interleaved"], ["off"], ENGINE)
    assert [one.first for one in jobs] == ["1f1b", "zb-h1", "interleaved", "zb-interleaved"]
    assert len({one.name for one in jobs}) == len(jobs)


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
    assert values["--transformer-impl"] == "local"
    engine = megatron_flags(job, plan, 4, replace(SIZE, layer=ENGINE), tmp_path)
    assert dict(pairwise(engine))["--transformer-impl"] == ENGINE
    plain = megatron_flags(replace(job, validates=False), replace(plan, device="cpu"), 4, SIZE,
                           tmp_path)  # fmt: skip
    assert not {"--bf16", "--optimizer-post-validation"} & set(plain)


def test_a_model_is_built_by_a_known_schedule() -> None:
    firsts = [one.first for one in jobs_of(["auto-1p", "megatron-interleaved"], ["on"])]
    assert firsts == ["1f1b", "interleaved", "zb-h1"]


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
