"""What a stage executes: a schedule's passes with their communication, as instructions."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from zero_bubble.placement import Placement
from zero_bubble.schedule import Pass

__all__ = [
    "Channel",
    "Finalize",
    "Flow",
    "HandOver",
    "Instruction",
    "Program",
    "Receive",
    "Run",
    "Send",
    "channels_between",
]


class Flow(StrEnum):
    """Direction of a message through the model."""

    FORWARD = "F"
    """An activation, from a position of the model to the next."""
    BACKWARD = "B"
    """A gradient, from a position of the model to the one before."""


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """One line between two stages, for messages of one kind, delivered in the order sent."""

    source: int
    target: int
    flow: Flow

    def __str__(self) -> str:
        return f"{self.flow}:{self.source}->{self.target}"


@dataclass(frozen=True, slots=True)
class Run:
    """Compute a pass, or a share of a W; waits for its input if that comes by message.

    With ``parts`` above 1, those weight gradients of a W that are in share ``part``, counted from
    0: the same weights for all microbatches. Prints as ``0W3.1/4``.
    """

    what: Pass
    part: int = 0
    parts: int = 1

    def __str__(self) -> str:
        share = f".{self.part}/{self.parts}" if self.parts > 1 else ""
        return f"{self.what}{share}"


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending what (chunk, microbatch) of this stage produced; does not wait.

    On a FORWARD channel that is the chunk's output, on a BACKWARD channel its input's gradient.
    """

    channel: Channel
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk}SEND_{self.channel.flow}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of what (chunk, microbatch) of this stage will need; does not wait.

    On a FORWARD channel that is the chunk's input, on a BACKWARD channel its output's gradient.
    """

    channel: Channel
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.chunk}RECV_{self.channel.flow}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class HandOver:
    """Pass a result to another chunk of the same stage, without a message (the turn of a V)."""

    flow: Flow
    microbatch: int
    source_chunk: int
    target_chunk: int

    def __str__(self) -> str:
        return f"{self.source_chunk}TURN_{self.flow}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Finalize:
    """Reduce this stage's gradients over its groups, before the optimizer's step."""

    def __str__(self) -> str:
        return "FINALIZE"


Instruction = Run | Send | Receive | HandOver | Finalize


@dataclass(frozen=True, slots=True)
class Program:
    """``instructions[stage]`` is what that stage executes, in order."""

    placement: Placement
    num_microbatches: int
    instructions: tuple[tuple[Instruction, ...], ...]
    name: str = ""

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) for row in self.instructions)


def channels_between(placement: Placement) -> tuple[Channel, ...]:
    """Every channel that any program of this placement can use, sorted: the one order in which
    all ranks create them."""
    owners = [placement.owner(position) for position in range(placement.num_positions)]
    used: set[Channel] = set()
    for (here, _), (there, _) in pairwise(owners):
        if here != there:
            used.add(Channel(here, there, Flow.FORWARD))
            used.add(Channel(there, here, Flow.BACKWARD))
    return tuple(sorted(used))
