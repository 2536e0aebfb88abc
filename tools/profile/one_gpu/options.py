"""The command line of one_gpu_pipeline.py, and what is wrong with it."""

from __future__ import annotations

import argparse
import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import asdict

from tools.profile.one_gpu.plan import (
    DEFAULT_SCHEDULES,
    ENGINE,
    LOCAL,
    Size,
    auto_limit,
    jobs_of,
    known,
    needs_numba,
)
from zero_bubble.builders import BUILDERS
from zero_bubble.cli.common import Parser, UsageError

__all__ = [
    "ROUNDS",
    "SIZES",
    "parser",
    "require_size",
    "schedules_of",
    "size_of",
    "validation_of",
    "variables",
]

SIZES = {
    # A message of 8 MiB beside some 14 ms of F, on a quarter of an H200.
    "cuda": Size(16, 4096, 32, 1024, 1, 12),
    "cpu": Size(8, 64, 4, 32, 1, 8),
}
_NUMBERS = ("layers", "hidden", "heads", "sequence", "microbatch_size", "microbatches")
ROUNDS = {"cuda": 3, "cpu": 2}


def parser(description: str) -> argparse.ArgumentParser:
    found = Parser(
        prog="one_gpu_pipeline.py",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="(%(default)s)")
    found.add_argument("--ranks", type=int, default=4, metavar="N", help="stages (%(default)s)")
    found.add_argument(
        "--schedules",
        metavar="NAME,...",
        help=f"megatron, megatron-interleaved, auto-Xp, {', '.join(BUILDERS)} "
        f"({','.join(DEFAULT_SCHEDULES)}); megatron, 1f1b and zb-h1 always run",
    )
    found.add_argument(
        "--post-validation",
        default="off,on",
        metavar="off|on|off,on",
        help="schedules that split B and W without it, with it, or both (%(default)s)",
    )
    found.add_argument(
        "--transformer-impl",
        choices=(LOCAL, ENGINE),
        default=LOCAL,
        help="whose layers: Megatron's, or Transformer Engine's, on a GPU (%(default)s)",
    )
    for name, what in (
        ("layers", "of the model"),
        ("hidden", "hidden size"),
        ("heads", "attention heads"),
        ("sequence", "tokens of a sequence"),
        ("microbatch-size", "sequences of a microbatch"),
        ("microbatches", "of an iteration"),
    ):
        values = [getattr(SIZES[one], name.replace("-", "_")) for one in ("cuda", "cpu")]
        found.add_argument(
            f"--{name}", type=int, metavar="N", help=f"{what} ({values[0]}; on a CPU {values[1]})"
        )
    found.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"turns of each schedule ({ROUNDS['cuda']}; on a CPU {ROUNDS['cpu']})",
    )
    found.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set on all ranks, such as NCCL_NSOCKS_PERTHREAD=4; may be repeated",
    )
    found.add_argument("--logs", metavar="DIR", help="keep what ranks say and measure there")
    found.add_argument("--json", metavar="FILE", help="also write the figures here")
    found.add_argument("--svg", metavar="FILE", help="draw the measured timelines")
    return found


def size_of(options: argparse.Namespace) -> Size:
    """The model's and the batch's, by the device where nothing else is asked for."""
    names = asdict(SIZES[options.device])
    names["layer"] = _layer(options)
    for name in _NUMBERS:
        given = getattr(options, name)
        if given is not None:
            if given < 1:
                raise UsageError(f"--{name.replace('_', '-')} {given}: at least 1 is needed")
            names[name] = given
    if options.rounds is not None and options.rounds < 1:
        raise UsageError(f"--rounds {options.rounds}: at least 1 is needed")
    size = Size(**names)
    if size.hidden % size.heads:
        raise UsageError(f"--hidden {size.hidden}: expected a multiple of --heads {size.heads}")
    return size


def _layer(options: argparse.Namespace) -> str:
    layer: str = options.transformer_impl
    flag = f"--transformer-impl {layer}"
    if layer == ENGINE and options.device == "cpu":
        raise UsageError(f"{flag}: Transformer Engine has no layers for --device cpu")
    if layer == ENGINE and importlib.util.find_spec(ENGINE) is None:
        raise UsageError(f"{flag}: the package {ENGINE} is not installed")
    return layer


def schedules_of(options: argparse.Namespace) -> list[str]:
    """The schedules asked for; of the default ones those that can run here."""
    given: str | None = options.schedules
    asked = list(DEFAULT_SCHEDULES) if given is None else given.split(",")
    if unknown := [one for one in asked if not known(one)]:
        raise UsageError(
            f"--schedules {unknown[0]}: no such schedule; choose megatron, megatron-interleaved, "
            f"auto-1p or another limit, {', '.join(BUILDERS)}"
        )
    if _has_numba():
        return asked
    without = [one for one in asked if not needs_numba(one)]
    left = ", ".join(one for one in asked if needs_numba(one))
    if options.schedules and left:
        raise UsageError(f"--schedules {left}: it is searched for, which needs numba: install it")
    print(f"without numba, which searches need, these are left out: {left}", flush=True)
    return without


def _has_numba() -> bool:
    try:
        import numba  # noqa: F401
    except ImportError:
        return False
    return True


def validation_of(options: argparse.Namespace) -> list[str]:
    asked: list[str] = options.post_validation.split(",")
    if not asked or set(asked) - {"off", "on"}:
        raise UsageError(f"--post-validation {options.post_validation}: give off, on, or off,on")
    return asked


def variables(given: Sequence[str]) -> dict[str, str]:
    """Of ``--env``."""
    for one in given:
        if not re.fullmatch(r"[A-Za-z_]\w*=.*", one):
            raise UsageError(f"--env {one}: expected NAME=VALUE")
    return dict(one.split("=", 1) for one in given)


def require_size(ranks: int, size: Size, schedules: Sequence[str]) -> None:
    """UsageError if the model or the batch cannot be spread over the ranks."""
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: a pipeline has at least 2")
    for name in schedules:
        limit = auto_limit(name)
        if limit is not None and limit * ranks < 1:
            raise UsageError(
                f"--schedules {name}: with --ranks {ranks} that is less than one microbatch; "
                f"auto-{math.ceil(100 / ranks) / 100:g}p is the least"
            )
    linear = all(job.placement == "linear" for job in jobs_of(schedules, ["off"]))
    chunks = ranks if linear else 2 * ranks
    if size.layers % chunks:
        raise UsageError(
            f"--layers {size.layers}: expected a multiple of {chunks}, so that all chunks are alike"
        )
    interleaved = any("interleaved" in one for one in schedules)
    if interleaved and size.microbatches % ranks:
        raise UsageError(
            f"--microbatches {size.microbatches}: interleaved schedules need a multiple of "
            f"--ranks {ranks}"
        )
