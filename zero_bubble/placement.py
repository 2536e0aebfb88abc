"""Which stage holds which part of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Placement", "interleaved", "linear", "v_shape"]


@dataclass(frozen=True, slots=True)
class Placement:
    """``positions[stage][chunk]`` is the chunk's position in the model, counted from 0.

    Activations flow from position k to k+1, gradients back. Two neighbouring positions on one
    stage (the turn of a V) hand over without a message.
    """

    positions: tuple[tuple[int, ...], ...]
    _owners: tuple[tuple[int, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = sorted(position for stage in self.positions for position in stage)
        if not held or held != list(range(len(held))):
            raise ValueError(
                f"a placement holds each position 0..n-1 of the model once, not {self.positions}"
            )
        owners = {
            position: (stage, chunk)
            for stage, held_here in enumerate(self.positions)
            for chunk, position in enumerate(held_here)
        }
        # Frozen, but not yet: what `owner` answers is asked for every pass.
        object.__setattr__(self, "_owners", tuple(owners[one] for one in range(len(held))))

    @property
    def num_stages(self) -> int:
        return len(self.positions)

    @property
    def num_positions(self) -> int:
        """Chunks in the whole model."""
        return sum(map(len, self.positions))

    def num_chunks(self, stage: int) -> int:
        return len(self.positions[stage])

    def owner(self, position: int) -> tuple[int, int]:
        """(stage, chunk) that holds a position of the model."""
        if not 0 <= position < len(self._owners):
            raise ValueError(f"position {position} is not in a model of {len(self._owners)} chunks")
        return self._owners[position]

    def before(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) whose output this chunk reads; None for the first of the model."""
        position = self.positions[stage][chunk]
        return self.owner(position - 1) if position else None

    def after(self, stage: int, chunk: int) -> tuple[int, int] | None:
        """(stage, chunk) that reads this chunk's output; None for the last of the model."""
        position = self.positions[stage][chunk]
        return self.owner(position + 1) if position + 1 < self.num_positions else None

    @property
    def name(self) -> str:
        """``linear``, ``interleaved``, ``v``, or ``custom``."""
        stages, chunks = self.num_stages, self.num_chunks(0)
        if self == linear(stages):
            return "linear"
        if self == interleaved(stages, chunks):
            return "interleaved"
        return "v" if self == v_shape(stages) else "custom"


def linear(stages: int) -> Placement:
    """One chunk a stage, in order."""
    return interleaved(stages, 1)


def interleaved(stages: int, chunks: int) -> Placement:
    """Stage i holds positions i, i+p, i+2p, ... (Megatron's virtual pipeline)."""
    if stages < 1 or chunks < 1:
        raise ValueError(f"at least 1 stage and 1 chunk, not {stages} and {chunks}")
    return Placement(tuple(tuple(range(s, stages * chunks, stages)) for s in range(stages)))


def v_shape(stages: int) -> Placement:
    """Stage i holds positions i and 2p-1-i (paper, section 6)."""
    return Placement(tuple((s, 2 * stages - 1 - s) for s in range(stages)))
