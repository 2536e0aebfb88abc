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
QUESTIONS = ("build of torch", "numpy", "CUDA devices")
"""What torch is asked for once it is imported: each may fail, or end the process."""
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
def build():
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    shared = torch.distributed
    nccl = shared.is_available() and shared.is_nccl_available()
    return {
        "cuda": torch.version.cuda,
        "gloo": shared.is_available() and shared.is_gloo_available(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
    }
def numpy():
    if "torch" in sys.modules and "numpy" in sys.modules:
        sys.modules["torch"].from_numpy(sys.modules["numpy"].zeros(1))
    return {}
def devices():
    if "torch" not in sys.modules or not sys.modules["torch"].cuda.is_available():
        return {}
    cuda = sys.modules["torch"].cuda
    shown = [cuda.get_device_properties(i) for i in range(cuda.device_count())]
    return {"devices": [(one.name, one.total_memory, (one.major, one.minor)) for one in shown]}
questions = {"build of torch": build, "numpy": numpy, "CUDA devices": devices}
sys.path[:] = json.loads(sys.argv[1])
for name in json.loads(sys.argv[2]):
    say(trying=name)
    try:
        if name in questions:
            say(found=questions[name]())
        else:
            importlib.import_module(name)
    except BaseException as error:
        say(failed=name, why=f"{type(error).__name__}: {error}")
say(trying=None)
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
    """Of those of `IMPORTS` that are there and cannot be imported, and of `QUESTIONS` without an
    answer."""
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
    torch: dict[str, Any] = told["found"]
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
    """What a process says that imports these and answers `QUESTIONS`.

    One of them that ends the process, or does not end within ``seconds``, is an error of its own,
    and the others are asked for again without it.
    """
    left, found, errors = [*names, *QUESTIONS], dict[str, Any](), dict[str, str]()
    while left:
        said, problem = _ask_once(left, seconds)
        for line in said:
            found |= line.get("found", {})
        errors |= {line["failed"]: line["why"] for line in said if "failed" in line}
        tried = [line["trying"] for line in said if "trying" in line] or [None]
        if said and tried[-1] is None:
            break
        # Without a culprit the process said nothing at all: then there is none to leave out.
        culprits = [one for one in left if tried[-1] in (one, None)]
        errors |= dict.fromkeys(culprits, problem)
        left = [one for one in left if one not in culprits]
    return {"errors": errors, "found": found}


def _ask_once(names: Sequence[str], seconds: float) -> tuple[list[dict[str, Any]], str]:
    """The lines that a process said, and what became of it."""
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
            problem = f"it took more than {seconds:g} s"
        else:
            last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
            problem = f"the process ended with code {done.returncode}: {last}"
        said.seek(0)
        return [json.loads(line) for line in said.read().decode().splitlines()], problem


def _driver() -> str | None:
    """The version of NVIDIA's kernel driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
