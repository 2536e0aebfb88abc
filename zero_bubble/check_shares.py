"""Whether the shares that a program cuts W's into add up to whole W's, in one order."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from zero_bubble.check import Rule, Violation
from zero_bubble.program import Run
from zero_bubble.schedule import Kind, Pass

__all__ = ["check_shares", "whole_passes"]


def whole_passes(runs: Sequence[Run]) -> tuple[Pass, ...]:
    """A stage's passes in order; a W in shares stands where its first one runs."""
    begun: set[Pass] = set()
    found: list[Pass] = []
    for one in runs:
        if one.parts == 1 or one.what not in begun:
            found.append(one.what)
        if one.parts > 1:
            begun.add(one.what)
    return tuple(found)


def check_shares(stage: int, runs: Sequence[Run]) -> Iterator[Violation]:
    """The rules that a stage's shares break.

    Only W's have shares; a W in shares has each of them once. All shares of a chunk's W's see the
    microbatches in one order, so that the order of sums is a question of the schedule alone.
    """
    shares: dict[Pass, Counter[tuple[int, int]]] = defaultdict(Counter)
    for one in runs:
        if one.parts > 1:
            shares[one.what][one.part, one.parts] += 1
    for what, counts in shares.items():
        if what.kind is not Kind.W:
            yield Violation(Rule.COUNT, stage, what, "is cut into shares, which only a W can be")
            continue
        parts = max(number for _, number in counts)
        for part in range(parts):
            if (times := counts.pop((part, parts), 0)) != 1:
                share = Run(what, part, parts)
                yield Violation(Rule.COUNT, stage, share, f"runs {times} times, not once")
        for part, number in counts:
            share = Run(what, part, number)
            yield Violation(Rule.RANGE, stage, share, f"is not a share of {parts}, as others are")
    yield from _orders(stage, [one for one in runs if one.what.kind in (Kind.W, Kind.BW)])


def _orders(stage: int, weights: Sequence[Run]) -> Iterator[Violation]:
    whole = {what: index for index, what in enumerate(whole_passes(weights))}
    latest: dict[tuple[int, int, int], Pass] = {}
    cut = {one.what.chunk: one.parts for one in weights if one.parts > 1}
    for one in weights:
        # A whole W, or a fused backward, is all the shares of its chunk at once.
        parts = cut.get(one.what.chunk, 1)
        for part in (one.part,) if one.parts > 1 else range(parts):
            lane = one.what.chunk, part, parts
            before = latest.get(lane)
            if before is not None and whole[one.what] < whole[before]:
                yield Violation(Rule.ORDER, stage, one, f"runs after that of {before}")
                break
            latest[lane] = one.what
