"""Whether a schedule can run, computes what it should, and fits its memory.

Shares no code with the builders and the simulator, so that a mistake there is found here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from zero_bubble.costs import Costs
from zero_bubble.program import Instruction
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["Rule", "Violation", "bit_identical_order", "check"]

type _Codes = npt.NDArray[np.int64]


class Rule(StrEnum):
    """What can be broken."""

    RANGE = "range"
    """Chunks and microbatches are those of the placement and the batch."""
    COUNT = "count"
    """Each chunk runs F once, and either B and W or BW once, for each microbatch; R once or, for
    all microbatches, not at all."""
    ORDER = "order"
    """On a stage, B comes after F, W after B, R between F and B; Run after its Receive, Send after
    its Run."""
    DEADLOCK = "deadlock"
    """Stages do not wait for each other in a circle."""
    MEMORY = "memory"
    """No stage holds more than its limit."""
    MESSAGE = "message"
    """Each Send has its Receive, on the right channel, in the same order."""
    BIT_IDENTICAL = "not bit-identical"
    """Gradients are accumulated in ascending order of microbatches, as 1F1B does."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a pass or instruction of a stage breaks."""

    rule: Rule
    stage: int
    what: Pass | Instruction
    detail: str

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.what}: {self.rule}: {self.detail}"


def check(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    memory_limit: float | Sequence[float] | None = None,
) -> list[Violation]:
    """Every rule that the schedule breaks; an empty list says that it is legal.

    ``memory_limit`` is for every stage, or a sequence with one for each, in the unit of the costs'
    memory. Without costs a microbatch counts 1 on each chunk from its F to its W: the limit is then
    in units of a chunk's M_B, for the worst case M_W = M_B. Deadlock and memory are looked at only
    if everything else is right, since what they say is of no use otherwise. ValueError if costs or
    limits are not of as many stages and chunks as the schedule.
    """
    if costs is not None:
        costs.require(schedule.placement)
    if found := list(_ranges(schedule)):
        return found
    coded = _Coded(schedule)
    found = [*_counts(coded), *_local_order(coded)]
    if not found:
        found += _deadlocks(coded)
    if not found and memory_limit is not None:
        found += _memory(schedule, costs, memory_limit)
    return found


def bit_identical_order(schedule: Schedule) -> list[Violation]:
    """Where a chunk runs F's, B's or W's out of ascending microbatch order (BW counts as both).

    Such a schedule is legal, but sums gradients in another order than 1F1B, so that the last bits
    of the parameters differ. An empty list says that they are the same.
    """
    found = []
    for stage, row in enumerate(schedule.passes):
        latest: dict[tuple[str, int], Pass] = {}
        for one in row:
            for part in one.kind:  # BW is a B and a W
                before = latest.get((part, one.chunk))
                if before is not None and before.microbatch > one.microbatch:
                    detail = f"runs after {before}: {part}'s of a chunk must ascend"
                    found.append(Violation(Rule.BIT_IDENTICAL, stage, one, detail))
                    break
                latest[part, one.chunk] = one
    return found


def _ranges(schedule: Schedule) -> Iterator[Violation]:
    microbatches = schedule.num_microbatches
    for stage, row in enumerate(schedule.passes):
        chunks = len(schedule.placement.positions[stage])
        for one in row:
            if not 0 <= one.chunk < chunks:
                detail = f"chunk {one.chunk} is not one of this stage's 0..{chunks - 1}"
                yield Violation(Rule.RANGE, stage, one, detail)
            if not 0 <= one.microbatch < microbatches:
                detail = f"microbatch {one.microbatch} is not one of 0..{microbatches - 1}"
                yield Violation(Rule.RANGE, stage, one, detail)


class _Coded:
    """The schedule's passes as numbers, for whole arrays of them at once.

    The code of a pass is ``kind * size + position * microbatches + microbatch``, with the kinds in
    the order of `Kind`, the position that of the chunk in the model, and ``size`` the number of
    (position, microbatch).
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        positions = schedule.placement.positions
        self.size = sum(map(len, positions)) * schedule.num_microbatches
        bases = {kind: index * self.size for index, kind in enumerate(Kind)}
        self.rows: list[_Codes] = []
        for held, row in zip(positions, schedule.passes, strict=True):
            offsets = [position * schedule.num_microbatches for position in held]
            codes = [bases[one.kind] + offsets[one.chunk] + one.microbatch for one in row]
            self.rows.append(np.array(codes, dtype=np.int64))
        self.owners = {
            position: (stage, chunk)
            for stage, held in enumerate(positions)
            for chunk, position in enumerate(held)
        }


def _counts(coded: _Coded) -> Iterator[Violation]:
    schedule = coded.schedule
    codes = np.concatenate(coded.rows)
    shape = (len(Kind), -1, schedule.num_microbatches)
    times = np.bincount(codes, minlength=len(Kind) * coded.size).reshape(shape)
    f, b, w, bw, r = times
    recomputes = (r > 0).max(axis=1, keepdims=True)
    split = (b == 1) & (w == 1) & (bw == 0)
    fused = (b == 0) & (w == 0) & (bw == 1)
    right = (f == 1) & (split | fused) & (r == recomputes)
    for stage, held in enumerate(schedule.placement.positions):
        for chunk, position in enumerate(held):
            for microbatch in np.flatnonzero(~right[position]).tolist():
                counts = times[:, position, microbatch].tolist()
                wanted = int(recomputes[position, 0])
                for one, detail in _miscounted(chunk, microbatch, counts, wanted):
                    yield Violation(Rule.COUNT, stage, one, detail)


def _miscounted(
    chunk: int, microbatch: int, times: Sequence[int], recomputations: int
) -> Iterator[tuple[Pass, str]]:
    """What is wrong with how often the passes of one chunk and microbatch run, by kind."""
    passes = [Pass(kind, microbatch, chunk) for kind in Kind]
    _, b, w, bw, r = passes
    if not times[3]:
        wanted = [0, 1, 2]
    elif times[1] or times[2]:
        wanted = [0]
    else:
        wanted = [0, 3]
    for kind in wanted:
        if times[kind] != 1:
            yield passes[kind], f"runs {times[kind]} times, not once"
    if times[3] and (times[1] or times[2]):
        yield bw, f"runs beside {b if times[1] else w}: either B and W or BW is needed"
    if times[4] != recomputations:
        yield r, f"runs {times[4]} times, not once as every R of a chunk that recomputes"


def _local_order(coded: _Coded) -> Iterator[Violation]:
    size = coded.size
    # By kind, as in the codes: what runs before, as so many kinds back (R is four after F).
    needs = [[], [1, -3], [1, -1], [3, -1], [4]]
    first = np.full(len(Kind) * size, -1)
    for stage, codes in enumerate(coded.rows):
        indices = np.arange(len(codes))
        first[codes[::-1]] = indices[::-1]
        kinds = codes // size
        late = []
        for kind, backs in enumerate(needs):
            mine = indices[kinds == kind]
            for back in backs:
                # A pass that is nowhere on the stage is reported by the counts; its index is -1.
                too_late = first[codes[mine] - back * size] > mine
                late += [(index, back) for index in mine[too_late].tolist()]
        for index, back in sorted(late, key=lambda one: (one[0], -one[1])):
            one = coded.schedule.passes[stage][index]
            needed = Pass([*Kind][kinds[index] - back], one.microbatch, one.chunk)
            yield Violation(Rule.ORDER, stage, one, f"runs before {needed}")


def _inputs(coded: _Coded) -> tuple[list[list[int]], list[int]]:
    """Each stage's passes as nodes, and the node that each waits for, -1 if none.

    A node is the code of a pass, where the fused backward counts as B: either of them makes the
    gradient that another one waits for. R takes the place that leaves; it waits for no other stage.
    """
    microbatches, size = coded.schedule.num_microbatches, coded.size
    bw, r = 3 * size, 4 * size
    nodes = [
        np.where(row >= r, row - size, np.where(row >= bw, row - 2 * size, row))
        for row in coded.rows
    ]
    f, b = np.arange(size), np.arange(size) + size
    first, last = slice(0, microbatches), slice(size - microbatches, size)
    # The next position of the model is `microbatches` further.
    source_of_f, source_of_b = f - microbatches, b + microbatches
    source_of_f[first] = -1
    source_of_b[last] = f[last]
    source = np.concatenate([source_of_f, source_of_b, b, np.full(size, -1)])
    return [row.tolist() for row in nodes], source.tolist()


def _deadlocks(coded: _Coded) -> Iterator[Violation]:
    """Kahn's algorithm: what is left over when nothing more can run waits in a circle."""
    rows, source = _inputs(coded)
    readers: list[list[int]] = [[] for _ in source]
    missing = [0] * len(source)
    for row in rows:
        for before, node in zip([-1, *row], row, strict=False):
            for needed in (source[node], before):
                if needed >= 0:
                    readers[needed].append(node)
                    missing[node] += 1
    ready = [row[0] for row in rows if row and not missing[row[0]]]
    for node in ready:
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    for stage, row in enumerate(rows):
        stuck = next((index for index, node in enumerate(row) if missing[node]), None)
        if stuck is not None:
            kind, place = divmod(source[row[stuck]], coded.size)
            position, microbatch = divmod(place, coded.schedule.num_microbatches)
            other, chunk = coded.owners[position]
            wanted = Pass([*Kind][kind], microbatch, chunk)
            detail = f"waits for ever for {wanted} of stage {other}"
            yield Violation(Rule.DEADLOCK, stage, coded.schedule.passes[stage][stuck], detail)


def _memory(
    schedule: Schedule, costs: Costs | None, memory_limit: float | Sequence[float]
) -> Iterator[Violation]:
    stages = schedule.num_stages
    limits = [memory_limit] * stages if isinstance(memory_limit, int | float) else [*memory_limit]
    if any(map(math.isnan, limits)):
        raise ValueError(f"the memory limit must be a number, not {memory_limit}")
    if len(limits) != stages:
        raise ValueError(f"{len(limits)} memory limits for {stages} stages: give one, or one each")
    for stage, row in enumerate(schedule.passes):
        limit, held = limits[stage], 0.0
        # Sums of fractions drift by far less than a billionth of the limit.
        most = limit + 1e-9 * max(1.0, abs(limit))
        recomputed = {one.chunk for one in row if one.kind is Kind.R}
        for one in row:
            whole = costs.m_b[stage][one.chunk] if costs else 1.0
            kept = costs.kept(stage, one.chunk) if costs else 1.0
            part = costs.m_w[stage][one.chunk] if costs else 1.0
            if one.kind is Kind.F:
                held += kept
            elif one.kind is Kind.R or (one.kind is not Kind.W and one.chunk not in recomputed):
                held += whole - kept
            if held > most:
                yield Violation(Rule.MEMORY, stage, one, f"holds {held:.6g}, limit {limit:.6g}")
                break
            held -= {Kind.B: whole - part, Kind.W: part, Kind.BW: whole}.get(one.kind, 0.0)
