"""The last W's of an iteration, ordered by parameter: reduction of gradients begins earlier.

A bucket of gradients can be reduced over the data-parallel group once the last microbatch's W has
added to it. W's run in shares, a share for each bucket: all microbatches' gradients of the first
bucket, then those of the next. Reduction of one then overlaps with computation of the others (the
paper's appendix A).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from zero_bubble.program import Instruction, Program, Run
from zero_bubble.schedule import Kind, Pass

__all__ = ["reorder_row", "reorder_tail"]


def reorder_tail(program: Program, parts: int | Sequence[int]) -> Program:
    """The same program with the last W's of each stage in shares, ordered by parameter.

    Args:
        parts: into how many shares W's are cut: one number, or one for each stage. With 1 they
            stay whole, and those of one chunk come before those of another.

    Raises:
        ValueError: fewer than one part, or not a number for each stage.
    """
    rows = program.instructions
    numbers = [parts] * len(rows) if isinstance(parts, int) else [*parts]
    if len(numbers) != len(rows):
        raise ValueError(f"{len(numbers)} numbers of parts for {len(rows)} stages: give one each")
    reordered = map(reorder_row, rows, numbers)
    return replace(program, instructions=tuple(reordered))


def reorder_row(row: Sequence[Instruction], parts: int) -> tuple[Instruction, ...]:
    """One stage's instructions with its last W's in shares, ordered by parameter.

    Only W's after the stage's last F, R and fused backward are touched, and they go where W's have
    been. Memory only falls there, so any order of them fits where the old one did. Each share stays
    behind its B, and the shares of one parameter stay in their order, so that sums have the same
    bits.

    With one chunk no order ends the last reduction earlier, however long reductions take, if shares
    take equal time. Of several chunks that whose last B is first comes first; W's of different
    chunks are taken to last equally long. A W whose shares stay together is left whole.

    Raises:
        ValueError: ``parts`` below 1.
    """
    if parts < 1:
        raise ValueError(f"parts must be at least 1, not {parts}")
    begin = _after_last(row, (Kind.F, Kind.R, Kind.BW))
    weights = {
        index: one.what
        for index, one in enumerate(row)
        if index >= begin and isinstance(one, Run) and one.what.kind is Kind.W
    }
    if len(weights) < 2:
        return tuple(row)
    shares = _Shares(weights, _places_of_backwards(row), parts).in_order()
    filled: list[Instruction] = []
    for index, one in enumerate(row):
        filled += shares[:parts] if index in weights else (one,)
        shares = shares[parts:] if index in weights else shares
    return tuple(_joined(filled, parts))


@dataclass(frozen=True, slots=True)
class _Lane:
    """One share of one chunk's W's: the same parameters in each microbatch."""

    chunk: int
    part: int
    passes: tuple[Pass, ...]
    """In the order that they have to keep."""
    released: tuple[int, ...]
    """Place in the row that each has to follow: its own B's, or that of one before it."""


class _Shares:
    """Deals shares out to the places of W's, from the last to the first.

    Going backwards, a share must be dealt before the place of its B is passed. As long as that
    leaves a choice, the lane that is to end last gives one; so the others end early.
    """

    def __init__(
        self, weights: Mapping[int, Pass], backward: Mapping[Pass, int], parts: int
    ) -> None:
        """The W's by their places in the row, and the place of each one's B."""
        self._places = [place for place in weights for _ in range(parts)]
        chunks: dict[int, list[Pass]] = {}
        for what in weights.values():
            chunks.setdefault(what.chunk, []).append(what)
        last = {chunk: backward[passes[-1]] for chunk, passes in chunks.items()}
        self._lanes: list[_Lane] = []
        """In the order in which they should end."""
        for chunk in sorted(chunks, key=lambda one: (last[one], one)):
            passes = tuple(chunks[chunk])
            released = tuple(accumulate((backward[one] for one in passes), max))
            self._lanes += [_Lane(chunk, part, passes, released) for part in range(parts)]
        self._left = [len(lane.passes) for lane in self._lanes]
        # What is left to deal that has to follow a place, and where it could go: when the two are
        # equal for a place, nothing else may be dealt behind it.
        self._waiting = Counter(place for lane in self._lanes for place in lane.released)
        self._parts = parts

    def in_order(self) -> list[Run]:
        """All shares, in the order in which they are to run."""
        dealt: list[Run] = []
        for number in reversed(range(len(self._places))):
            lane = self._choose(number)
            self._left[lane] -= 1
            index, chosen = self._left[lane], self._lanes[lane]
            self._waiting[chosen.released[index]] -= 1
            dealt.append(Run(chosen.passes[index], chosen.part, self._parts))
        return dealt[::-1]

    def _choose(self, number: int) -> int:
        """The lane that gives the share for a place, counted in shares."""
        bound = self._bound(number)
        for lane in reversed(range(len(self._lanes))):
            left = self._left[lane]
            if left and bound <= self._lanes[lane].released[left - 1] < self._places[number]:
                return lane
        raise ValueError(f"the W's after instruction {bound} do not all follow their B's")

    def _bound(self, number: int) -> int:
        """The place of the B that the share dealt here has to follow, or one behind it."""
        waiting, free, place = 0, 0, number
        for released in sorted(self._waiting, reverse=True):
            while place >= 0 and self._places[place] > released:
                place, free = place - 1, free + 1
            waiting += self._waiting[released]
            if waiting and waiting == free:
                return released
        return -1


def _joined(row: Sequence[Instruction], parts: int) -> list[Instruction]:
    """With W's left whole whose shares follow one another."""
    found: list[Instruction] = []
    index = 0
    while index < len(row):
        one = row[index]
        if isinstance(one, Run) and one.parts > 1:
            whole = [Run(one.what, part, parts) for part in range(parts)]
            if [*row[index : index + parts]] == whole:
                found.append(Run(one.what))
                index += parts
                continue
        found.append(one)
        index += 1
    return found


def _after_last(row: Sequence[Instruction], kinds: Sequence[Kind]) -> int:
    """The place behind the last pass of these kinds."""
    return 1 + max(
        (i for i, one in enumerate(row) if isinstance(one, Run) and one.what.kind in kinds),
        default=-1,
    )


def _places_of_backwards(row: Sequence[Instruction]) -> dict[Pass, int]:
    """By W: the place of its B."""
    return {
        Pass(Kind.W, one.what.microbatch, one.what.chunk): index
        for index, one in enumerate(row)
        if isinstance(one, Run) and one.what.kind is Kind.B
    }
