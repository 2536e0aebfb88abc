"""The beginning of the next batch, run before it is known whether its parameters are right."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.zero_bubble.errors import PipelineError
from megatron.zero_bubble.runtime.batch import Batch, BatchRequest
from megatron.zero_bubble.runtime.forward_state import ForwardState
from megatron.zero_bubble.runtime.replay import ReplayableIterator, ReplayableIterators
from zero_bubble.program import Channel, Instruction, Program, Receive, Send
from zero_bubble.run_ahead import run_ahead, sent_ahead

__all__ = ["RunAhead", "RunAheadFailed"]

logger = logging.getLogger(__name__)


class RunAheadFailed(Exception):
    """A pass of the run-ahead raised; the cause is the exception it raised."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A stage's instructions in two parts, and what others send it in their first part."""

    ahead: tuple[Instruction, ...]
    rest: tuple[Instruction, ...]
    arriving: dict[Channel, int]


class RunAhead:
    """Forwards of the next batch, kept until the batch is asked for or they are thrown away.

    Thrown away means that data, random states, buffers and channels are as if they had never run.
    The stages of a pipeline throw away alike: each keeps its own, or all throw away theirs.
    """

    def __init__(self) -> None:
        self.enabled = False
        """Whether batches may be run ahead at all; iterators are made replayable only then."""
        self.failure: BaseException | None = None
        """What a run-ahead raised that has been thrown away; raised when its batch is asked for."""
        self._batch: Batch | None = None
        self._state: ForwardState | None = None
        self._iterators = ReplayableIterators()
        self._reading: list[ReplayableIterator] = []
        self._plans: dict[tuple[int, int], tuple[Program, _Plan]] = {}

    @property
    def waiting(self) -> Batch | None:
        """The batch whose beginning has run."""
        return self._batch

    def replayable(self, iterators: Sequence[Any]) -> tuple[Any, ...]:
        """The iterators to read a batch from."""
        if not self.enabled:
            return tuple(iterators)
        return tuple(map(self._iterators.of, iterators))

    def begin(self, batch: Batch) -> None:
        """From here on everything can be taken back; nothing has run yet."""
        self._state = ForwardState.capture(batch.request.models)
        self._reading = [one for one in self.replayable(batch.request.iterators) if one is not None]
        for iterator in self._reading:
            iterator.remember()
        batch.interpreter.transport.begin_tentative()
        self._batch = batch

    def run(self) -> None:
        """Run the beginning of the batch that has begun.

        Raises:
            RunAheadFailed: a pass raised. Later stages still get as many messages as they wait
                for; the caller has to throw away what has run.
            PipelineError: another stage is gone or stuck.
        """
        batch, state = self._batch, self._state
        assert batch is not None
        assert state is not None
        plan, interpreter = self._plan(batch), batch.interpreter
        batch.left = plan.rest
        state.set_aside()
        try:
            with torch.enable_grad():  # the optimizer's step, in which this runs, has none
                interpreter.execute(plan.ahead)
        except PipelineError:
            raise
        except BaseException as error:
            _send_the_rest(batch, plan.ahead)
            raise RunAheadFailed from error
        finally:
            state.release()

    def take(self, request: BatchRequest) -> Batch | None:
        """The batch that has begun, if it is the one asked for; any other is thrown away.

        Raises:
            BaseException: what its beginning raised.
        """
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        batch = self._batch
        if batch is None:
            return None
        if batch.request != request:
            if replace(batch.request, iterators=request.iterators) == request:
                raise RuntimeError(
                    "the training loop reads from another data iterator than in the iteration "
                    "before, but with --optimizer-post-validation a part of this batch has been "
                    "read already: keep the iterator, or leave the flag out"
                )
            logger.warning(
                "forwards of the next batch are thrown away, since another batch is asked for"
            )
            self.discard()
            return None
        assert self._state is not None
        self._state.resume()
        for iterator in self._reading:
            iterator.forget()
        batch.interpreter.transport.keep_tentative()
        self._clear()
        return batch

    def discard(self, stages: int | None = None) -> None:
        """Take back all that has run, if anything has.

        Args:
            stages: how many stages have run ahead, the first ones; None is all that can.
        """
        batch = self._batch
        if batch is None:
            return
        assert self._state is not None
        self._state.restore()
        for iterator in self._reading:
            iterator.rewind()
        arriving = self._plan(batch).arriving
        batch.interpreter.transport.discard_tentative(
            {
                channel: count
                for channel, count in arriving.items()
                if stages is None or channel.source < stages
            },
            lambda channel: batch.compute.buffer(channel.flow),
        )
        self._clear()

    def _clear(self) -> None:
        self._batch = self._state = None
        self._reading = []

    def _plan(self, batch: Batch) -> _Plan:
        key = batch.stage, batch.program.num_microbatches
        known = self._plans.get(key)
        if known is None or known[0] is not batch.program:
            known = self._plans[key] = batch.program, _plan(batch.program, batch.stage)
        return known[1]


def _send_the_rest(batch: Batch, ahead: Sequence[Instruction]) -> None:
    """Send what a run-ahead that failed has not sent, so that nobody waits for it."""
    done = {event.instruction for event in batch.interpreter.log}
    for one in ahead:
        if isinstance(one, Send) and one not in done:
            empty = torch.zeros_like(batch.compute.buffer(one.channel.flow))
            batch.interpreter.transport.send(one.channel, empty)


def _plan(program: Program, stage: int) -> _Plan:
    lengths = run_ahead(program)
    arriving: Counter[Channel] = Counter()
    for source in range(len(lengths)):
        for channel, count in sent_ahead(program, lengths, source).items():
            if channel.target == stage:
                arriving[channel] += count
    # A receive could not be given back that no run-ahead answers, or only that of a later stage,
    # which may not run ahead where this one does. Nothing reads these here: they wait for the
    # second part.
    left = Counter({one: count for one, count in arriving.items() if one.source < stage})
    row, length = program.instructions[stage], lengths[stage]
    ahead: list[Instruction] = []
    later: list[Instruction] = []
    for one in row[:length]:
        if isinstance(one, Receive) and left[one.channel] == 0:
            later.append(one)
            continue
        if isinstance(one, Receive):
            left[one.channel] -= 1
        ahead.append(one)
    return _Plan(tuple(ahead), (*later, *row[length:]), dict(arriving))
