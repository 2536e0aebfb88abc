"""How often an iteration ends when many follow each other, with and without a barrier between them.

`zero_bubble.simulate` times one iteration and lets every stage start when it likes. Here stages
start when the optimizer lets them.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.program import Run
from zero_bubble.run_ahead import run_ahead
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.simulate import Timeline, simulate

__all__ = ["period_behind_barrier", "period_with_run_ahead"]

_ITERATIONS = 200
_DIGITS = 9
"""Stages that are as far from each other, to so many digits of a ms, as before: a cycle."""


def period_behind_barrier(schedule: Schedule, costs: Costs, *, step: float = 0.0) -> float:
    """ms from one iteration to the next if all stages start together, and step when all have ended.

    Args:
        step: ms of the optimizer's step, on every stage.

    Raises:
        ValueError: as `zero_bubble.simulate.simulate`.
    """
    spans = simulate(schedule, costs).spans
    return max((row[-1].end for row in spans if row), default=0.0) + step


def period_with_run_ahead(
    schedule: Schedule,
    costs: Costs,
    *,
    step: float = 0.0,
    commit: float = 0.0,
    hop: float = 0.0,
    reduction: Sequence[float] | None = None,
) -> float:
    """ms from one iteration to the next with post-validation, none of which has to undo a step.

    A stage steps when its own passes have ended and the totals of the earlier stages have come.
    Then it runs ahead (`zero_bubble.run_ahead`), waits for the result of the validation, which
    stages pass on as soon as they have it, and goes on. The mean of the cycle in which the stages
    end up; if they end up in none within 200 iterations, that of the last half.

    Args:
        step: ms of a stage's step, before its run-ahead.
        commit: ms that a stage but the last one needs once the result is known.
        hop: ms of a message of the validation from stage to stage.
        reduction: ms of each stage from its last pass until its gradients are reduced; 0 without.

    Raises:
        ValueError: as `zero_bubble.simulate.simulate` and `zero_bubble.lower.lower`.
    """
    # Raises where the costs do not fit or the stages are in deadlock.
    timeline = simulate(schedule, costs)
    iterations = _Iterations(timeline, step, commit, hop, reduction)
    ends = [0.0] * schedule.num_stages
    history = [ends]
    seen: dict[tuple[float, ...], int] = {}
    for number in range(_ITERATIONS):
        state = tuple(round(one - min(ends), _DIGITS) for one in ends)
        if state in seen:
            return (max(ends) - max(history[seen[state]])) / (number - seen[state])
        seen[state] = number
        ends = iterations.next(ends)
        history.append(ends)
    half = _ITERATIONS // 2
    return (max(ends) - max(history[half])) / (_ITERATIONS - half)


class _Iterations:
    """When stages end an iteration, from when they ended the one before."""

    def __init__(
        self,
        timeline: Timeline,
        step: float,
        commit: float,
        hop: float,
        reduction: Sequence[float] | None,
    ) -> None:
        self._timeline = timeline
        self._schedule, self._costs = timeline.schedule, timeline.costs
        schedule = timeline.schedule
        self._reduction = [0.0] * schedule.num_stages if reduction is None else [*reduction]
        self._step, self._commit, self._hop = step, commit, hop
        program = lower(schedule)
        self._ahead = [
            sum(isinstance(one, Run) for one in row[:length])
            for row, length in zip(program.instructions, run_ahead(program), strict=True)
        ]
        self._ready: dict[tuple[int, Pass], float] = {}
        """When (stage, pass) had ended in this iteration."""

    def next(self, ends: Sequence[float]) -> list[float]:
        self._ready.clear()
        rows = self._schedule.passes
        known = self._totals_known(ends)
        now = []
        # An earlier stage needs nothing of a later one to run ahead.
        for stage, row in enumerate(rows):
            here = row[: self._ahead[stage]]
            now.append(self._run(stage, here, known[stage] + self._step)[0])
        # The last stage knows it first; the others pass it on while they run ahead.
        last = len(rows) - 1
        results = [known[last] + self._hop * (last - stage) for stage in range(len(rows))]
        for stage in range(len(rows) - 1):
            now[stage] = max(now[stage], results[stage]) + self._commit
        done = list(self._ahead)
        moved = True
        while moved:
            moved = False
            for stage, row in enumerate(rows):
                now[stage], count = self._run(stage, row[done[stage] :], now[stage])
                done[stage] += count
                moved = moved or count > 0
        return [end + more for end, more in zip(now, self._reduction, strict=True)]

    def _totals_known(self, ends: Sequence[float]) -> list[float]:
        """When each stage knows the statistics of all stages up to itself."""
        known = [ends[0]]
        for end in ends[1:]:
            known.append(max(end, known[-1] + self._hop))
        return known

    def _run(self, stage: int, passes: Sequence[Pass], now: float) -> tuple[float, int]:
        """Run what can run; when the last of it ends, and how many passes that were."""
        count = 0
        for what in passes:
            ready = self._input_ready(stage, what)
            if ready is None:
                break
            now = max(now, ready) + self._timeline.duration(what, stage)
            made = Kind.B if what.kind is Kind.BW else what.kind
            self._ready[stage, Pass(made, what.microbatch, what.chunk)] = now
            count += 1
        return now, count

    def _input_ready(self, stage: int, what: Pass) -> float | None:
        """When a pass has its input; None as long as it has not been made."""
        place = self._schedule.placement
        if what.kind in (Kind.W, Kind.R):
            return 0.0  # its B, or its F, ran before, on the same stage
        forward = what.kind is Kind.F
        source = (place.before if forward else place.after)(stage, what.chunk)
        if source is None:
            return 0.0  # there is none, or it is of the same chunk
        made = Pass(Kind.F if forward else Kind.B, what.microbatch, source[1])
        end = self._ready.get((source[0], made))
        return None if end is None else end + self._costs.comm(source[0], stage)
