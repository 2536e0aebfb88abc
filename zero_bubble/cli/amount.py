"""Amounts of memory as people write them."""

from __future__ import annotations

import argparse
import re

from zero_bubble.amount import BYTES, amount

__all__ = ["BYTES", "amount", "parse_amount"]

_FACTOR = {unit.lower(): factor for unit, factor in BYTES.items()}
_GRAMMAR = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*([a-z]*)", re.I)


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
