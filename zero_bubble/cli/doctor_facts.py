"""What ``zero-bubble doctor`` looks at: this machine, and the packages in this Python.

Neither torch nor Megatron is imported here. Versions come from the packages' metadata; a child
process imports what only an import can tell, with a limit on its time.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DISTRIBUTIONS", "IMPORTS", "Device", "Facts", "gather", "tested_versions"]

DISTRIBUTIONS = (
    "numpy",
    "numba",
    "ortools",
    "highspy",
    "torch",
    "megatron-core",
    "transformer-engine",
    "apex",
    "psutil",
)
"""As pip calls them."""
IMPORTS = ("torch", "megatron.core", "megatron.training", "transformer_engine.pytorch", "apex")
"""What may be installed and still fail: each needs others, of certain versions, or a driver."""
IMPORT_SECONDS = 300.0
"""For all of them; a quarter of a minute where nothing else runs and the disk is fast."""
SHARED_MEMORY = Path("/dev/shm")
MPS = "nvidia-cuda-mps-control"

_CHILD = """
import ctypes, importlib, json, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # which the command has blocked
try:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent
except (OSError, AttributeError):
    pass
said = open(int(sys.argv[3]), "w", encoding="utf-8")  # what is imported may print
def say(**what):
    print(json.dumps(what), file=said, flush=True)
sys.path[:] = json.loads(sys.argv[1])
found = {"errors": {}}
for name in json.loads(sys.argv[2]):
    say(trying=name)
    try:
        importlib.import_module(name)
    except BaseException as error:
        found["errors"][name] = f"{type(error).__name__}: {error}"
say(trying="torch")
torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
if torch is not None and numpy is not None and "torch" not in found["errors"]:
    try:
        torch.from_numpy(numpy.zeros(1))
    except BaseException as error:
        found["errors"]["numpy"] = f"by torch: {type(error).__name__}: {error}"
if torch is not None and "torch" not in found["errors"]:
    found["torch"] = {
        "cuda": torch.version.cuda,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
        "available": torch.cuda.is_available(),
    }
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        found["torch"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.cuda.is_available():
        shown = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        found["torch"]["devices"] = [
            (one.name, one.total_memory, (one.major, one.minor)) for one in shown
        ]
say(found=found)
"""


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device that torch can use."""

    name: str
    memory: int
    """Bytes."""
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the verdicts depend on."""

    python: tuple[int, int, int] = (3, 12, 0)
    executable: str = "python"
    cores: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of those of `DISTRIBUTIONS` that are installed."""
    errors: Mapping[str, str] = field(default_factory=dict)
    """Of those of `IMPORTS` that are there and cannot be imported; and of numpy, where torch cannot
    use it, being built for another one."""
    imported: frozenset[str] = frozenset()
    """Those of `IMPORTS` that could be."""
    tested_megatron: tuple[str, ...] = ()
    """Versions of megatron-core; none if the Megatron side is not installed."""
    torch_cuda: str | None = None
    """The CUDA that torch was built for."""
    gloo: bool = False
    nccl: str | None = None
    driver: str | None = None
    devices: tuple[Device, ...] = ()
    shared_memory: int | None = None
    """Bytes of /dev/shm; None without one."""
    mps: str | None = None
    """Path of MPS's control program."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that change what a job does."""


VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_VISIBLE_DEVICES", "ZERO_BUBBLE_DEVICE")


def gather() -> Facts:
    """Look at everything; takes the time of importing torch and Megatron, some seconds."""
    present = [name for name in IMPORTS if _is_there(name)]
    told = _ask_child(present)
    errors: dict[str, str] = told["errors"]
    torch: dict[str, Any] = told.get("torch", {})
    return Facts(
        python=sys.version_info[:3],
        executable=sys.executable,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        versions=_versions(),
        errors=errors,
        imported=frozenset(present) - errors.keys(),
        tested_megatron=tested_versions(),
        torch_cuda=torch.get("cuda"),
        gloo=bool(torch.get("gloo")),
        nccl=torch.get("nccl"),
        driver=_driver(),
        devices=tuple(
            Device(name, memory, (major, minor))
            for name, memory, (major, minor) in torch.get("devices", ())
        ),
        shared_memory=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None,
        mps=shutil.which(MPS),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _is_there(name: str) -> bool:
    """Whether a module can be found; of a package's module only the package is looked for."""
    # `megatron` is a namespace of several packages: that it is there says nothing.
    looked_for = name if name.startswith("megatron.") else name.partition(".")[0]
    try:
        return importlib.util.find_spec(looked_for) is not None
    except (ImportError, ValueError):
        return False


def tested_versions() -> tuple[str, ...]:
    """Those of Megatron that the patches name as tested.

    Read as text, since importing the patches needs torch. Empty if they are not installed.
    """
    try:
        spec = importlib.util.find_spec("megatron.zero_bubble")
    except (ImportError, ValueError):
        return ()
    for place in (spec.submodule_search_locations or ()) if spec else ():
        source = Path(place, "patches", "patching.py")
        if not source.is_file():
            continue
        for node in ast.parse(source.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "TESTED_VERSIONS"
                for target in node.targets
            ):
                return tuple(ast.literal_eval(node.value))
    return ()


def _ask_child(names: Sequence[str], seconds: float = IMPORT_SECONDS) -> dict[str, Any]:
    """What a process says that imports these. One that ends the process, or does not end itself, is
    an error of its own, and the others are asked for again without it."""
    errors: dict[str, str] = {}
    end = time.monotonic() + seconds
    while True:
        told, culprit, problem = _ask_once(names, max(1.0, end - time.monotonic()))
        if told is not None:
            return {**told, "errors": {**told["errors"], **errors}}
        # Without a culprit the process said nothing at all: then there is none to leave out.
        errors |= dict.fromkeys([culprit] if culprit else names, problem)
        names = [name for name in names if name not in errors]
        if not names:
            return {"errors": errors}


def _ask_once(
    names: Sequence[str], seconds: float
) -> tuple[dict[str, Any] | None, str | None, str]:
    """(what the process found, or else which module it was in, and what became of it)."""
    with tempfile.TemporaryFile() as said:
        command = [sys.executable, "-c", _CHILD, json.dumps(sys.path), json.dumps(names)]
        try:
            done = subprocess.run(
                [*command, str(said.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                pass_fds=[said.fileno()],
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            problem = f"importing it took more than {seconds:.0f} s"
        else:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            problem = f"the process that imported it ended with code {done.returncode}: {last}"
        said.seek(0)
        lines = [json.loads(line) for line in said.read().decode().splitlines()]
    if lines and "found" in lines[-1]:
        return lines[-1]["found"], None, ""
    return None, lines[-1].get("trying") if lines else None, problem


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
