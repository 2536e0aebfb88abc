"""Compiling the hot loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba

__all__ = ["compiled"]


def compiled[Function: Callable[..., Any]](function: Function) -> Function:
    """The function as machine code, kept on disk, so that only its first use ever compiles it.

    It releases Python's lock, so that threads can run several at once.
    """
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
