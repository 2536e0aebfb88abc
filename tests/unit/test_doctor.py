"""``zero-bubble doctor``: what it says of machines, made up and this one."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron.zero_bubble import layer_arguments
from megatron.zero_bubble.patches.patching import NEXT_UNKNOWN, OLDEST, TESTED_VERSIONS
from zero_bubble.cli import doctor, doctor_facts, doctor_verdicts, main
from zero_bubble.cli.doctor_facts import Device, Facts
from zero_bubble.cli.doctor_verdicts import Verdict, verdicts

H100 = Device("NVIDIA H100 80GB HBM3", 85_000_000_000, (9, 0))
BLACKWELL = Device("NVIDIA B200", 190_000_000_000, (10, 0))
LAPTOP = Facts(
    cores=8,
    versions={
        "numpy": "2.4.6",
        "numba": "0.68.1",
        "ortools": "9.15",
        "highspy": "1.16.0",
        "torch": "2.11.0",
        "megatron-core": "0.19.2",
        "psutil": "7.2.2",
    },
    imported=frozenset({"torch", "megatron.core", "megatron.training"}),
    tested_megatron=("0.19.2",),
    torch_cuda="13.0",
    gloo=True,
    nccl="2.28.9",
    shared_memory=8 << 30,
)
NODE = replace(
    LAPTOP,
    versions={**LAPTOP.versions, "apex": "0.1"},
    imported=LAPTOP.imported | {"apex"},
    driver="580.95.05",
    devices=(H100,) * 8,
    mps="/usr/bin/nvidia-cuda-mps-control",
    environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
)
Capture = pytest.CaptureFixture[str]


def of(facts: Facts) -> dict[str, Verdict]:
    return {one.part: one for one in verdicts(facts)}


def without(facts: Facts, *names: str, imported: str = "") -> Facts:
    versions = {name: value for name, value in facts.versions.items() if name not in names}
    return replace(facts, versions=versions, imported=facts.imported - {imported})


def test_everything_works_on_a_node_of_gpus() -> None:
    assert all(one.works for one in verdicts(NODE))


def test_a_machine_without_gpus() -> None:
    works = {part: one.works for part, one in of(LAPTOP).items()}
    assert works == {
        "scheduler and its command": True,
        "pictures": True,
        "exact solvers": True,
        "training on CPUs": True,
        "training on GPUs": False,
        "layers that split B and W": True,
        "tensor parallelism on GPUs": False,
        "Apex's kernels in local layers": False,
        "checkpoints": True,
        "several stages on one GPU": False,
    }


def test_all_that_does_not_work_has_a_reason_and_a_remedy() -> None:
    for facts in (LAPTOP, Facts(), Facts(python=(3, 11, 4))):
        for one in verdicts(facts):
            assert one.works or (one.why and (one.remedy or one.part == "pictures")), one


@pytest.mark.parametrize(
    ("facts", "part", "why", "remedy"),
    [
        (
            replace(LAPTOP, python=(3, 11, 9)),
            "scheduler and its command",
            "Python 3.11.9 is older than 3.12",
            "make setup",
        ),
        (
            without(LAPTOP, "numba"),
            "scheduler and its command",
            "numba is not installed",
            "pip install numba",
        ),
        (
            without(LAPTOP, "highspy"),
            "exact solvers",
            "without highspy no --method highs",
            "pip install highspy",
        ),
        (
            without(LAPTOP, "torch", imported="torch"),
            "training on CPUs",
            "torch is not installed",
            "'.[megatron]'",
        ),
        (
            replace(LAPTOP, errors={"torch": "OSError: libcudart"}),
            "training on CPUs",
            "torch cannot be imported (OSError: libcudart)",
            "make setup",
        ),
        (
            replace(LAPTOP, versions={**LAPTOP.versions, "torch": "2.5.1"}),
            "training on CPUs",
            "torch 2.5.1 is older than 2.6",
            "'.[megatron]'",
        ),
        (
            replace(LAPTOP, versions={**LAPTOP.versions, "megatron-core": "0.16.1"}),
            "training on CPUs",
            "megatron-core 0.16.1 has no training loop",
            "0.17 or newer; tested: 0.19.2",
        ),
        (
            replace(
                LAPTOP, errors={"megatron.core": "ModuleNotFoundError: No module named 'yaml'"}
            ),
            "training on CPUs",
            "megatron.core cannot be imported",
            "pip install pyyaml",
        ),
        (
            replace(LAPTOP, tested_megatron=()),
            "training on CPUs",
            "megatron.zero_bubble is not in this Python",
            "pip install -e .",
        ),
        (replace(LAPTOP, gloo=False), "training on CPUs", "no gloo", "'.[megatron]'"),
        (LAPTOP, "training on GPUs", "no driver of NVIDIA's answers", "docker --gpus all"),
        (
            replace(LAPTOP, driver="470.1", environment={"CUDA_VISIBLE_DEVICES": ""}),
            "training on GPUs",
            "finds no device with driver 470.1 and CUDA_VISIBLE_DEVICES=''",
            "a newer driver",
        ),
        (
            replace(LAPTOP, torch_cuda=None),
            "training on GPUs",
            "this torch was built without CUDA",
            "'.[megatron]'",
        ),
        (replace(NODE, nccl=None), "training on GPUs", "this torch has no NCCL", "'.[megatron]'"),
        (
            replace(NODE, shared_memory=64 << 20),
            "training on GPUs",
            "/dev/shm has 64 MiB",
            "--shm-size",
        ),
        (
            replace(NODE, environment={"ZERO_BUBBLE_DEVICE": "cpu"}),
            "training on GPUs",
            "ZERO_BUBBLE_DEVICE=cpu keeps to the CPU",
            "unset it",
        ),
        (
            replace(NODE, errors={"numpy": "RuntimeError: Numpy is not available"}),
            "training on GPUs",
            "torch cannot use numpy 2.4.6 (RuntimeError: Numpy is not available)",
            "another numpy",
        ),
        (
            replace(NODE, devices=(), errors={"CUDA devices": "the process ended with code -11"}),
            "training on GPUs",
            "torch cannot say which devices there are (the process ended with code -11)",
            "mend the driver",
        ),
        (without(LAPTOP, "psutil"), "checkpoints", "without psutil", "pip install psutil"),
        (replace(NODE, mps=None), "several stages on one GPU", "is not on PATH", "driver"),
        (
            replace(
                NODE, imported=LAPTOP.imported, errors={"apex": "ImportError: undefined symbol"}
            ),
            "Apex's kernels in local layers",
            "apex cannot be imported (ImportError: undefined symbol)",
            "--no-persist-layer-norm",
        ),
    ],
)
def test_what_is_missing(facts: Facts, part: str, why: str, remedy: str) -> None:
    verdict = of(facts)[part]
    assert not verdict.works
    assert why in verdict.why
    assert remedy in verdict.remedy


def test_what_works_comes_with_what_to_know() -> None:
    for version, said in (("0.18.0", "not been tested"), ("0.20.0", "newer than any known")):
        facts = replace(LAPTOP, versions={**LAPTOP.versions, "megatron-core": version})
        assert said in of(facts)["training on CPUs"].why
    assert "not been tested" not in of(LAPTOP)["training on CPUs"].why
    assert "tested on CPUs only" in of(NODE)["training on GPUs"].why
    for version, said in (
        ("2.20.2", "or Transformer Engine 2.20.2's"),
        ("2.7.0", "which takes 2.8 or newer"),
    ):
        engine = replace(
            NODE,
            imported=NODE.imported | {"transformer_engine.pytorch"},
            versions={**NODE.versions, "transformer-engine": version},
        )
        assert said in of(engine)["layers that split B and W"].why
    queues = {device: of(replace(NODE, devices=(device,), environment={}))
              for device in (H100, BLACKWELL)}  # fmt: skip
    why = {device: one["tensor parallelism on GPUs"].why for device, one in queues.items()}
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in why[H100]
    assert "here it is not set" in why[H100]
    assert why[BLACKWELL] == ""


def test_versions_are_those_that_the_patches_know() -> None:
    assert doctor_facts.tested_versions() == TESTED_VERSIONS
    assert (OLDEST, NEXT_UNKNOWN) == (
        doctor_verdicts.OLDEST_MEGATRON,
        doctor_verdicts.NEXT_MEGATRON,
    )
    assert layer_arguments.OLDEST == doctor_verdicts.OLDEST_ENGINE


@pytest.mark.parametrize(
    ("facts", "code", "lacks"),
    [
        (LAPTOP, 1, "training on GPUs"),
        (NODE, 0, "nothing"),
        (without(NODE, "psutil"), 1, "checkpoints"),
    ],
)
def test_strict_is_about_jobs_on_gpus(
    facts: Facts, code: int, lacks: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: facts)
    assert main(["doctor"]) == 0
    assert "lacks" not in capsys.readouterr().out
    assert main(["doctor", "--strict"]) == code
    assert capsys.readouterr().out.endswith(f"\n\nA job on GPUs lacks: {lacks}\n")


def test_columns_are_aligned_and_plain(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: LAPTOP)
    main(["doctor"])
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    found, works = (part.splitlines()[1:] for part in out.split("\n\n"))
    for lines in (found, works):
        starts = {len(line) - len(line[2:].lstrip()) for line in lines if line.startswith("   ")}
        values = {line.index("no") for line in lines if line.startswith("  training on GPUs ")}
        assert len(starts | values) <= 1
    assert "  megatron-core                0.19.2 (tested; versions tested: 0.19.2)" in found
    assert max(map(len, out.splitlines())) <= 110


def test_json_has_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(doctor, "gather", lambda: NODE)
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["devices"][0] == {
        "name": H100.name,
        "memory": H100.memory,
        "capability": [9, 0],
    }
    assert [one["part"] for one in told["works"]] == [one.part for one in verdicts(NODE)]


def test_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'megatron', 'numba', 'ortools', 'highspy'}"
    program = f"import sys, zero_bubble.cli.doctor; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_broken_transformer_engine_is_what_keeps_megatron_from_importing() -> None:
    error = "OSError: libcublas.so.13: cannot open shared object file"
    broken = {"transformer_engine.pytorch": error, "megatron.core": error}
    imported = LAPTOP.imported - {"megatron.core", "megatron.training"}
    verdict = of(replace(LAPTOP, errors=broken, imported=imported))["training on CPUs"]
    assert error in verdict.why
    assert verdict.remedy == "mend Transformer Engine, or remove it"


@pytest.mark.slow
def test_this_machine() -> None:
    """With torch and Megatron: what the tests themselves rely on must work."""
    done = subprocess.run(
        [sys.executable, "-m", "zero_bubble", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0
    works = {one["part"]: one["works"] for one in json.loads(done.stdout)["works"]}
    for part in ("scheduler and its command", "training on CPUs", "checkpoints"):
        assert works[part]
