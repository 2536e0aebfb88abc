"""Legal schedules of each sort, to be spoiled by tests."""

from __future__ import annotations

from zero_bubble.builders import build
from zero_bubble.placement import Placement, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule

STAGES, MICROBATCHES = 3, 9


def wave(placement: Placement, microbatches: int, period: int) -> Schedule:
    """Microbatches follow each other through the model at a distance; W comes right after B."""
    last = 2 * placement.num_positions - 1
    rows = []
    for held in placement.positions:
        keyed = [
            (period * one + at, index, Pass(kind, one, chunk))
            for chunk, position in enumerate(held)
            for one in range(microbatches)
            for index, (kind, at) in enumerate(
                [(Kind.F, position), (Kind.B, last - position), (Kind.W, last - position)]
            )
        ]
        rows.append(tuple(one for _, _, one in sorted(keyed)))
    return Schedule(placement, microbatches, tuple(rows), "wave")


LINEAR = {name: build(name, STAGES, MICROBATCHES) for name in ("1f1b", "zb-h1", "zb-h2")}
V = {"v-wave": wave(v_shape(STAGES), MICROBATCHES, 3)}
BASES = LINEAR | V
SPLIT = ("zb-h1", "zb-h2", "v-wave")
