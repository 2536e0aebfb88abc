"""The part of a schedule that a solver may reorder, cut out of what stays as it is.

What is fixed before the block gives each of its passes an earliest start, what is fixed after it
the time that at least remains from the pass's end to the end of the schedule. So a window into a
long schedule is as small a model as a short schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from zero_bubble.search.exact_ticks import Ticks, floating_stages, memory_units
from zero_bubble.search.orders import Evaluation, evaluate
from zero_bubble.search.problem import Ints, Problem

__all__ = ["Block", "Edge", "Memory", "cut", "entries"]

type Edge = tuple[int, int, int]
"""(before, after, ticks from the end of the one to the earliest start of the other)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What passes of a stage hold, in whole units, by the block's index of the pass."""

    delta: dict[int, int]
    """Added from this pass on: M_B for F, -(M_B - M_W) for B, -M_W for W."""
    room: int
    """Limit less what passes before the block still hold."""


@dataclass(frozen=True, slots=True)
class Block:
    """Passes that a solver may reorder, indexed from 0; all times are ticks."""

    code: Ints
    """Code of each pass, as in `zero_bubble.search.orders`."""
    per_kind: int
    """Number of codes of each kind: a B's or W's code modulo this is its F's."""
    stage: Ints
    duration: Ints
    release: Ints
    """Earliest start after what is fixed before the block."""
    tail: Ints
    """From the end of the pass at least so much of its stage's, or any other stage's, cost follows.

    Less the start of that stage, unless ``entry`` names it.
    """
    edges: tuple[Edge, ...]
    """What each pass waits for, as far as it is in the block."""
    chains: tuple[tuple[int, ...], ...]
    """Passes of a stage that must keep this order: a chunk's F's, B's or W's by microbatch."""
    entry: dict[int, tuple[int, int, int]]
    """Stage -> (its first pass, that pass's source, ticks from the source's end to its start).

    Of stages whose first pass is in the block: it starts as soon as its input is there, and the
    stage's cost counts from there.
    """
    memory: dict[int, Memory]
    """By stage, where there is a limit that could be exceeded."""
    rows: tuple[tuple[int, ...], ...]
    """The incumbent's order of each stage's passes."""
    start: Ints
    """The incumbent's starts."""
    target: int
    """The incumbent's cost."""
    floor: int
    """What the fixed passes alone cost at least."""
    before: tuple[Ints, ...]
    """Codes fixed before the block, by stage."""
    after: tuple[Ints, ...]
    """Codes fixed after the block, by stage."""

    def merge(self, key: npt.NDArray[np.float64], shape: tuple[int, int]) -> Ints:
        """The whole schedule as rows of codes, each stage's passes of the block sorted by key."""
        merged = np.full(shape, -1, dtype=np.int64)
        for stage, row in enumerate(self.rows):
            middle = self.code[sorted(row, key=key.__getitem__)] if row else self.code[:0]
            codes = np.concatenate((self.before[stage], middle, self.after[stage]))
            merged[stage, : len(codes)] = codes
        return merged


def entries(problem: Problem) -> Ints:
    """Code of each stage's first pass: F of microbatch 0 on the first of its chunks."""
    return np.array([min(held) for held in problem.placement.positions]) * problem.num_microbatches


def cut(
    problem: Problem,
    ticks: Ticks,
    rows: Ints,
    *,
    bit_identical: bool,
    window: tuple[float, float] | None = None,
) -> Block:
    """The block of passes that start in the window (ticks), of all passes by default.

    First passes of stages that have a fixed start are never part of it, and no window reaches into
    the time before the last stage has begun if any stage's first pass has none.
    """
    return _Cutter(problem, ticks, rows, bit_identical, window).block()


class _Cutter:
    def __init__(
        self,
        problem: Problem,
        ticks: Ticks,
        rows: Ints,
        bit_identical: bool,
        window: tuple[float, float] | None,
    ) -> None:
        self.problem, self.arrays, self.rows = problem, ticks.arrays, rows
        self.bit_identical = bit_identical
        self.microbatches = problem.num_microbatches
        self.run: Evaluation = evaluate(ticks.arrays, self.microbatches, rows)
        self.first = entries(problem)
        self.origin = self.run.start[self.first]
        self.floating = floating_stages(problem) if window is None else frozenset[int]()
        self.before: list[list[int]] = []
        self.free: list[list[int]] = []
        self.after: list[list[int]] = []
        begin, end = (-1.0, float("inf")) if window is None else window
        if window is not None and floating_stages(problem):
            begin = max(begin, float(self.origin.max()) + 1)
        for stage, row in enumerate(rows.tolist()):
            codes = [code for code in row if code >= 0]
            skip = 0 if stage in self.floating else 1
            starts = self.run.start[codes]
            lower = max(skip, int(np.searchsorted(starts, begin)))
            upper = max(lower, int(np.searchsorted(starts, end)))
            self.before.append(codes[:lower])
            self.free.append(codes[lower:upper])
            self.after.append(codes[upper:])
        self.codes = [code for part in self.free for code in part]
        self.index = {code: index for index, code in enumerate(self.codes)}
        self.fixed_before = {code for part in self.before for code in part}

    def block(self) -> Block:
        remaining = self._remaining()
        edges, release, tail = self._edges(remaining)
        kind = np.array(self.codes, dtype=np.int64) // self._per_kind
        position = np.array(self.codes, dtype=np.int64) // self.microbatches % self._positions
        times = np.array((self.arrays.t_f, self.arrays.t_b, self.arrays.t_w)).astype(np.int64)
        return Block(
            code=np.array(self.codes, dtype=np.int64),
            per_kind=self._per_kind,
            stage=self.arrays.stage[position],
            duration=times[kind, position],
            release=release,
            tail=tail,
            edges=tuple(edges),
            chains=self._chains(),
            entry=self._entry(),
            memory=self._memory(),
            rows=tuple(tuple(self.index[code] for code in part) for part in self.free),
            start=self.run.start[self.codes].astype(np.int64),
            target=int(self.run.cost),
            floor=self._floor(remaining),
            before=tuple(np.array(part, dtype=np.int64) for part in self.before),
            after=tuple(np.array(part, dtype=np.int64) for part in self.after),
        )

    @property
    def _positions(self) -> int:
        return len(self.arrays.stage)

    @property
    def _per_kind(self) -> int:
        return self._positions * self.microbatches

    def _duration(self, code: int) -> int:
        times = (self.arrays.t_f, self.arrays.t_b, self.arrays.t_w)[code // self._per_kind]
        return int(times[code // self.microbatches % self._positions])

    def _source(self, code: int) -> tuple[int, int] | None:
        """The pass whose output this one reads, and the time of the message."""
        kind, position = divmod(code // self.microbatches, self._positions)
        if kind == 0:
            if position == 0:
                return None
            return code - self.microbatches, int(self.arrays.delay_f[position])
        if kind == 1 and position < self._positions - 1:
            return code + self.microbatches, int(self.arrays.delay_b[position])
        return code - self._per_kind, 0

    def _remaining(self) -> dict[int, int]:
        """What of the cost is left from the start of each pass after the block."""
        remaining: dict[int, int] = {}
        follows = [pair for part in self.after for pair in pairwise(part)]
        readers: dict[int, list[tuple[int, int]]] = {code: [(other, 0)] for code, other in follows}
        codes = [code for part in self.after for code in part]
        for code in codes:
            source = self._source(code)
            if source is not None:
                readers.setdefault(source[0], []).append((code, source[1]))
        ends = {part[-1]: -int(self.origin[stage]) for stage, part in enumerate(self.after) if part}
        for code in sorted(codes, key=self.run.start.__getitem__, reverse=True):
            later = [lag + remaining[reader] for reader, lag in readers.get(code, [])]
            if code in ends:
                later.append(ends[code])
            remaining[code] = self._duration(code) + max(later)
        return remaining

    def _edges(self, remaining: dict[int, int]) -> tuple[list[Edge], Ints, Ints]:
        edges: list[Edge] = []
        release = np.zeros(len(self.codes), dtype=np.int64)
        tail = np.zeros(len(self.codes), dtype=np.int64)
        for stage, part in enumerate(self.free):
            for code in part:
                index = self.index[code]
                if self.before[stage]:
                    release[index] = int(self.run.end[self.before[stage][-1]])
                if self.after[stage]:
                    tail[index] = remaining[self.after[stage][0]]
                elif stage not in self.floating:
                    tail[index] = -int(self.origin[stage])
        for code, index in self.index.items():
            source = self._source(code)
            if source is None:
                continue
            if source[0] in self.index:
                edges.append((self.index[source[0]], index, source[1]))
            else:
                release[index] = max(release[index], int(self.run.end[source[0]]) + source[1])
        for code, left in remaining.items():
            source = self._source(code)
            if source is not None and source[0] in self.index:
                index = self.index[source[0]]
                tail[index] = max(tail[index], source[1] + left)
        return edges, release, tail

    def _floor(self, remaining: dict[int, int]) -> int:
        """The longest way through fixed passes alone."""
        floor = 0
        for stage, (before, after) in enumerate(zip(self.before, self.after, strict=True)):
            if before:
                end = int(self.run.end[before[-1]])
                if not self.free[stage]:
                    left = remaining[after[0]] if after else -int(self.origin[stage])
                    floor = max(floor, end + left)
        for code, left in remaining.items():
            source = self._source(code)
            if source is not None and source[0] in self.fixed_before:
                floor = max(floor, int(self.run.end[source[0]]) + source[1] + left)
        return floor

    def _chains(self) -> tuple[tuple[int, ...], ...]:
        """All chunks' if gradients must add up in one order; else one, which names microbatches."""
        chains: dict[int, list[int]] = {}
        for code in sorted(self.codes):
            group = code // self.microbatches
            if self.bit_identical or group == 0:
                chains.setdefault(group, []).append(self.index[code])
        return tuple(tuple(chain) for chain in chains.values() if len(chain) > 1)

    def _entry(self) -> dict[int, tuple[int, int, int]]:
        found = {}
        for stage in sorted(self.floating):
            code = int(self.first[stage])
            source = self._source(code)
            if source is not None:
                found[stage] = (self.index[code], self.index[source[0]], source[1])
        return found

    def _memory(self) -> dict[int, Memory]:
        found = {}
        held_by = _chunk_of(self.problem)
        for stage, part in enumerate(self.free):
            units = memory_units(self.problem, stage)
            if units is None:
                continue
            m_b, m_w, limit = units

            def delta(code: int, m_b: Ints = m_b, m_w: Ints = m_w) -> int:
                kind, position = divmod(code // self.microbatches, self._positions)
                chunk = held_by[position]
                amounts = (m_b[chunk], m_w[chunk] - m_b[chunk], -m_w[chunk])
                return int(amounts[kind])

            room = limit - sum(map(delta, self.before[stage]))
            found[stage] = Memory({self.index[code]: delta(code) for code in part}, room)
        return found


def _chunk_of(problem: Problem) -> list[int]:
    placement = problem.placement
    return [placement.owner(position)[1] for position in range(placement.num_positions)]
