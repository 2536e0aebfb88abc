"""Known schedules by name. A builder is a pure function (stages, microbatches) -> Schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from zero_bubble.builders.gpipe import gpipe
from zero_bubble.builders.one_f_one_b import one_f_one_b
from zero_bubble.builders.zb_h1 import zb_h1
from zero_bubble.builders.zb_h2 import zb_h2
from zero_bubble.schedule import Schedule

__all__ = ["BUILDERS", "Builder", "build", "gpipe", "one_f_one_b", "zb_h1", "zb_h2"]

type Builder = Callable[[int, int], Schedule]

BUILDERS: Mapping[str, Builder] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_f_one_b, "zb-h1": zb_h1, "zb-h2": zb_h2}
)
"""The builders by the name that the command line and Megatron's flags use."""


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """The schedule of this name; ValueError for an unknown name, or no stage or microbatch."""
    builder = BUILDERS.get(name)
    if builder is None:
        raise ValueError(f"no schedule is called {name!r}; known: {', '.join(BUILDERS)}")
    return builder(stages, microbatches)
