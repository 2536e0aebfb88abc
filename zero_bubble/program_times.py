"""When every pass of a program runs, also where W's run in shares."""

from __future__ import annotations

from dataclasses import dataclass

from zero_bubble.costs import Costs
from zero_bubble.program import Program, Run
from zero_bubble.schedule import Kind, Pass

__all__ = ["RunSpan", "time_program"]


@dataclass(frozen=True, slots=True)
class RunSpan:
    """A pass, or a share of a W, with its times in ms."""

    run: Run
    start: float
    end: float


def time_program(program: Program, costs: Costs) -> tuple[tuple[RunSpan, ...], ...]:
    """What `zero_bubble.simulate.simulate` is for schedules; shares of a W take equal time.

    Raises:
        ValueError: costs of another placement, or stages that wait for each other.
    """
    costs.require(program.placement)
    timing = _Timing(program, costs)
    moved = True
    while moved:
        moved = sum(map(timing.advance, range(len(timing.rows)))) > 0
    for stage, row in enumerate(timing.rows):
        if len(timing.spans[stage]) < len(row):
            raise ValueError(f"stage {stage} waits for ever at {row[len(timing.spans[stage])]}")
    return tuple(map(tuple, timing.spans))


class _Timing:
    """How far each stage has come."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self._placement, self._costs = program.placement, costs
        self.rows = [[one for one in row if isinstance(one, Run)] for row in program.instructions]
        self.spans: list[list[RunSpan]] = [[] for _ in self.rows]
        self._recomputed = [
            {one.what.chunk for one in row if one.what.kind is Kind.R} for row in self.rows
        ]
        self._made: dict[tuple[int, Pass], float] = {}
        """When (stage, F or B) had ended."""

    def advance(self, stage: int) -> bool:
        """Run a stage until it has to wait; whether it went on at all."""
        row, spans = self.rows[stage], self.spans[stage]
        begun = len(spans)
        now = spans[-1].end if spans else 0.0
        for one in row[begun:]:
            ready = self._input_ready(stage, one.what)
            if ready is None:
                break
            start = max(now, ready)
            now = start + self._duration(stage, one)
            spans.append(RunSpan(one, start, now))
            made = Kind.B if one.what.kind is Kind.BW else one.what.kind
            self._made[stage, Pass(made, one.what.microbatch, one.what.chunk)] = now
        return len(spans) > begun

    def _duration(self, stage: int, one: Run) -> float:
        kind, chunk = one.what.kind, one.what.chunk
        time = self._costs.duration(kind, stage, chunk) / one.parts
        if kind in (Kind.B, Kind.BW) and chunk not in self._recomputed[stage]:
            time += self._costs.recomputation(stage, chunk)
        return time

    def _input_ready(self, stage: int, what: Pass) -> float | None:
        """When a pass has its input; None as long as it has not been made."""
        if what.kind in (Kind.W, Kind.R):
            return 0.0  # what they need, the stage itself has made before
        forward = what.kind is Kind.F
        neighbour = self._placement.before if forward else self._placement.after
        source = neighbour(stage, what.chunk)
        if source is None:
            return 0.0
        made = Pass(Kind.F if forward else Kind.B, what.microbatch, source[1])
        end = self._made.get((source[0], made))
        return None if end is None else end + self._costs.comm(source[0], stage)
