"""Names for passes in the pictures of other profilers: ``F 3 c0``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from zero_bubble.program import Instruction, Run

__all__ = ["Ranges"]


class Ranges:
    """A `runtime.interpreter.Observer` that opens a range around each pass.

    Kind, microbatch and chunk are its name. In PyTorch's profiler it is a ``record_function``, in
    Nsight Systems an NVTX range.

    Args:
        nvtx: which of the two.
    """

    def __init__(self, *, nvtx: bool) -> None:
        self._nvtx = nvtx
        self._open: AbstractContextManager[Any] | None = None

    def before(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Run):
            return
        what = instruction.what
        name = f"{what.kind} {what.microbatch} c{what.chunk}"
        if self._nvtx:
            torch.cuda.nvtx.range_push(name)
        else:
            self._open = torch.profiler.record_function(name)
            self._open.__enter__()

    def after(self, instruction: Instruction) -> None:
        if not isinstance(instruction, Run):
            return
        if self._nvtx:
            torch.cuda.nvtx.range_pop()
        elif self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
