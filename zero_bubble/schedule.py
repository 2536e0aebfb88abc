"""The one type everything speaks: a schedule is the order of passes on every stage.

Vocabulary: a *stage* is a pipeline rank, a *chunk* one of the stage's parts of the model, a
*microbatch* one of the m parts of a batch; all are counted from 0. A *pass* is one computation of
one chunk for one microbatch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from zero_bubble.placement import Placement

__all__ = ["Kind", "Pass", "Schedule"]


class Kind(StrEnum):
    """What a pass computes (paper, section 1)."""

    F = "F"
    """Forward."""
    B = "B"
    """Gradient of the input: what the previous stage waits for."""
    W = "W"
    """Gradient of the weights: what nobody waits for."""
    BW = "BW"
    """Both at once: the fused backward of 1F1B."""
    R = "R"
    """Recomputation: the forward once more, of a chunk whose F kept little of it."""


_LETTER = {Kind.F: "F", Kind.B: "I", Kind.W: "W", Kind.BW: "B", Kind.R: "R"}
_KIND = {letter: kind for kind, letter in _LETTER.items()}
_GRAMMAR = re.compile(r"(\d+)([FIWBR])(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Pass:
    """One computation of one chunk for one microbatch.

    Prints in PyTorch's grammar, chunk first: ``0F3``, ``0I3`` (input gradient, our B), ``0W3`` and
    ``0B3`` (fused backward, our BW); besides, ``0R3`` (recomputation), which PyTorch has not.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.chunk}{_LETTER[self.kind]}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Pass:
        """The pass that prints as ``text``; ValueError if there is none."""
        match = _GRAMMAR.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is not a pass: expected chunk, one of F, I (input gradient), W, B "
                "(fused backward) or R (recomputation), microbatch, such as 0F3"
            )
        return Pass(_KIND[match[2]], int(match[3]), int(match[1]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of passes on every stage.

    Holds any order, legal or not: `zero_bubble.check` decides. ``passes[stage]`` is the order on
    that stage; a chunk number in it is the stage's own (``placement`` maps it to the model).
    """

    placement: Placement
    num_microbatches: int
    passes: tuple[tuple[Pass, ...], ...]
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches must be at least 1, not {self.num_microbatches}")
        if len(self.passes) != self.placement.num_stages:
            raise ValueError(
                f"{len(self.passes)} rows of passes for {self.placement.num_stages} stages: "
                "one row a stage is needed"
            )

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    def order(self, stage: int, kinds: Iterable[Kind]) -> Iterator[Pass]:
        """The passes of these kinds on a stage, in the order they run."""
        wanted = frozenset(kinds)
        return (one for one in self.passes[stage] if one.kind in wanted)

    def chunks_with(self, kind: Kind) -> tuple[frozenset[int], ...]:
        """Of each stage, the chunks that have a pass of this kind."""
        return tuple(frozenset(one.chunk for one in row if one.kind is kind) for row in self.passes)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.passes)
