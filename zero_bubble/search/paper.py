"""The paper's own heuristic (section 3.1), as a yardstick for the other searches.

Four rules build a schedule in one sweep over the batch:

1. Warm-up: a stage runs as many F's as its memory holds before its first B. What then remains of
   the wait is shorter than T_F. Whether one more F fills it, and so delays B, is the first choice.
2. Then F and B take turns. A wait of at least T_W gets a W. So does a shorter one that would make
   the stage's bubbles add up to more than those of any stage so far. So do W's that must free
   memory for an F.
3. A stage is at least one F ahead of the next, until F's run out. If it is further ahead, it may
   skip an F where that causes no bubble, since B is ready. Whether it does is the second choice.
4. At the end, the W's that are left run one after another.

The cheapest of the four combinations of choices is the result. It has the published bubble rate of
ZB-1p and ZB-2p, to all 4 decimals, in each of the twelve configurations of the paper's Table 5. At
1p and 1.5p it meets the lower bound in all twelve.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from zero_bubble.placement import linear
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution
from zero_bubble.simulate import simulate

__all__ = ["paper_method"]


def paper_method(problem: Problem) -> Solution:
    """The paper's heuristic for one chunk a stage, with each stage's own times and limit.

    Deterministic; time O(p m). ValueError if the placement is not linear, or the limit of stage s
    (from 0) is below p-s microbatches (or all m, if fewer): rule 3 then cannot hold; or if the
    costs have recomputation.
    """
    stages, microbatches = problem.num_stages, problem.num_microbatches
    if problem.placement != linear(stages):
        raise ValueError(
            f"the paper's method is for one chunk a stage, in order, not for the placement "
            f"{problem.placement.name}: use linear placement or another method"
        )
    if problem.costs.t_r is not None:
        raise ValueError("the paper's method knows no recomputation: use --method auto")
    in_flight = _most_in_flight(problem)
    runs = [
        _Run(problem, in_flight, fills_wait=fills_wait, skips=skips)
        for fills_wait, skips in itertools.product((False, True), repeat=2)
    ]
    best = min(runs, key=lambda run: run.cost)
    rows = tuple(tuple(stage.row) for stage in best.stages)
    schedule = Schedule(problem.placement, microbatches, rows, name="zb-paper")
    cost = simulate(schedule, problem.costs).cost
    return Solution(schedule, cost, bound=problem.ideal, how="paper, section 3.1")


def _most_in_flight(problem: Problem) -> list[int]:
    """How many F's each stage may run before its first B; one fewer than the stage before."""
    stages, microbatches = problem.num_stages, problem.num_microbatches
    most: list[int] = []
    for stage, limit in enumerate(problem.memory_limit):
        one = problem.costs.m_b[stage][0]
        room = microbatches
        if one > 0 and limit < microbatches * one:
            room = math.floor(limit / one + 1e-9)
        needed = min(microbatches, stages - stage)
        if room < needed:
            raise ValueError(
                f"memory limit {limit:.6g} of stage {stage} is too little for the paper's method: "
                f"it holds {needed} microbatches there, which take {needed * one:.6g}; raise the "
                "limit or use another method"
            )
        if most and most[-1] < microbatches:
            room = min(room, most[-1] - 1)
        most.append(room)
    return most


@dataclass(slots=True)
class _Stage:
    """A stage while the schedule grows: its constants, its row, and where it stands in time."""

    t_f: float
    t_b: float
    t_w: float
    m_b: float
    m_w: float
    limit: float
    row: list[Pass] = field(default_factory=list)
    ends_f: list[float] = field(default_factory=list)
    ends_b: list[float] = field(default_factory=list)
    weights: int = 0
    """Number of W's so far."""
    begin: float = 0.0
    now: float = 0.0
    idle: float = 0.0
    """Bubbles since ``begin``."""

    @property
    def waiting(self) -> int:
        """Microbatches whose W could run."""
        return len(self.ends_b) - self.weights

    @property
    def held(self) -> float:
        """Memory in use."""
        return (len(self.ends_f) - len(self.ends_b)) * self.m_b + self.waiting * self.m_w

    def forward(self, ready: float) -> None:
        if not self.row:
            self.begin = self.now = ready
        self._run(Kind.F, len(self.ends_f), ready, self.t_f)
        self.ends_f.append(self.now)

    def backward(self, ready: float) -> None:
        self._run(Kind.B, len(self.ends_b), ready, self.t_b)
        self.ends_b.append(self.now)

    def weight(self) -> None:
        self._run(Kind.W, self.weights, self.now, self.t_w)
        self.weights += 1

    def _run(self, kind: Kind, microbatch: int, ready: float, time: float) -> None:
        start = max(self.now, ready)
        self.idle += start - self.now
        self.now = start + time
        self.row.append(Pass(kind, microbatch))


class _Run:
    """One sweep over the batch, with both choices made."""

    def __init__(
        self, problem: Problem, in_flight: Sequence[int], *, fills_wait: bool, skips: bool
    ) -> None:
        costs = problem.costs
        count = problem.num_stages
        self.microbatches = problem.num_microbatches
        self.fills_wait, self.skips = fills_wait, skips
        self.stages = [
            _Stage(
                t_f=costs.t_f[stage][0],
                t_b=costs.t_b[stage][0],
                t_w=costs.t_w[stage][0],
                m_b=costs.m_b[stage][0],
                m_w=costs.m_w[stage][0],
                limit=problem.memory_limit[stage] * (1 + 1e-9),
            )
            for stage in range(count)
        ]
        self.delays_f = [costs.comm(stage, stage + 1) for stage in range(count - 1)]
        self.delays_b = [costs.comm(stage + 1, stage) for stage in range(count - 1)]
        # Sums of times that should be equal differ by far less than this.
        self.tolerance = 1e-9 * problem.ideal / problem.num_microbatches
        self._warm_up(in_flight)
        for microbatch in range(1, self.microbatches):
            self._turn(microbatch)
        for one in self.stages:
            while one.waiting:
                one.weight()

    @property
    def cost(self) -> float:
        return max(one.now - one.begin for one in self.stages)

    def _warm_up(self, in_flight: Sequence[int]) -> None:
        """Rule 1, and the first B of each stage."""
        counts = self._warm_up_counts(in_flight)
        for stage, count in enumerate(counts):
            for microbatch in range(count):
                self.stages[stage].forward(self._ready_f(stage, microbatch))
        for stage in reversed(range(len(counts))):
            self.stages[stage].backward(self._ready_b(stage, 0))

    def _warm_up_counts(self, in_flight: Sequence[int]) -> list[int]:
        """Number of F's before the first B, from the last stage up, since B's come from there."""
        ends = self._forward_ends(in_flight)
        last = len(self.stages) - 1
        counts: list[int] = []
        count, ready = 0, ends[last][0]
        for stage in range(last, -1, -1):
            most, end = in_flight[stage], ends[stage]
            count = min(self.microbatches, count + 1)
            while count < most and end[count] <= ready + self.tolerance:
                count += 1
            if self.fills_wait and count < most and end[count - 1] < ready - self.tolerance:
                count += 1
            counts.append(count)
            ready = max(ready, end[count - 1]) + self.stages[stage].t_b
            if stage:
                ready += self.delays_b[stage - 1]
        return counts[::-1]

    def _forward_ends(self, in_flight: Sequence[int]) -> list[list[float]]:
        """When each F ends on stages that run nothing else."""
        ends: list[list[float]] = []
        for stage, one in enumerate(self.stages):
            now = 0.0
            row: list[float] = []
            for microbatch in range(in_flight[stage]):
                ready = ends[-1][microbatch] + self.delays_f[stage - 1] if stage else 0.0
                now = max(now, ready) + one.t_f
                row.append(now)
            ends.append(row)
        return ends

    def _turn(self, microbatch: int) -> None:
        """Rules 2 and 3: on each stage the next F, if any, and then B of ``microbatch``."""
        # From the last stage up: when B is ready is then known before F is decided on, and the
        # stage before has run the F already, being one ahead.
        for stage in reversed(range(len(self.stages))):
            one = self.stages[stage]
            ready = self._ready_b(stage, microbatch)
            if len(one.ends_f) < self.microbatches and not self._skips(stage, ready):
                self._forward(stage)
            self._fill(one, self._ready_b(stage, microbatch))
            one.backward(self._ready_b(stage, microbatch))

    def _skips(self, stage: int, ready_b: float) -> bool:
        """Rule 3: whether the stage leaves out its F, as it is far enough ahead and B is ready."""
        if not self.skips or stage == len(self.stages) - 1:
            return False
        one, behind = self.stages[stage], self.stages[stage + 1]
        ahead = len(one.ends_f) > len(behind.ends_f)
        return ahead and ready_b <= one.now + self.tolerance

    def _forward(self, stage: int) -> None:
        one = self.stages[stage]
        while one.held + one.m_b > one.limit and one.waiting:
            one.weight()
        ready = self._ready_f(stage, len(one.ends_f))
        self._fill(one, ready)
        one.forward(ready)

    def _fill(self, one: _Stage, ready: float) -> None:
        """W's while the stage waits for what is ready at ``ready``."""
        while one.waiting and (gap := ready - one.now) > self.tolerance:
            fits = gap >= one.t_w - self.tolerance
            worst = max(other.idle for other in self.stages)
            if not fits and one.idle + gap <= worst + self.tolerance:
                break
            one.weight()

    def _ready_f(self, stage: int, microbatch: int) -> float:
        if stage == 0:
            return 0.0
        return self.stages[stage - 1].ends_f[microbatch] + self.delays_f[stage - 1]

    def _ready_b(self, stage: int, microbatch: int) -> float:
        """When the gradient is there; on the last stage, when F ends: never, if it has not run."""
        if stage < len(self.stages) - 1:
            return self.stages[stage + 1].ends_b[microbatch] + self.delays_b[stage]
        ends = self.stages[stage].ends_f
        return ends[microbatch] if microbatch < len(ends) else math.inf
