"""Polishing an order: moving single passes of the critical path, kept when nothing gets longer."""

from __future__ import annotations

import numpy as np

from zero_bubble.search.compiled import compiled
from zero_bubble.search.orders import resume, run_rows, taken
from zero_bubble.search.problem import Arrays, Floats, Ints

__all__ = ["polish"]


@compiled
def polish(
    arrays: Arrays,
    microbatches: int,
    rows: Ints,
    iterations: int,
    history: int,
    step: int,
    seed: int,
    target: float,
) -> float:
    """Improve complete orders in place; the cost of the best.

    From the end of the critical stage the trace goes back over whatever made each pass start when
    it did. A pass on it that starts right when its predecessor on the stage ends is drawn (by a
    generator of its own, from ``seed``), and moved up to ``step`` places earlier, or its
    predecessor later, or a W or R far earlier. No pass moves past one of its kind and chunk or of
    its microbatch and chunk, so that microbatches stay in order. A move stays if memory allows it
    and the cost is not above the present one, or that of ``history`` iterations ago (late
    acceptance). Only what starts later than the moved passes is timed again. Ends at ``target``.
    """
    stages, length = rows.shape
    positions = len(arrays.stage)
    per_kind = positions * microbatches
    codes = arrays.kinds * per_kind
    start, end = np.empty(codes), np.empty(codes)
    cost = run_rows(arrays, microbatches, rows, start, end)
    best = cost
    best_rows = rows.copy()
    past = np.full(history, cost)
    index_of = np.zeros(codes, np.int64)
    lengths = np.zeros(stages, np.int64)
    held = np.zeros((stages, length + 1))
    for stage in range(stages):
        while lengths[stage] < length and rows[stage, lengths[stage]] >= 0:
            lengths[stage] += 1
        _place(arrays, microbatches, rows, stage, 0, lengths[stage] - 1, index_of, held)
    tight_stage = np.zeros(codes, np.int64)
    tight_index = np.zeros(codes, np.int64)
    saved = np.zeros(length, np.int64)
    log = np.zeros((codes, 3))
    found = 0
    traced = False
    random = seed
    for iteration in range(iterations):
        if best <= target * (1 + 1e-9):
            break
        if not traced:
            found = _trace(
                arrays, microbatches, rows, lengths, start, end, index_of, tight_stage, tight_index
            )
            traced = True
        if found == 0:
            break
        random = _next(random)
        drawn = (random >> 20) % found
        stage, index = tight_stage[drawn], tight_index[drawn]
        random = _next(random)
        way = (random >> 20) % 4
        random = _next(random)
        source, goal = _move(
            rows[stage, index] // per_kind >= 2,
            rows[stage, index - 1] // per_kind >= 2,
            index,
            way,
            step,
            random >> 20,
        )
        goal = min(max(goal, 0), lengths[stage] - 1)
        low, high = min(source, goal), max(source, goal)
        saved[low : high + 1] = rows[stage, low : high + 1]
        if not _shift(arrays, microbatches, rows[stage], source, goal, start, end):
            continue
        slot = iteration % history
        allowed = max(cost, past[slot]) * (1 + 1e-12)
        changed, logged = -1.0, 0
        if _place(arrays, microbatches, rows, stage, low, high, index_of, held):
            since = start[saved[low]]
            changed, logged = _retime(
                arrays, microbatches, rows, lengths, start, end, since, allowed, log
            )
        if changed >= 0:
            cost = changed
            traced = False
            if cost < best * (1 - 1e-12):
                best = cost
                best_rows[:] = rows
        else:
            for one in range(logged):
                code = int(log[one, 0])
                start[code], end[code] = log[one, 1], log[one, 2]
            rows[stage, low : high + 1] = saved[low : high + 1]
            _place(arrays, microbatches, rows, stage, low, high, index_of, held)
        past[slot] = cost
    rows[:] = best_rows
    return best


@compiled
def _place(
    arrays: Arrays,
    microbatches: int,
    rows: Ints,
    stage: int,
    low: int,
    high: int,
    index_of: Ints,
    held: Floats,
) -> bool:
    """Note where passes are now and what memory is held after them; whether it is allowed."""
    per_kind = len(arrays.stage) * microbatches
    limit = arrays.limit[stage] * (1 + 1e-9)
    fits = True
    for index in range(low, high + 1):
        code = rows[stage, index]
        index_of[code] = index
        kind = code // per_kind
        position = (code - kind * per_kind) // microbatches
        more = taken(arrays, kind, position)
        if more > 0 and held[stage, index] + more > limit:
            fits = False
        change = more
        if kind == 1:
            change += arrays.m_w[position] - arrays.m_b[position]
        elif kind == 2:
            change = -arrays.m_w[position]
        held[stage, index + 1] = held[stage, index] + change
    return fits


@compiled
def _retime(
    arrays: Arrays,
    microbatches: int,
    rows: Ints,
    lengths: Ints,
    start: Floats,
    end: Floats,
    since: float,
    allowed: float,
    log: Floats,
) -> tuple[float, int]:
    """Time again every pass that starts at ``since`` or later: what comes before does not change.

    The cost, -1 if it is above ``allowed``, and how many passes were timed: ``log`` holds their
    code, start and end of before.
    """
    next_of = np.zeros(len(rows), np.int64)
    logged = 0
    for stage in range(len(rows)):
        low, high = 0, lengths[stage]
        while low < high:
            middle = (low + high) // 2
            if start[rows[stage, middle]] < since:
                low = middle + 1
            else:
                high = middle
        next_of[stage] = low
    for stage in range(len(rows)):
        for index in range(next_of[stage], lengths[stage]):
            code = rows[stage, index]
            log[logged, 0], log[logged, 1], log[logged, 2] = code, start[code], end[code]
            logged += 1
            end[code] = -1.0
    return resume(arrays, microbatches, rows, next_of, start, end, allowed), logged


@compiled
def _next(random: int) -> int:
    return (random * 6364136223846793005 + 1442695040888963407) & 0x7FFFFFFFFFFFFFFF


@compiled
def _trace(
    arrays: Arrays,
    microbatches: int,
    rows: Ints,
    lengths: Ints,
    start: Floats,
    end: Floats,
    index_of: Ints,
    tight_stage: Ints,
    tight_index: Ints,
) -> int:
    """Passes of the critical path that wait for nothing but their predecessor on the stage."""
    positions = len(arrays.stage)
    per_kind = positions * microbatches
    stage, longest = 0, -1.0
    for one in range(len(rows)):
        spent = end[rows[one, lengths[one] - 1]] - start[rows[one, 0]]
        if spent > longest * (1 + 1e-12):
            stage, longest = one, spent
    index = lengths[stage] - 1
    found = 0
    near = 1e-9 * longest
    while True:
        code = rows[stage, index]
        kind = code // per_kind
        position = (code - kind * per_kind) // microbatches
        source = -1
        delay = 0.0
        if kind == 0:
            if position > 0:
                source = code - microbatches
                delay = arrays.delay_f[position]
        elif kind == 1:
            source = code - per_kind if position == positions - 1 else code + microbatches
            delay = arrays.delay_b[position]
        elif kind == 2:
            source = code - per_kind
        else:
            source = code - 3 * per_kind
        before = rows[stage, index - 1] if index > 0 else -1
        follows = before >= 0 and end[before] >= start[code] - near
        needs = source >= 0 and end[source] + delay >= start[code] - near
        if needs and not (kind >= 2 and follows and before != source):
            place = (source % per_kind) // microbatches
            stage = arrays.stage[place]
            index = index_of[source]
        elif follows:
            tight_stage[found] = stage
            tight_index[found] = index
            found += 1
            index -= 1
        else:
            return found


@compiled
def _move(
    is_filler: bool, after_filler: bool, index: int, way: int, step: int, random: int
) -> tuple[int, int]:
    """Which place to move, and where to: near, or far if it is a W or R, which fill gaps."""
    if way <= 1:
        return index, index - 1 - random % step
    if way == 2:
        return index - 1, index + random % step
    if after_filler:
        if (random >> 8) % 2 == 0:
            return index - 1, index + random % 60
        return index - 1, index - 2 - random % 120
    if is_filler:
        return index, index - 1 - random % 120
    return index, index - 1


@compiled
def _shift(
    arrays: Arrays,
    microbatches: int,
    row: Ints,
    source: int,
    goal: int,
    start: Floats,
    end: Floats,
) -> bool:
    """Move a pass towards its goal, up to the first pass it must not cross; whether it moved.

    A pass does not move before one that ends before the former's input is even begun, nor an
    input's wait behind it: that only adds idle time, and it is the only way to a deadlock.
    """
    per_kind = len(arrays.stage) * microbatches
    code = row[source]
    by = -1 if goal < source else 1
    at = source
    while at != goal:
        other = row[at + by]
        if other // microbatches == code // microbatches or other % per_kind == code % per_kind:
            break
        earlier, later = (other, code) if by < 0 else (code, other)
        needed = _input(arrays, microbatches, later)
        if needed >= 0 and start[needed] >= end[earlier]:
            break
        row[at] = other
        at += by
    row[at] = code
    return at != source


@compiled
def _input(arrays: Arrays, microbatches: int, code: int) -> int:
    """The pass whose result this one needs; -1 for the first F's."""
    positions = len(arrays.stage)
    per_kind = positions * microbatches
    kind = code // per_kind
    position = (code - kind * per_kind) // microbatches
    if kind == 0:
        return code - microbatches if position > 0 else -1
    if kind == 1 and position < positions - 1:
        return code + microbatches
    return code - per_kind if kind < 3 else code - 3 * per_kind
