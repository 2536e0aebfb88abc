"""Amounts of memory as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_HALF_EVEN, Context
from types import MappingProxyType

__all__ = ["BYTES", "amount", "in_bytes", "is_bytes"]

BYTES: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
    }
)
"""Bytes of each unit."""
_SHOWN = ("GiB", "MiB", "KiB")
_BYTES_FROM = 1e6
"""M_B is 1 or a small number where formulas are meant; what is above this can only be bytes."""


def is_bytes(*memory: float) -> bool:
    """Whether amounts in one unit can only be bytes: one of them is that large."""
    return any(math.isfinite(one) and abs(one) >= _BYTES_FROM for one in memory)


def amount(memory: float) -> str:
    """``7.5`` in the unit of the costs, or ``11.2 GiB`` where that can only be bytes."""
    return in_bytes(memory) if is_bytes(memory) else f"{memory:.4g}"


def in_bytes(memory: float, *, rounding: str = ROUND_HALF_EVEN) -> str:
    """So many bytes with four digits: ``300 B``, ``11.2 GiB``.

    ``rounding`` is one of `decimal`'s: an amount that is the least which works is rounded up, so
    that it works as it is read.
    """
    unit = next((one for one in _SHOWN if abs(memory) >= BYTES[one]), "B")
    # Twelve digits hide what floating point adds, which would be rounded up as well.
    exact = f"{memory / BYTES[unit]:.12g}"
    digits = Context(prec=4, rounding=rounding).create_decimal(exact)
    return f"{float(digits):.4g} {unit}"
