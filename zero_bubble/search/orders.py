"""Orders of passes as arrays, and what they cost: the compiled counterpart of `simulate`.

A row holds a stage's passes as codes ``(kind * positions + position) * microbatches +
microbatch``, with kind 0 for F, 1 for B, 2 for W, 3 for R; -1 fills what a shorter row does not
need.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.compiled import compiled
from zero_bubble.search.problem import Arrays, Floats, Ints, Problem

__all__ = ["Evaluation", "decode", "encode", "evaluate", "taken"]

_KINDS = (Kind.F, Kind.B, Kind.W, Kind.R)


def encode(schedule: Schedule) -> Ints:
    """The schedule's rows as codes; ValueError for a fused backward, which no search makes."""
    placement, microbatches = schedule.placement, schedule.num_microbatches
    positions = placement.num_positions
    rows = np.full((schedule.num_stages, max(map(len, schedule.passes))), -1, dtype=np.int64)
    for stage, row in enumerate(schedule.passes):
        held = placement.positions[stage]
        for index, one in enumerate(row):
            if one.kind is Kind.BW:
                raise ValueError(f"stage {stage} has the fused backward {one}: split it first")
            kind = _KINDS.index(one.kind)
            rows[stage, index] = (kind * positions + held[one.chunk]) * microbatches
            rows[stage, index] += one.microbatch
    return rows


def decode(problem: Problem, rows: Ints, name: str) -> Schedule:
    """The schedule that the codes stand for."""
    placement, microbatches = problem.placement, problem.num_microbatches
    chunk_of = [placement.owner(one)[1] for one in range(placement.num_positions)]
    passes = [
        Pass(kind, microbatch, chunk)
        for kind in _KINDS
        for chunk in chunk_of
        for microbatch in range(microbatches)
    ]
    return Schedule(
        placement,
        microbatches,
        tuple(tuple(passes[code] for code in row if code >= 0) for row in rows.tolist()),
        name,
    )


class Evaluation(NamedTuple):
    """What an order costs."""

    cost: float
    """Longest time from a stage's first start to its last end, in ms; -1 if stages deadlock."""
    start: Floats
    """Start of each pass, by code."""
    end: Floats
    """End of each pass, by code."""
    peak: Floats
    """Most memory of each stage."""


def evaluate(arrays: Arrays, microbatches: int, rows: Ints) -> Evaluation:
    """Run every row in order, each pass as soon as its input is there, as `simulate` does.

    ValueError for R's where the problem has none.
    """
    codes = arrays.kinds * len(arrays.stage) * microbatches
    if rows.max() >= codes:
        raise ValueError("the order has R's, but the problem has no recomputation")
    start, end = np.empty(codes), np.empty(codes)
    peak = np.empty(len(rows))
    cost = run_rows(arrays, microbatches, rows, start, end)
    peak_memory(arrays, microbatches, rows, peak)
    return Evaluation(cost, start, end, peak)


@compiled
def run_rows(arrays: Arrays, microbatches: int, rows: Ints, start: Floats, end: Floats) -> float:
    """Fill start and end by code; the cost, or -1 if the stages wait for each other."""
    end[:] = -1.0
    return resume(arrays, microbatches, rows, np.zeros(len(rows), np.int64), start, end, np.inf)


@compiled
def resume(
    arrays: Arrays,
    microbatches: int,
    rows: Ints,
    next_of: Ints,
    start: Floats,
    end: Floats,
    allowed: float,
) -> float:
    """Run each stage's row from place ``next_of[stage]`` on; what comes before is timed already.

    ``end`` must be negative for all that is to be run. The cost; -1 if the stages wait for each
    other, or as soon as one takes longer than ``allowed`` (then not all is timed).
    """
    stages, length = rows.shape
    positions = len(arrays.stage)
    per_kind = positions * microbatches
    waiting = np.ones(stages, np.bool_)
    stack = np.empty(stages + 1, np.int64)
    depth = 0
    for stage in range(stages - 1, -1, -1):
        stack[depth] = stage
        depth += 1
    while depth > 0:
        depth -= 1
        stage = stack[depth]
        waiting[stage] = False
        index = next_of[stage]
        free = end[rows[stage, index - 1]] if index > 0 else 0.0
        while index < length:
            code = rows[stage, index]
            if code < 0:
                break
            kind = code // per_kind
            position = (code - kind * per_kind) // microbatches
            ready = 0.0
            reader = stage
            if kind == 0:
                duration = arrays.t_f[position]
                if position > 0:
                    ready = end[code - microbatches]
                    if ready < 0:
                        break
                    ready += arrays.delay_f[position]
                if position + 1 < positions:
                    reader = arrays.stage[position + 1]
            elif kind == 1:
                duration = arrays.t_b[position]
                last = position == positions - 1
                ready = end[code - per_kind] if last else end[code + microbatches]
                if ready < 0:
                    break
                if arrays.kinds > 3 and end[code + 2 * per_kind] < 0:
                    break
                ready += arrays.delay_b[position]
                if position > 0:
                    reader = arrays.stage[position - 1]
            else:
                duration = arrays.t_w[position] if kind == 2 else arrays.t_r[position]
                ready = end[code - per_kind] if kind == 2 else end[code - 3 * per_kind]
                if ready < 0:
                    break
            start[code] = max(free, ready)
            free = start[code] + duration
            end[code] = free
            index += 1
            if reader != stage and not waiting[reader]:
                waiting[reader] = True
                stack[depth] = reader
                depth += 1
        next_of[stage] = index
        if index > 0 and free - start[rows[stage, 0]] > allowed:
            return -1.0
    cost = 0.0
    for stage in range(stages):
        done = next_of[stage]
        if done < length and rows[stage, done] >= 0:
            return -1.0
        if done > 0:
            cost = max(cost, end[rows[stage, done - 1]] - start[rows[stage, 0]])
    return cost


@compiled
def taken(arrays: Arrays, kind: int, position: int) -> float:
    """Memory that a pass takes at its start."""
    if kind == 0:
        return float(arrays.m_r[position])
    if kind == 3 or (kind == 1 and arrays.kinds == 3):
        return float(arrays.m_b[position] - arrays.m_r[position])
    return 0.0


@compiled
def peak_memory(arrays: Arrays, microbatches: int, rows: Ints, peak: Floats) -> None:
    """Fill the most memory that each stage holds."""
    stages, length = rows.shape
    per_kind = len(arrays.stage) * microbatches
    for stage in range(stages):
        held = 0.0
        peak[stage] = 0.0
        for index in range(length):
            code = rows[stage, index]
            if code < 0:
                break
            kind = code // per_kind
            position = (code - kind * per_kind) // microbatches
            held += taken(arrays, kind, position)
            peak[stage] = max(peak[stage], held)
            if kind == 1:
                held -= arrays.m_b[position] - arrays.m_w[position]
            elif kind == 2:
                held -= arrays.m_w[position]
