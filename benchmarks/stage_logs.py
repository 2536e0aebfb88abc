"""What ranks wrote down for cross_stage_syncs.py, and which waits of it cross stages.

The ranks are those of one pipeline: one a stage.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_bubble.program import Instruction, Program, Run
from zero_bubble.run_ahead import run_ahead
from zero_bubble.schedule import Kind

__all__ = ["Logs", "Sync", "Wait"]

type Entry = dict[str, Any]
"""As cross_stage_worker.py writes it."""


@dataclass(frozen=True, slots=True, order=True)
class Sync:
    """Calls that are alike, of an iteration."""

    what: str
    stages: tuple[int, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A stage waits for another one, between its last W and its last run-ahead forward."""

    stage: int
    other: int
    what: str
    where: str
    ms: float
    allowed: bool
    why: str


class Logs:
    """Of one job, for its batch number ``batch`` (from 0) and the beginning of the next one."""

    def __init__(self, directory: Path, program: Program, batch: int) -> None:
        files = sorted(directory.glob("rank*.json"), key=lambda one: int(one.stem[4:]))
        written = [json.loads(one.read_text()) for one in files]
        self.program, self.batch = program, batch
        self.stage_of: dict[int, int] = {
            rank: its_log["stage"] for rank, its_log in enumerate(written)
        }
        rank_of = {stage: rank for rank, stage in self.stage_of.items()}
        self.entries: list[list[Entry]] = [
            written[rank_of[stage]]["entries"] for stage in range(len(rank_of))
        ]
        """By stage."""
        self._lengths = run_ahead(program)
        self._passes = [
            {str(one) for one in row if isinstance(one, Run)} for row in program.instructions
        ]
        self._calls: list[dict[tuple[Any, ...], int]] = [
            {
                (*one["line"], one["direction"], one["number"]): index
                for index, one in enumerate(its_entries)
                if one["kind"] == "call"
            }
            for its_entries in self.entries
        ]
        """By stage: where in its log a call is."""

    def syncs(self) -> Counter[Sync]:
        """How often each sort of call that spans stages is made in the iteration.

        Messages are counted where they are received, and collectives on the rank that calls most.
        """
        most: Counter[Sync] = Counter()
        for stage, its_entries in enumerate(self.entries):
            steps = [index for index, one in enumerate(its_entries) if one["kind"] == "step"]
            own: Counter[Sync] = Counter()
            for one in its_entries[steps[self.batch] : steps[self.batch + 1]]:
                if one["kind"] == "call" and one["direction"] != "send":
                    sync = self._sync(stage, one)
                    if len(set(sync.stages)) > 1:
                        own[sync] += 1
            most |= own
        return most

    def waits(self) -> list[Wait]:
        """Every wait for another stage between a stage's last W and its last run-ahead forward."""
        return [
            wait
            for stage in range(len(self.entries))
            for index in self._between(stage)
            for wait in self._waits_of(stage, self.entries[stage][index])
        ]

    def _sync(self, stage: int, call: Entry) -> Sync:
        if call["peer"] is not None:
            # A channel's name says which it is, and all its messages come from one line.
            return Sync(f"message {call['group']}", (self.stage_of[call["peer"]], stage), "")
        stages = tuple(sorted({self.stage_of[rank] for rank in call["ranks"]}))
        return Sync(call["what"], stages, call["where"])

    def _between(self, stage: int) -> range:
        """Where in a stage's log it is between the two passes."""
        return range(self._end_of_batch(stage) + 1, self._end_of_run_ahead(stage) + 1)

    def _last(self, stage: int, part: Kind) -> Run:
        """The last pass of a stage that has this part, B or W."""
        row = self.program.instructions[stage]
        return [one for one in row if isinstance(one, Run) and part in one.what.kind][-1]

    def _end_of_batch(self, stage: int) -> int:
        """Where the end of a stage's last W is in its log."""
        return self._at(stage, "end", self._last(stage, Kind.W), self.batch)

    def _after_last_b(self, stage: int) -> int:
        """Where in a stage's log it first does, after its last B, more than to send what is done:
        it ends another pass or waits for another stage."""
        begin = self._at(stage, "end", self._last(stage, Kind.B), self.batch) + 1
        rest = enumerate(self.entries[stage][begin:], begin)
        return next(index for index, one in rest if self._goes_on(stage, one))

    def _goes_on(self, stage: int, one: Entry) -> bool:
        if one["kind"] == "end":
            return one["what"] in self._passes[stage]
        call = self._waited_for(stage, one)
        return call is not None and bool(self._others(stage, call))

    def _end_of_run_ahead(self, stage: int) -> int:
        """Where the end of a stage's last run-ahead pass is in its log; of the last stage, its last
        W.

        Without post-validation that is where the run-ahead would have ended.
        """
        row = self.program.instructions[stage][: self._lengths[stage]]
        passes = [one for one in row if isinstance(one, Run)]
        if not passes:
            return self._end_of_batch(stage)
        return self._at(stage, "end", passes[-1], self.batch + 1)

    def _at(self, stage: int, kind: str, instruction: Instruction, batch: int) -> int:
        wanted = kind, str(instruction), batch
        return next(
            index
            for index, one in enumerate(self.entries[stage])
            if one["kind"] == kind and (kind, one["what"], one["batch"]) == wanted
        )

    def _waits_of(self, stage: int, one: Entry) -> Iterator[Wait]:
        call = self._waited_for(stage, one)
        if call is None:
            return
        ms = (one["end"] - one["begin"]) / 1e6
        what = f"message {call['group']}" if call["peer"] is not None else call["what"]
        for other in self._others(stage, call):
            allowed, why = self._judge(stage, other, call)
            yield Wait(stage, other, what, call["where"], ms, allowed, why)

    def _waited_for(self, stage: int, one: Entry) -> Entry | None:
        """The call that a stage waits for in an entry, if it waits."""
        if one["kind"] == "wait":
            return self.entries[stage][one["of"]]
        return one if one["kind"] == "call" and one["blocks"] else None

    def _others(self, stage: int, call: Entry) -> list[int]:
        """The other stages that take part in a call."""
        ranks: Sequence[int] = call["ranks"] if call["peer"] is None else (call["peer"],)
        return sorted({self.stage_of[rank] for rank in ranks} - {stage})

    def _judge(self, stage: int, other: int, call: Entry) -> tuple[bool, str]:
        """Whether a stage may wait for another one's part of a call, and what that part was.

        A later stage must have done its part at the latest with its own last B, an earlier one at
        the latest in its run-ahead: what it does after that may depend on later stages.
        """
        opposite: Mapping[str | None, str | None] = {"send": "receive", "receive": "send"}
        direction = opposite.get(call["direction"])
        part = self._calls[other].get((*call["line"], direction, call["number"]))
        if part is None:
            return False, "it never does its part"
        if other > stage:
            allowed = part < self._after_last_b(other)
            return allowed, f"it does its part {'by' if allowed else 'after'} its last B"
        # What a pass makes is sent after its end.
        sent = self._end_of_run_ahead(other) + 2
        allowed = part <= sent
        return allowed, f"it does its part {'before' if allowed else 'after'} its run-ahead's end"
