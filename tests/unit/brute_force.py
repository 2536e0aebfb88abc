"""All schedules of a tiny problem, and what each costs: no search, and none of its code."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator

from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.problem import Problem


def one_by_one(placement: Placement, microbatches: int) -> Schedule:
    """Each microbatch all the way, then the next: least memory, and most time."""
    rows = []
    for held in placement.positions:
        chunks = sorted(range(len(held)), key=held.__getitem__)
        row: list[Pass] = []
        for one in range(microbatches):
            row += [Pass(Kind.F, one, chunk) for chunk in chunks]
            for chunk in reversed(chunks):
                row += [Pass(Kind.B, one, chunk), Pass(Kind.W, one, chunk)]
        rows.append(tuple(row))
    return Schedule(placement, microbatches, tuple(rows), "one by one")


def stage_orders(problem: Problem, stage: int, bit_identical: bool) -> list[tuple[Pass, ...]]:
    """All orders of a stage's passes that keep its own dependences and its memory limit."""
    held, costs = problem.placement.positions[stage], problem.costs
    microbatches = range(problem.num_microbatches)
    needs: dict[Pass, set[Pass]] = {}
    for chunk, one in itertools.product(range(len(held)), microbatches):
        f, b, w, r = (Pass(kind, one, chunk) for kind in (Kind.F, Kind.B, Kind.W, Kind.R))
        needs[f] = {Pass(Kind.F, one, it) for it, at in enumerate(held) if at < held[chunk]}
        needs[b] = {f} | {Pass(Kind.B, one, it) for it, at in enumerate(held) if at > held[chunk]}
        needs[w] = {b}
        if problem.has_recomputation:
            needs[r] = {f}
            needs[b].add(r)
        if bit_identical and one:
            for what in (f, b, w, *([r] if r in needs else [])):
                needs[what].add(Pass(what.kind, one - 1, chunk))

    def grow(row: tuple[Pass, ...], memory: float) -> Iterator[tuple[Pass, ...]]:
        if len(row) == len(needs):
            yield row
        for what, needed in needs.items():
            if what in row or not needed.issubset(row):
                continue
            m_b, m_w = costs.m_b[stage][what.chunk], costs.m_w[stage][what.chunk]
            m_r = costs.m_r[stage][what.chunk] if costs.m_r else m_b
            rest = 0.0 if problem.has_recomputation else m_b - m_r
            then = memory + {Kind.F: m_r, Kind.R: m_b - m_r, Kind.B: rest, Kind.W: 0}[what.kind]
            if then <= problem.memory_limit[stage] + 1e-9:
                freed = {Kind.B: m_b - m_w, Kind.W: m_w}.get(what.kind, 0.0)
                yield from grow((*row, what), then - freed)

    return list(grow((), 0.0))


def cost_of(problem: Problem, rows: tuple[tuple[Pass, ...], ...]) -> float:
    """Longest stage of the earliest times, by relaxation; infinite if stages wait for ever."""
    placement, costs = problem.placement, problem.costs
    ends: dict[tuple[int, Pass], float] = {}
    nexts = [0] * len(rows)
    spans = [[math.inf, 0.0] for _ in rows]
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            while nexts[stage] < len(row):
                what = row[nexts[stage]]
                source: tuple[int, int] | None = (stage, what.chunk)
                kind = Kind.B if what.kind is Kind.W else Kind.F
                if what.kind is Kind.F:
                    source = placement.before(stage, what.chunk)
                elif what.kind is Kind.R:
                    source = stage, what.chunk
                elif what.kind is Kind.B and placement.after(stage, what.chunk):
                    source, kind = placement.after(stage, what.chunk), Kind.B
                ready = 0.0
                if source is not None:
                    end = ends.get((source[0], Pass(kind, what.microbatch, source[1])))
                    if end is None:
                        break
                    ready = end + costs.comm(source[0], stage)
                start = max(ready, spans[stage][1])
                spans[stage][0] = min(spans[stage][0], start)
                duration = costs.duration(what.kind, stage, what.chunk)
                if what.kind is Kind.B and problem.recompute_in_backward and costs.t_r:
                    duration += costs.t_r[stage][what.chunk]
                spans[stage][1] = start + duration
                ends[stage, what] = spans[stage][1]
                nexts[stage] += 1
                moved = True
    done = all(at == len(row) for at, row in zip(nexts, rows, strict=True))
    return max(end - start for start, end in spans) if done else math.inf


@functools.cache
def all_costs(problem: Problem, bit_identical: bool) -> dict[tuple[tuple[Pass, ...], ...], float]:
    """What every order costs that runs to its end."""
    choices = [stage_orders(problem, stage, bit_identical) for stage in range(problem.num_stages)]
    costs = {rows: cost_of(problem, rows) for rows in itertools.product(*choices)}
    return {rows: cost for rows, cost in costs.items() if cost < math.inf}
