"""``zero-bubble doctor``: what is installed, what of this project works with it, and why not."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict

from zero_bubble.cli.common import Commands, add_command
from zero_bubble.cli.doctor_facts import MPS, Facts, gather
from zero_bubble.cli.doctor_verdicts import Verdict, verdicts

__all__ = ["add", "run"]

_WIDTH = 110


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "doctor",
        run,
        summary="what works on this machine, and what to do about the rest",
        description="Looks at Python, torch, CUDA, NCCL, Megatron and other packages, and says\n"
        "what of this project works with them. torch and Megatron are imported in a\n"
        "process of its own, which takes some seconds. Nothing is changed.",
        examples="""
            zero-bubble doctor
            zero-bubble doctor --json
            zero-bubble doctor --strict
        """,
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="end with code 1 if something is missing that a job on GPUs needs",
    )


def run(arguments: argparse.Namespace) -> int:
    facts = gather()
    found = verdicts(facts)
    missing = [one.part for one in found if one.needed_on_gpus and not one.works]
    print(_as_json(facts, found) if arguments.json else _as_text(facts, found))
    if arguments.strict and not arguments.json:
        print(f"\nA job on GPUs lacks: {', '.join(missing) or 'nothing'}")
    return int(arguments.strict and bool(missing))


def _as_json(facts: Facts, found: list[Verdict]) -> str:
    everything = asdict(facts) | {"imported": sorted(facts.imported)}
    return json.dumps({"facts": everything, "works": [asdict(one) for one in found]}, indent=1)


def _as_text(facts: Facts, found: list[Verdict]) -> str:
    works = [(one.part, _answer(one)) for one in found]
    return "\n".join(["Found", *_columns(_shown(facts)), "", "Works here", *_columns(works)])


def _answer(verdict: Verdict) -> str:
    answer = "yes" if verdict.works else "no"
    said = answer + (f": {verdict.why}" if verdict.why else "")
    return f"{said}\nremedy: {verdict.remedy}" if verdict.remedy else said


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Names to the left, what is said of them beside, wrapped."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows) + 4
    lines = []
    for name, text in rows:
        for number, paragraph in enumerate(text.split("\n")):
            lines += textwrap.wrap(
                paragraph,
                _WIDTH,
                initial_indent=f"  {'' if number else name}".ljust(width),
                subsequent_indent=" " * width,
                break_long_words=False,
                break_on_hyphens=False,
            )
    return lines


def _shown(facts: Facts) -> Iterable[tuple[str, str]]:
    versions = facts.versions

    def package(name: str, module: str | None = None) -> str:
        shown = versions.get(name, "not installed")
        error = facts.errors.get(module or name)
        if error is not None:
            problem = "torch cannot use it" if name == "numpy" else "cannot be imported"
            return f"{shown}; {problem} ({error})"
        # Built with a system's torch, a package may have no metadata.
        return "there" if shown == "not installed" and module in facts.imported else shown

    yield "Python", f"{'.'.join(map(str, facts.python))} ({facts.executable})"
    yield "cores", str(facts.cores)
    built = f", built for CUDA {facts.torch_cuda}" if facts.torch_cuda else ""
    yield "torch", package("torch", "torch") + built
    yield "NVIDIA driver", facts.driver or "none"
    yield "CUDA devices", "\n".join(
        f"{one.name}, {one.memory / 2**30:.0f} GiB, sm_{one.capability[0]}{one.capability[1]}"
        for one in facts.devices
    ) or facts.errors.get("CUDA devices", "none")  # fmt: skip
    yield "NCCL", facts.nccl or "none"
    yield "megatron-core", package("megatron-core", "megatron.core") + _tested(facts)
    yield "Transformer Engine", package("transformer-engine", "transformer_engine.pytorch")
    yield "Apex", package("apex", "apex")
    yield "MPS", facts.mps or f"{MPS} is not on PATH"
    for name in ("psutil", "numpy", "numba", "ortools", "highspy"):
        yield name, package(name)
    memory = facts.shared_memory
    yield "/dev/shm", "none" if memory is None else f"{memory / 2**30:.1f} GiB"
    connections = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set (CUDA takes 8)")
    yield "CUDA_DEVICE_MAX_CONNECTIONS", connections
    yield "ZERO_BUBBLE_DEVICE", facts.environment.get("ZERO_BUBBLE_DEVICE", "not set")


def _tested(facts: Facts) -> str:
    version = facts.versions.get("megatron-core")
    if version is None or not facts.tested_megatron:
        return ""
    tested = "tested" if version in facts.tested_megatron else "not tested"
    return f" ({tested}; versions tested: {', '.join(facts.tested_megatron)})"
