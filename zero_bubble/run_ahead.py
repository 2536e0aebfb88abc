"""Which part of an iteration may run before the result of the iteration before is known.

With post-validation a stage does not wait for the global gradient norm before it steps (paper,
section 4). The statistics of the gradients go from stage 0 to the last one, the result comes back
from the last one to stage 0. Meanwhile each stage runs forwards of the next iteration: its
run-ahead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from zero_bubble.placement import Placement
from zero_bubble.program import Channel, HandOver, Instruction, Program, Run, Send
from zero_bubble.schedule import Kind, Pass

__all__ = ["run_ahead", "sent_ahead"]

type _Output = tuple[int, int, int]
"""(stage, chunk, microbatch) of an F whose result has been sent or handed over."""


def run_ahead(program: Program) -> tuple[int, ...]:
    """How many leading instructions of each stage run before the previous iteration's result is
    known.

    A stage's run-ahead is the longest beginning of its row that computes nothing but F's, not the
    loss, and reads only what the stage itself or an earlier one makes in its own run-ahead. It ends
    with an F and the sending of its result. The last stage has none: it is the first to know.

    Stages cannot block each other. Stage 0 waits for no message in its run-ahead, and each other
    stage only for run-aheads of earlier ones, so all of them end. A stage waits for the result only
    from the next stage, and passes it on at the latest after its run-ahead. This holds as long as
    nobody waits for a message to have left before the result is passed on.

    Receives may be among these instructions whose messages no run-ahead sends, gradients too: they
    stay posted.
    """
    lengths: list[int] = []
    made: set[_Output] = set()
    for stage, row in enumerate(program.instructions[:-1]):
        lengths.append(_length(program.placement, stage, row, made))
    return (*lengths, 0)


def sent_ahead(program: Program, lengths: Sequence[int], stage: int) -> dict[Channel, int]:
    """How many messages a stage sends on each channel in its run-ahead.

    They are the first that the channel carries in an iteration. ``lengths`` are those of
    `run_ahead`; a channel without messages is left out.
    """
    ahead = program.instructions[stage][: lengths[stage]]
    return dict(Counter(one.channel for one in ahead if isinstance(one, Send)))


def _length(
    placement: Placement, stage: int, row: Sequence[Instruction], made: set[_Output]
) -> int:
    """The length of a stage's run-ahead; adds what it makes for others to ``made``.

    ``made`` holds that of earlier stages alone, so that nothing of a later one is ever read.
    """
    length = 0
    for index, one in enumerate(row):
        match one:
            case Run(what):
                if not _runs_ahead(placement, stage, what, made):
                    break
                length = index + 1
            case Send(_, microbatch, chunk) | HandOver(_, microbatch, chunk, _):
                made.add((stage, chunk, microbatch))
                length = index + 1
    return length


def _runs_ahead(placement: Placement, stage: int, what: Pass, made: set[_Output]) -> bool:
    if what.kind is not Kind.F or placement.after(stage, what.chunk) is None:
        return False
    source = placement.before(stage, what.chunk)
    return source is None or (*source, what.microbatch) in made
