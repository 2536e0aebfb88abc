"""Memory limits as people write them: ``1.5p``, ``12GiB``, ``7.5``, ``inf``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from itertools import groupby

from zero_bubble.cli.amount import BYTES, amount
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement

__all__ = ["add_memory_limit", "limit_line", "memory_limits"]

_FACTOR = {unit.lower(): factor for unit, factor in BYTES.items()}
_GRAMMAR = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?inf|nan)\s*([a-z]*)", re.I)
_FLAG = "--memory-limit"
_NONE = "none"


def add_memory_limit(parser: argparse.ArgumentParser) -> None:
    """``--memory-limit``; `memory_limits` reads its text."""
    parser.add_argument(
        _FLAG,
        metavar="LIMIT",
        help="most memory a stage may hold: 1.5p is 1.5 * stages * M_B (1p is what 1F1B needs), "
        "12GiB or 80GB are bytes, a bare number is in the unit of the costs, inf is no limit; one "
        "for all stages, or one each, separated by commas",
    )


def memory_limits(text: str, placement: Placement, costs: Costs) -> tuple[float, ...]:
    """The limit of each stage, in the unit of the costs' memory, from ``--memory-limit``'s text.

    ``Xp`` is X * p * M_B, with p stages and the M_B of that stage: the sum over its chunks. Bytes
    need costs in bytes. ValueError names the part that is wrong, and what would work.
    """
    costs.require(placement)
    stages = placement.num_stages
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1:
        parts *= stages
    if len(parts) != stages:
        raise ValueError(
            f"{_FLAG} {text}: {len(parts)} limits for {stages} stages: give one, or one each"
        )
    return tuple(
        _limit(part, stages, sum(costs.m_b[stage]), stage) for stage, part in enumerate(parts)
    )


def limit_line(text: str, limits: Sequence[float], costs: Costs) -> str:
    """``limit: 1p = 4 M_B on every stage``: what a limit, given as ``text``, comes to."""
    shown = [_shown(limit, costs) for limit in limits]
    runs = [(value, len(list(stages))) for value, stages in groupby(shown)]
    if len(runs) == 1:
        value = shown[0]
        # What says the same twice is said once.
        same = text.replace(" ", "").lower() in {value.split()[0], value.replace(" ", "").lower()}
        return f"limit: {value if same or value == _NONE else f'{text} = {value}'} on every stage"
    parts, first = [], 0
    for value, count in runs:
        where = f"stage {first}" if count == 1 else f"stages {first} to {first + count - 1}"
        parts.append(f"{value} on {where}")
        first += count
    given = "" if "," in text else f"{text} = "
    return f"limit: {given}{', '.join(parts)}"


def _shown(limit: float, costs: Costs) -> str:
    if math.isinf(limit):
        return _NONE
    text = amount(limit)
    if " " in text:  # it has a unit
        return text
    whole = all(math.isclose(sum(row), 1.0) for row in costs.m_b)
    return f"{text} {'M_B' if whole else 'in units of the costs'}"


def _limit(text: str, stages: int, m_b: float, stage: int) -> float:
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(f"{_FLAG} {text!r}: expected a limit such as 1.5p, 12GiB, 7.5 or inf")
    number, unit = float(match[1]), match[2].lower()
    if math.isnan(number) or number < 0:
        raise ValueError(f"{_FLAG} {text}: must be a number, at least 0, such as 1.5p or 12GiB")
    if not unit or math.isinf(number):
        return number
    if unit == "p":
        return number * stages * m_b
    if unit not in _FACTOR:
        raise ValueError(f"{_FLAG} {text}: unknown unit {match[2]!r}; known: p, {', '.join(BYTES)}")
    if m_b <= 1:
        # Costs in units of M_B: any number of bytes would be no limit at all.
        raise ValueError(
            f"{_FLAG} {text} is in bytes, but the costs are not: a microbatch takes {m_b:.6g} on "
            f"stage {stage}; give M_B in bytes (--m-b, --costs), or a limit such as 1.5p"
        )
    return number * _FACTOR[unit]
