"""Schedules for tests, most of them made without the builders."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from zero_bubble.builders import BUILDERS, build
from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule


def parse(placement: Placement, microbatches: int, text: str) -> Schedule:
    """A schedule drawn as text: a line a stage, passes in PyTorch's grammar."""
    rows = [tuple(map(Pass.parse, line.split())) for line in text.strip().splitlines()]
    return Schedule(placement, microbatches, tuple(rows))


def all_forwards_first(placement: Placement, microbatches: int, *, split: bool) -> Schedule:
    """GPipe for any placement: chunks in the order of the model, then all the way back."""
    rows = []
    for held in placement.positions:
        chunks = sorted(range(len(held)), key=held.__getitem__)
        row = [Pass(Kind.F, one, chunk) for chunk in chunks for one in range(microbatches)]
        for chunk in reversed(chunks):
            for one in range(microbatches):
                if split:
                    row += [Pass(Kind.B, one, chunk), Pass(Kind.W, one, chunk)]
                else:
                    row.append(Pass(Kind.BW, one, chunk))
        rows.append(tuple(row))
    return Schedule(placement, microbatches, tuple(rows))


def random_order(placement: Placement, microbatches: int, seed: int) -> Schedule:
    """A legal schedule: again and again any pass whose input exists, fused or not by chance."""
    draw = random.Random(seed)
    last = placement.num_positions - 1
    fused = {
        (position, one): draw.random() < 0.4
        for position in range(last + 1)
        for one in range(microbatches)
    }
    done: set[tuple[Kind, int, int]] = set()
    waiting = {
        (kind, position, one)
        for (position, one), whole in fused.items()
        for kind in ((Kind.F, Kind.BW) if whole else (Kind.F, Kind.B, Kind.W))
    }
    rows: list[list[Pass]] = [[] for _ in placement.positions]
    while waiting:
        ready = []
        for kind, position, one in sorted(waiting):
            if kind is Kind.F:
                possible = position == 0 or (Kind.F, position - 1, one) in done
            elif kind is Kind.W:
                possible = (Kind.B, position, one) in done
            elif position == last:
                possible = (Kind.F, position, one) in done
            else:
                possible = (Kind.B, position + 1, one) in done
            if possible:
                ready.append((kind, position, one))
        kind, position, one = chosen = draw.choice(ready)
        waiting.remove(chosen)
        done.add((Kind.B if kind is Kind.BW else kind, position, one))
        stage, chunk = placement.owner(position)
        rows[stage].append(Pass(kind, one, chunk))
    return Schedule(placement, microbatches, tuple(map(tuple, rows)))


def random_costs(placement: Placement, seed: int) -> Costs:
    """Different costs for every chunk and some edges."""
    draw = random.Random(seed)

    def table(low: float, high: float) -> Table:
        return tuple(tuple(draw.uniform(low, high) for _ in held) for held in placement.positions)

    m_b = table(0.5, 2)
    edges = []
    for source in range(placement.num_stages):
        for target in range(placement.num_stages):
            if source != target and draw.random() < 0.3:
                edges.append((source, target, draw.uniform(0, 3)))
    return Costs(
        t_f=table(0, 5),
        t_b=table(0, 5),
        t_w=table(0, 5),
        m_b=m_b,
        m_w=tuple(tuple(part * draw.random() for part in row) for row in m_b),
        t_bw=table(0, 9) if draw.random() < 0.5 else None,
        t_comm=draw.uniform(0, 1),
        t_edges=tuple(edges),
    )


def any_schedules(microbatches: int, known_microbatches: int) -> st.SearchStrategy[Schedule]:
    """Random orders of any placement with at most so many microbatches, and known schedules."""
    placements = st.one_of(
        st.builds(linear, st.integers(1, 4)),
        st.builds(v_shape, st.integers(1, 3)),
        st.builds(interleaved, st.integers(2, 3), st.just(2)),
        st.just(Placement(((3, 0), (1, 4), (5, 2)))),
    )
    known = st.integers(2, 4), st.integers(1, known_microbatches)
    return st.one_of(
        st.builds(random_order, placements, st.integers(1, microbatches), st.integers(0, 10**6)),
        st.builds(build, st.sampled_from(list(BUILDERS)), *known),
    )
