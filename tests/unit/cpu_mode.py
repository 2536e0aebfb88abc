"""A process in CPU mode, with Megatron's groups over one gloo rank, for tests that need Megatron.

CPU mode changes torch for a whole process. Pytest's own process must stay as it is: tests for GPUs
may run in it later. So such a test calls a function of a module that only this process imports.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any, Protocol
from unittest import mock

__all__ = ["Check", "checks_of"]


class Check(Protocol):
    """Calls a function of a module by name, in the other process; raises what it raised."""

    def __call__(self, function: str, /, **arguments: Any) -> Any: ...


def checks_of(module: str, *, alone: bool = False, engine: bool = False) -> Check:
    """Runs functions of ``module`` in the one process in CPU mode, which starts when first used.

    ``alone``: in a process of its own, for those that change Megatron. ``engine``: in one where
    Megatron finds the stand-in for Transformer Engine.
    """

    def check(function: str, /, **arguments: Any) -> Any:
        process = _process(module if alone else "", engine)
        return process.submit(_call, module, function, arguments).result()

    return check


@cache
def _process(_user: str, engine: bool) -> ProcessPoolExecutor:
    """Shared by all tests of a user, since importing Megatron takes seconds; ends with pytest."""
    start = _start_with_engine if engine else _start
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=start)


def _start_with_engine() -> None:
    from megatron.zero_bubble.patches import cpu
    from tests.unit import stand_in_te

    stand_in_te.install()
    with mock.patch.object(cpu, "_block_cuda_packages"):
        _start()


def _start() -> None:
    os.environ |= {
        "ZERO_BUBBLE_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": "1",  # what is said by rank 0 alone is no news here
    }
    from megatron.zero_bubble.patches import cpu

    cpu.install()
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()


def _call(module: str, function: str, arguments: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), function)(**arguments)
