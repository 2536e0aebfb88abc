"""What of this project works on a machine, why not what does not, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zero_bubble.cli.doctor_facts import Facts

__all__ = ["Verdict", "verdicts"]

OLDEST_MEGATRON, NEXT_MEGATRON = (0, 17), (0, 20)
OLDEST_TORCH = (2, 6)
OLDEST_ENGINE = (2, 8)
LEAST_SHARED_MEMORY = 1 << 30
BLACKWELL = (10, 0)
SETUP = "make setup"
MEGATRON_EXTRA = "pip install -c requirements.txt -e '.[megatron]'"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one part works."""

    part: str
    works: bool
    why: str
    """What is missing; what to know, if it works."""
    remedy: str = ""
    needed_on_gpus: bool = False
    """Whether ``--strict`` fails without it."""


def verdicts(facts: Facts) -> list[Verdict]:
    """All parts, in the order in which they build on each other."""
    return [
        _scheduler(facts),
        _pictures(facts),
        _exact_solvers(facts),
        _training_on_cpu(facts),
        _training_on_gpus(facts),
        _split_layers(facts),
        _tensor_parallelism(facts),
        _fused_kernels(facts),
        _checkpoints(facts),
        _shared_gpu(facts),
    ]


def _scheduler(facts: Facts) -> Verdict:
    part = "scheduler and its command"
    if facts.python < (3, 12):
        version = ".".join(map(str, facts.python))
        return Verdict(part, False, f"Python {version} is older than 3.12", SETUP, True)
    missing = [name for name in ("numpy", "numba") if name not in facts.versions]
    if missing:
        return Verdict(part, False, _is_missing(missing), f"pip install {' '.join(missing)}", True)
    return Verdict(part, True, "", needed_on_gpus=True)


def _pictures(facts: Facts) -> Verdict:
    scheduler = _scheduler(facts)
    why = "SVG, Chrome traces, the page of a trace; in terminals as text"
    return Verdict("pictures", scheduler.works, why if scheduler.works else "the scheduler")


def _exact_solvers(facts: Facts) -> Verdict:
    methods = {"ortools": "cp-sat or windows", "highspy": "highs"}
    missing = [name for name in methods if name not in facts.versions]
    if not missing:
        return Verdict("exact solvers", True, "--method cp-sat, windows, highs")
    lost = "; ".join(f"without {name} no --method {methods[name]}" for name in missing)
    return Verdict("exact solvers", False, lost, f"pip install {' '.join(missing)}")


def _training_problems(facts: Facts) -> Iterator[tuple[str, str]]:
    """(problem, remedy) of what any training needs."""
    scheduler = _scheduler(facts)
    if not scheduler.works:
        yield scheduler.why, scheduler.remedy
    if not facts.tested_megatron:
        yield "megatron.zero_bubble is not in this Python", "pip install -e . in the repository"
    if "torch" not in facts.versions and "torch" not in facts.imported:
        yield "torch is not installed", MEGATRON_EXTRA
        return
    if "torch" in facts.errors:
        yield f"torch cannot be imported ({facts.errors['torch']})", "mend it, or " + SETUP
        return
    torch = _numbers(facts.versions.get("torch", "99"))
    if torch < OLDEST_TORCH:
        yield f"torch {facts.versions['torch']} is older than 2.6", MEGATRON_EXTRA
    if "build of torch" in facts.errors:
        yield f"torch is not whole ({facts.errors['build of torch']})", "mend it, or " + SETUP
    if "numpy" in facts.errors:
        numpy = facts.versions.get("numpy", "")
        yield f"torch cannot use numpy {numpy} ({facts.errors['numpy']})", "another numpy"
    yield from _megatron_problems(facts)


def _megatron_problems(facts: Facts) -> Iterator[tuple[str, str]]:
    version = facts.versions.get("megatron-core")
    tested = ", ".join(facts.tested_megatron)
    if version is not None and _numbers(version) < OLDEST_MEGATRON:
        yield f"megatron-core {version} has no training loop", f"0.17 or newer; tested: {tested}"
        return
    for module in ("megatron.core", "megatron.training"):
        if module in facts.errors:
            error = facts.errors[module]
            remedy = "pip install pyyaml" if "'yaml'" in error else MEGATRON_EXTRA
            if error == facts.errors.get("transformer_engine.pytorch"):
                # Megatron imports it, and takes a missing one well, but not a broken one.
                remedy = "mend Transformer Engine, or remove it"
            yield f"{module} cannot be imported ({error})", remedy
            return
        if module not in facts.imported:
            yield f"{module} is not installed", MEGATRON_EXTRA
            return


def _untested(facts: Facts) -> str:
    """A word on a Megatron that nobody has tried; nothing for one that has been."""
    version = facts.versions.get("megatron-core")
    if version is None or version in facts.tested_megatron:
        return ""
    newer = ", newer than any known" if _numbers(version) >= NEXT_MEGATRON else ""
    return f"; megatron-core {version} has not been tested{newer}"


def _training_on_cpu(facts: Facts) -> Verdict:
    part = "training on CPUs"
    problems = list(_training_problems(facts))
    if not problems and not facts.gloo:
        problems.append(("this torch has no gloo", MEGATRON_EXTRA))
    if problems:
        return _failed(part, problems)
    choice = facts.environment.get("ZERO_BUBBLE_DEVICE")
    how = "ZERO_BUBBLE_DEVICE=cpu" if facts.devices and choice != "cpu" else "as it is"
    return Verdict(part, True, f"{how}, over gloo; for correctness, not speed{_untested(facts)}")


def _gpu_problems(facts: Facts) -> Iterator[tuple[str, str]]:
    yield from _training_problems(facts)
    if facts.environment.get("ZERO_BUBBLE_DEVICE") == "cpu":
        yield "ZERO_BUBBLE_DEVICE=cpu keeps to the CPU", "unset it"
    if "torch" not in facts.imported:
        return
    if "CUDA devices" in facts.errors:
        problem = facts.errors["CUDA devices"]
        yield f"torch cannot say which devices there are ({problem})", "mend the driver, or CUDA"
    elif facts.torch_cuda is None:
        yield "this torch was built without CUDA", MEGATRON_EXTRA
    elif facts.driver is None and not facts.devices:
        yield "no driver of NVIDIA's answers (nvidia-smi)", "a machine with GPUs, docker --gpus all"
    elif not facts.devices:
        hidden = facts.environment.get("CUDA_VISIBLE_DEVICES")
        yield (
            f"torch for CUDA {facts.torch_cuda} finds no device with driver {facts.driver}"
            + (f" and CUDA_VISIBLE_DEVICES={hidden!r}" if hidden is not None else ""),
            "a newer driver, or a torch for an older CUDA",
        )
    if facts.torch_cuda is not None and facts.nccl is None:
        yield "this torch has no NCCL", MEGATRON_EXTRA
    memory = facts.shared_memory
    if memory is not None and memory < LEAST_SHARED_MEMORY:
        yield (
            f"/dev/shm has {memory >> 20} MiB: NCCL and loaders of data share memory there",
            "docker run --ipc=host, or --shm-size 8g",
        )


def _training_on_gpus(facts: Facts) -> Verdict:
    part = "training on GPUs"
    problems = list(_gpu_problems(facts))
    if problems:
        return _failed(part, problems, needed_on_gpus=True)
    count = len(facts.devices)
    stages = "a pipeline needs ranks on other machines" if count == 1 else f"{count} devices here"
    why = f"{stages}; its path over NCCL has been tested on CPUs only, over gloo{_untested(facts)}"
    return Verdict(part, True, why, needed_on_gpus=True)


def _split_layers(facts: Facts) -> Verdict:
    part = "layers that split B and W"
    problems = list(_training_problems(facts))
    if problems:
        return _failed(part, problems[:1])
    why = "Megatron's local ones: --transformer-impl local"
    if "transformer_engine.pytorch" in facts.imported:
        version = facts.versions.get("transformer-engine")
        if version is not None and _numbers(version) < OLDEST_ENGINE:
            oldest = ".".join(map(str, OLDEST_ENGINE))
            why += f"; Transformer Engine {version} cannot delay W's, which takes {oldest} or newer"
        else:
            why += f"; or Transformer Engine {version or ''}'s, not run on a GPU yet"
    return Verdict(part, True, why)


def _tensor_parallelism(facts: Facts) -> Verdict:
    part = "tensor parallelism on GPUs"
    if not facts.devices:
        return Verdict(part, False, "no GPU", "a machine with GPUs")
    given, why = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS"), ""
    if given != "1" and any(one.capability < BLACKWELL for one in facts.devices):
        shown = "is not set" if given is None else f"is {given}"
        why = f"with CUDA_DEVICE_MAX_CONNECTIONS=1, which examples/gpt3 sets; here it {shown}"
    if "apex" not in facts.imported:
        why += "; " * bool(why) + "--sequence-parallel with local layers needs Apex's norms"
    return Verdict(part, True, why)


def _fused_kernels(facts: Facts) -> Verdict:
    part = "Apex's kernels in local layers"
    if "apex" in facts.imported and facts.devices:
        return Verdict(part, True, "--gradient-accumulation-fusion has not been run here")
    flags = "--no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion"
    error = facts.errors.get("apex")
    if error is not None:
        why = f"apex cannot be imported ({error})"
    else:
        why = "no GPU" if "apex" in facts.imported else "apex is not installed"
    return Verdict(part, False, why, f"train without: {flags}")


def _checkpoints(facts: Facts) -> Verdict:
    part = "checkpoints"
    problems = list(_training_problems(facts))
    if "psutil" not in facts.versions:
        problems.append(("Megatron hangs in saving without psutil", "pip install psutil"))
    if problems:
        return _failed(part, problems[-1:], needed_on_gpus=True)
    return Verdict(part, True, "", needed_on_gpus=True)


def _shared_gpu(facts: Facts) -> Verdict:
    part = "several stages on one GPU"
    if not facts.devices:
        return Verdict(part, False, "no GPU", "a machine with a GPU")
    if facts.mps is None:
        why = "MPS (nvidia-cuda-mps-control) is not on PATH: ranks would take turns"
        return Verdict(part, False, why, "it comes with NVIDIA's driver")
    return Verdict(part, True, "by MPS: a share of the GPU for each rank")


def _failed(part: str, problems: list[tuple[str, str]], *, needed_on_gpus: bool = False) -> Verdict:
    whys, remedies = zip(*problems, strict=True)
    return Verdict(part, False, "; ".join(whys), "; ".join(dict.fromkeys(remedies)), needed_on_gpus)


def _is_missing(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} not installed"


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: 2.10.0a0+b4e4ee81d3 gives (2, 10)."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
