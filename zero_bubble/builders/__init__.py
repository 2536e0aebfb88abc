"""Known schedules by name. A builder is a pure function of numbers (and costs, if they matter)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zero_bubble.builders.builder import Builder
from zero_bubble.builders.forwards import forwards
from zero_bubble.builders.gpipe import gpipe
from zero_bubble.builders.interleaved import interleaved_1f1b
from zero_bubble.builders.one_f_one_b import one_f_one_b
from zero_bubble.builders.v_half import v_half
from zero_bubble.builders.v_min import v_min
from zero_bubble.builders.zb_h1 import zb_h1
from zero_bubble.builders.zb_h2 import zb_h2
from zero_bubble.builders.zb_interleaved import zb_interleaved
from zero_bubble.builders.zb_v import zb_v
from zero_bubble.costs import Costs
from zero_bubble.placement import interleaved, v_shape
from zero_bubble.schedule import Schedule

__all__ = [
    "BUILDERS",
    "Builder",
    "build",
    "forwards",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_interleaved",
    "zb_v",
]

BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {
        "gpipe": Builder(gpipe),
        "1f1b": Builder(one_f_one_b),
        "interleaved": Builder(interleaved_1f1b, interleaved, default_chunks=2),
        "zb-h1": Builder(zb_h1),
        "zb-h2": Builder(zb_h2),
        "zb-interleaved": Builder(zb_interleaved, interleaved, default_chunks=2),
        "zb-v": Builder(zb_v, v_shape, takes_costs=True),
        "v-half": Builder(v_half, v_shape, takes_costs=True),
        "v-min": Builder(v_min, v_shape, takes_costs=True),
    }
)
"""The builders by the name that the command line uses."""


def build(
    name: str,
    stages: int,
    microbatches: int,
    *,
    chunks: int | None = None,
    costs: Costs | None = None,
) -> Schedule:
    """The schedule of this name.

    ``chunks`` is the number of chunks a stage, for builders with a choice; None is their default.
    ``costs`` are those of the builder's placement, for builders whose order depends on times; the
    others have no use for them. ValueError for an unknown name, no stage or microbatch, or chunks
    that the schedule cannot have.
    """
    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"no schedule is called {name!r}; known: {', '.join(BUILDERS)}")
    if chunks is not None and not builder.takes_chunks:
        choice = ", ".join(one for one, other in BUILDERS.items() if other.takes_chunks)
        raise ValueError(
            f"--chunks {chunks}: {name} has a fixed number of chunks a stage; leave --chunks out, "
            f"or choose {choice}"
        )
    return builder.build(stages, microbatches, chunks=chunks, costs=costs)
