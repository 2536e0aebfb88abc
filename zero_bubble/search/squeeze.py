"""From a template, an order of F's and B's without times, to a schedule with W's.

A template says in which order a stage means to run its F's and B's, and its R's. The squeeze runs
it against the clock on all stages at once: a pass may run ahead of its template while memory
allows, W's fill what would be gaps, and a few knobs say how eager all that is. It cannot deadlock
as long as the template itself has a sensible order, since the first pass that a stage has not run
yet (its frontier) never waits for a later one.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from zero_bubble.search.compiled import compiled
from zero_bubble.search.orders import taken
from zero_bubble.search.problem import Arrays, Floats, Ints

__all__ = ["Knobs", "Template", "squeeze", "template"]

_NEVER = 1e300
_BETWEEN = 1e-3
"""Least difference of the keys of an R and of its B."""
_KIND_OF = (0, 1, 3)
"""The kinds of a template's types, as in `zero_bubble.search.orders`."""


class Knobs(NamedTuple):
    """How a squeeze decides. The ``late`` ones hold once a stage has run its first chunk's F's."""

    patience: float = 0.5
    """Wait for a better pass that arrives within so many T_F, instead of running ahead."""
    gap: float = 0.6
    """Fill a gap with a W if it is at least so many T_W long."""
    lead: float = 1e9
    """Run W's instead of a pass that is further than this ahead of the frontier."""
    spare: float = 0.0
    """First-chunk microbatches in flight stay this many times (stage + 1) below the limit; above
    50, F's of the first chunk never run ahead."""
    hold: float = 1e9
    """Before the late phase, B's run at most so many template places ahead."""
    late_patience: float = 0.5
    late_gap: float = 0.6
    late_lead: float = 1e9
    late_order: float = 0.0
    """In the late phase prefer: 0 the template's order, 1 any B, 2 any F, 3 B's of the stage's
    last chunk, 4 B's of its first chunk. R's count as B's."""
    ahead: float = 1e9
    """R's run at most so many microbatches before their B's are next."""


class Template(NamedTuple):
    """An order of F's, B's and R's; types are chunk c's F (number c), B (chunks + c) and, with
    recomputation, R (2 chunks + c)."""

    place: Ints
    """``place[stage, type, microbatch]``: place in the stage's order; -1 for a missing chunk."""
    flushed: Floats
    """``flushed[stage, place]``: memory after that pass if all W's so far have run; while it runs,
    for a B that recomputes."""


def template(arrays: Arrays, keys: Floats) -> Template | None:
    """The template that runs passes by ascending ``keys[stage, type, microbatch]``.

    Equal keys run in the order of types, but an R always between its F and B. None if it does not
    fit the memory limits.
    """
    stages, types, microbatches = keys.shape
    place = np.empty((stages, types, microbatches), np.int64)
    flushed = np.empty((stages, types * microbatches))
    fits = fill_template(arrays, keys, place, flushed)
    return Template(place, flushed) if fits else None


@compiled
def fill_template(arrays: Arrays, keys: Floats, place: Ints, flushed: Floats) -> bool:
    stages, types, microbatches = keys.shape
    chunks = arrays.held.shape[1]
    place[:] = -1
    for stage in range(stages):
        held = 0
        while held < chunks and arrays.held[stage, held] >= 0:
            held += 1
        flat = np.empty(types // chunks * held * microbatches)
        code = np.empty(len(flat), np.int64)
        size = 0
        for kind in range(types // chunks):
            for chunk in range(held):
                for microbatch in range(microbatches):
                    which = kind * chunks + chunk
                    key = keys[stage, which, microbatch]
                    if kind == 2:
                        latest = keys[stage, chunks + chunk, microbatch] - _BETWEEN
                        key = max(min(key, latest), keys[stage, chunk, microbatch] + _BETWEEN)
                    flat[size] = key
                    code[size] = which * microbatches + microbatch
                    size += 1
        memory = 0.0
        limit = arrays.limit[stage] * (1 + 1e-9)
        for index, where in enumerate(np.argsort(flat, kind="mergesort")):
            which = code[where] // microbatches
            place[stage, which, code[where] % microbatches] = index
            position = arrays.held[stage, which % chunks]
            kind = _KIND_OF[which // chunks]
            more = taken(arrays, kind, position)
            memory += more
            if more > 0 and memory > limit:
                return False
            during = memory
            if kind == 1:
                memory -= arrays.m_b[position]
            flushed[stage, index] = during if kind == 1 and more > 0 else memory
    return True


def squeeze(
    arrays: Arrays, microbatches: int, what: Template, knobs: Knobs, rows: Ints | None = None
) -> float:
    """What the template costs when squeezed, in ms; -1 if it has no legal order.

    Fills ``rows`` (see `zero_bubble.search.orders`), if given, with the order found: memory stays
    within the limits, and F's, B's and W's of a chunk ascend by microbatch.
    """
    stages = len(what.place)
    if rows is None:
        width = arrays.kinds * arrays.held.shape[1] * microbatches
        rows = np.empty((stages, width), np.int64)
    return run_squeeze(arrays, microbatches, what.place, what.flushed.copy(), knobs, rows)


@compiled
def run_squeeze(
    arrays: Arrays, microbatches: int, place: Ints, flushed: Floats, knobs: Knobs, rows: Ints
) -> float:
    """`squeeze` with everything given; overwrites ``flushed``."""
    stages, types, _ = place.shape
    chunks = arrays.held.shape[1]
    positions = len(arrays.stage)
    per_kind = positions * microbatches
    ends_f = np.full((positions, microbatches), _NEVER)
    ends_b = np.full((positions, microbatches), _NEVER)
    upcoming = np.zeros((stages, types), np.int64)  # next microbatch of each type
    weights = np.zeros((stages, chunks), np.int64)  # next microbatch of each chunk's W
    done = np.zeros((stages, types * microbatches + 1), np.bool_)
    frontier = np.zeros(stages, np.int64)
    held = np.zeros(stages)  # memory
    pending = np.zeros(stages)  # the part of it that waits for W
    free = np.zeros(stages)
    first = np.full(stages, -1.0)
    filled = np.zeros(stages, np.int64)
    count = np.zeros(stages, np.int64)
    rows[:] = -1
    left = 0
    for stage in range(stages):
        while count[stage] < chunks and arrays.held[stage, count[stage]] >= 0:
            count[stage] += 1
        left += arrays.kinds * count[stage] * microbatches
    far = 10 * types * microbatches
    heap = [(0.0, 0)]
    heap.pop()
    for stage in range(stages):
        heapq.heappush(heap, (0.0, stage))
    while left > 0:
        if len(heap) == 0:
            return -1.0
        now, stage = heapq.heappop(heap)
        if free[stage] > now + 1e-9:
            continue
        near = 1e-7 * (now + 1)
        top = arrays.limit[stage] * (1 + 1e-9)
        last_chunk = count[stage] - 1
        late = upcoming[stage, 0] >= microbatches
        patience = knobs.late_patience if late else knobs.patience
        gap = knobs.late_gap if late else knobs.gap
        lead = knobs.late_lead if late else knobs.lead
        best = -1
        best_at = 2 * far
        coming = -1
        coming_at = 2 * far
        coming_ready = _NEVER
        soonest = _NEVER
        for which in range(types):
            chunk = which % chunks
            kind = _KIND_OF[which // chunks]
            if chunk > last_chunk:
                continue
            one = upcoming[stage, which]
            if one >= microbatches:
                continue
            position = arrays.held[stage, chunk]
            if kind == 0:
                ready = 0.0
                if position > 0:
                    ready = ends_f[position - 1, one]
                    if ready >= _NEVER:
                        continue
                    ready += arrays.delay_f[position]
            elif kind == 3:
                ready = 0.0
                if upcoming[stage, chunk] <= one:
                    continue
                if one - upcoming[stage, chunks + chunk] > knobs.ahead:
                    continue
            else:
                if upcoming[stage, chunk] <= one:
                    continue
                if arrays.kinds > 3 and upcoming[stage, 2 * chunks + chunk] <= one:
                    continue
                if position == positions - 1:
                    ready = ends_f[position, one]
                else:
                    ready = ends_b[position + 1, one]
                if ready >= _NEVER:
                    continue
                ready += arrays.delay_b[position]
            at = place[stage, which, one]
            if kind == 1 and not late and at - frontier[stage] > knobs.hold:
                continue
            more = taken(arrays, kind, position)
            if (kind != 1 or more > 0) and at > frontier[stage]:
                fits = held[stage] - pending[stage] + more <= top
                if which == 0:
                    flying = upcoming[stage, 0] - upcoming[stage, chunks]
                    room = top / more if more > 0 else _NEVER
                    if knobs.spare > 50 or flying > room - knobs.spare * (stage + 1) - 1e-6:
                        fits = False
                if not fits:
                    continue
                for index in range(frontier[stage], at):
                    if flushed[stage, index] + more > top:
                        fits = False
                        break
                if not fits:
                    continue
            if late and knobs.late_order > 0:
                backward = kind != 0
                if (
                    (knobs.late_order == 1 and not backward)
                    or (knobs.late_order == 2 and backward)
                    or (knobs.late_order == 3 and not (backward and chunk == last_chunk))
                    or (knobs.late_order == 4 and not (backward and chunk == 0))
                ):
                    at += far
            if ready <= now + near:
                if at < best_at:
                    best_at = at
                    best = which
            else:
                soonest = min(soonest, ready)
                if at < coming_at:
                    coming_at = at
                    coming = which
                    coming_ready = ready
        weight = -1
        backlog = 0
        for chunk in range(count[stage]):
            waiting = upcoming[stage, chunks + chunk] - weights[stage, chunk]
            if waiting > backlog:
                backlog = waiting
                weight = chunk
        run_weight = False
        chosen = -1
        worth_waiting = (
            best >= 0
            and coming >= 0
            and coming_at < best_at
            and coming_ready - now < patience * arrays.t_f[arrays.held[stage, 0]]
        )
        if best >= 0 and not worth_waiting:
            chosen = best
            more = taken(arrays, _KIND_OF[best // chunks], arrays.held[stage, best % chunks])
            if more > 0 and held[stage] + more > top:
                run_weight = True
                if weight < 0:
                    return -1.0
            elif weight >= 0 and best_at % far - frontier[stage] > lead:
                run_weight = True
        elif weight >= 0:
            until = coming_ready if best >= 0 else soonest
            run_weight = until - now >= gap * arrays.t_w[arrays.held[stage, weight]]
        if not run_weight and chosen < 0:
            if soonest < _NEVER:
                heapq.heappush(heap, (soonest, stage))
            continue
        reader = stage
        delay = 0.0
        if run_weight:
            position = arrays.held[stage, weight]
            code = 2 * per_kind + position * microbatches + weights[stage, weight]
            weights[stage, weight] += 1
            held[stage] -= arrays.m_w[position]
            pending[stage] -= arrays.m_w[position]
            end = now + arrays.t_w[position]
        else:
            one = upcoming[stage, chosen]
            upcoming[stage, chosen] += 1
            at = place[stage, chosen, one]
            done[stage, at] = True
            kind = _KIND_OF[chosen // chunks]
            position = arrays.held[stage, chosen % chunks]
            change = taken(arrays, kind, position)
            if kind == 1:
                change -= arrays.m_b[position]
            for index in range(frontier[stage], at):
                flushed[stage, index] += change
            while done[stage, frontier[stage]]:
                frontier[stage] += 1
            if kind == 0:
                code = position * microbatches + one
                held[stage] += arrays.m_r[position]
                end = now + arrays.t_f[position]
                ends_f[position, one] = end
                if position + 1 < positions:
                    reader = arrays.stage[position + 1]
                    delay = arrays.delay_f[position + 1]
                if first[stage] < 0:
                    first[stage] = now
            elif kind == 3:
                code = 3 * per_kind + position * microbatches + one
                held[stage] += arrays.m_b[position] - arrays.m_r[position]
                end = now + arrays.t_r[position]
            else:
                code = per_kind + position * microbatches + one
                held[stage] += taken(arrays, kind, position)
                held[stage] -= arrays.m_b[position] - arrays.m_w[position]
                pending[stage] += arrays.m_w[position]
                end = now + arrays.t_b[position]
                ends_b[position, one] = end
                if position > 0:
                    reader = arrays.stage[position - 1]
                    delay = arrays.delay_b[position - 1]
        rows[stage, filled[stage]] = code
        filled[stage] += 1
        free[stage] = end
        left -= 1
        heapq.heappush(heap, (end, stage))
        if reader != stage:
            heapq.heappush(heap, (end + delay, reader))
            if free[reader] <= now:
                heapq.heappush(heap, (now, reader))
    cost = 0.0
    for stage in range(stages):
        cost = max(cost, free[stage] - first[stage])
    return cost
