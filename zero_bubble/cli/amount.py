"""Amounts of memory as people write and read them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["BYTES", "amount", "parse_amount"]

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
_FACTOR = {unit.lower(): factor for unit, factor in BYTES.items()}
_GRAMMAR = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z]*)", re.I)
_BYTES_FROM = 1e6
"""M_B is 1 or a small number where formulas are meant; what is above this can only be bytes."""


def amount(memory: float) -> str:
    """``7.5`` in the unit of the costs, or ``11.2 GiB`` where that can only be bytes."""
    if abs(memory) < _BYTES_FROM or memory == float("inf"):
        return f"{memory:.4g}"
    unit = next((one for one in ("GiB", "MiB") if abs(memory) >= BYTES[one]), "KiB")
    return f"{memory / BYTES[unit]:.4g} {unit}"


def parse_amount(text: str) -> float:
    """The number in ``7.5``, or the bytes in ``3GiB``; for argparse, which adds the flag's name.

    ArgumentTypeError says what would work. Whether a number makes sense is for others to say.
    """
    try:
        return float(text)
    except ValueError:
        match = _GRAMMAR.fullmatch(text.strip())
    factor = _FACTOR.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no amount of memory: expected a number such as 1.5, or bytes such as "
            f"3GiB (units: {', '.join(BYTES)})"
        )
    return float(match[1]) * factor
