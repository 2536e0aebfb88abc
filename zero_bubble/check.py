"""Whether a schedule can run, computes what it should, and fits its memory.

Shares no code with the builders and the simulator, so that a mistake there is found here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from zero_bubble.costs import Costs
from zero_bubble.program import Instruction
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["Rule", "Violation", "bit_identical_order", "check"]

type _Node = tuple[Kind, int, int, int]
"""(kind, stage, chunk, microbatch); the fused backward is filed under B."""


class Rule(StrEnum):
    """What can be broken."""

    RANGE = "range"
    """Chunks and microbatches are those of the placement and the batch."""
    COUNT = "count"
    """Each chunk runs F once, and either B and W or BW once, for each microbatch."""
    ORDER = "order"
    """On a stage, B comes after F, W after B; Run after its Receive, Send after its Run."""
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
    found = [*_counts(schedule), *_local_order(schedule)]
    if not found:
        found += _deadlocks(schedule)
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


def _counts(schedule: Schedule) -> Iterator[Violation]:
    for stage, row in enumerate(schedule.passes):
        times = Counter(row)
        for chunk in range(len(schedule.placement.positions[stage])):
            for microbatch in range(schedule.num_microbatches):
                f, b, w, bw = (Pass(kind, microbatch, chunk) for kind in Kind)
                if times[f] != 1:
                    yield Violation(Rule.COUNT, stage, f, f"runs {times[f]} times, not once")
                split = (times[b], times[w])
                if (*split, times[bw]) in {(1, 1, 0), (0, 0, 1)}:
                    continue
                if not times[bw]:
                    for one, count in zip((b, w), split, strict=True):
                        if count != 1:
                            yield Violation(Rule.COUNT, stage, one, f"runs {count} times, not once")
                elif split == (0, 0):
                    yield Violation(Rule.COUNT, stage, bw, f"runs {times[bw]} times, not once")
                else:
                    detail = f"runs beside {b if times[b] else w}: either B and W or BW is needed"
                    yield Violation(Rule.COUNT, stage, bw, detail)


def _local_order(schedule: Schedule) -> Iterator[Violation]:
    needs = {Kind.B: (Kind.F,), Kind.BW: (Kind.F,), Kind.W: (Kind.B, Kind.BW)}
    for stage, row in enumerate(schedule.passes):
        present, seen = set(row), set[Pass]()
        for one in row:
            for kind in needs.get(one.kind, ()):
                needed = Pass(kind, one.microbatch, one.chunk)
                # A pass that is nowhere on the stage is reported by the counts.
                if needed in present and needed not in seen:
                    yield Violation(Rule.ORDER, stage, one, f"runs before {needed}")
            seen.add(one)


def _inputs(schedule: Schedule) -> tuple[list[list[_Node]], dict[_Node, list[_Node]]]:
    """Each stage's passes as nodes, and what each waits for: data first, then its predecessor."""
    place = {
        (stage, chunk): position
        for stage, held in enumerate(schedule.placement.positions)
        for chunk, position in enumerate(held)
    }
    at = {position: where for where, position in place.items()}
    inputs: dict[_Node, list[_Node]] = {}
    rows: list[list[_Node]] = []
    for stage, row in enumerate(schedule.passes):
        nodes: list[_Node] = []
        for one in row:
            here = (stage, one.chunk)
            above, below = at.get(place[here] - 1), at.get(place[here] + 1)
            kind = Kind.B if one.kind is Kind.BW else one.kind
            node = (kind, *here, one.microbatch)
            inputs[node] = []
            if kind is Kind.F and above is not None:
                inputs[node].append((Kind.F, *above, one.microbatch))
            if kind is Kind.B:
                source = (Kind.F, *here) if below is None else (Kind.B, *below)
                inputs[node].append((*source, one.microbatch))
            if kind is Kind.W:
                inputs[node].append((Kind.B, *here, one.microbatch))
            inputs[node] += nodes[-1:]
            nodes.append(node)
        rows.append(nodes)
    return rows, inputs


def _deadlocks(schedule: Schedule) -> Iterator[Violation]:
    """Kahn's algorithm: what is left over when nothing more can run waits in a circle."""
    rows, inputs = _inputs(schedule)
    readers: dict[_Node, list[_Node]] = {node: [] for node in inputs}
    for node, needed in inputs.items():
        for source in needed:
            readers[source].append(node)
    missing = {node: len(needed) for node, needed in inputs.items()}
    ready = [node for node, count in missing.items() if count == 0]
    for node in ready:
        for reader in readers[node]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    for stage, nodes in enumerate(rows):
        stuck = next((index for index, node in enumerate(nodes) if missing[node]), None)
        if stuck is not None:
            kind, other, chunk, microbatch = inputs[nodes[stuck]][0]
            detail = f"waits for ever for {Pass(kind, microbatch, chunk)} of stage {other}"
            yield Violation(Rule.DEADLOCK, stage, schedule.passes[stage][stuck], detail)


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
        for one in row:
            whole = costs.m_b[stage][one.chunk] if costs else 1.0
            part = costs.m_w[stage][one.chunk] if costs else 1.0
            if one.kind is Kind.F:
                held += whole
            elif one.kind is Kind.B:
                held -= whole - part
            elif one.kind is Kind.W:
                held -= part
            else:
                held -= whole
            # Sums of fractions drift by far less than a billionth of the limit.
            if held > limit + 1e-9 * max(1.0, abs(limit)):
                yield Violation(Rule.MEMORY, stage, one, f"holds {held:.6g}, limit {limit:.6g}")
                break
