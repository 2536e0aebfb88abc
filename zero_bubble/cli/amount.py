"""Amounts of memory for people to read."""

from __future__ import annotations

__all__ = ["amount"]

_BYTES_FROM = 1e6
"""M_B is 1 or a small number where formulas are meant; what is above this can only be bytes."""
_UNITS = (("GiB", 2**30), ("MiB", 2**20))


def amount(memory: float) -> str:
    """``7.5`` in the unit of the costs, or ``11.2 GiB`` where that can only be bytes."""
    if abs(memory) < _BYTES_FROM or memory == float("inf"):
        return f"{memory:.4g}"
    name, size = next((one for one in _UNITS if abs(memory) >= one[1]), ("KiB", 2**10))
    return f"{memory / size:.4g} {name}"
