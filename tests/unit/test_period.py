"""Iterations in a row, against the paper's formulas and against all their constraints at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, any_schedules, random_costs
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.period import period_behind_barrier, period_with_run_ahead
from zero_bubble.placement import linear
from zero_bubble.program import Run
from zero_bubble.run_ahead import run_ahead
from zero_bubble.schedule import Kind, Pass, Schedule

SETTLED, COUNTED = 60, 60  # iterations; a mean over 60 is exact for cycles of 1 to 6

type Node = tuple[int, int, Pass | str]
"""(iteration, stage, what ends there)."""


class LongestPaths:
    """The same iterations as events, each after the latest of those it waits for."""

    def __init__(
        self, schedule: Schedule, costs: Costs, step: float, commit: float, hop: float
    ) -> None:
        self.schedule, self.costs = schedule, costs
        self.step, self.commit, self.hop = step, commit, hop
        self.last = schedule.num_stages - 1
        program = lower(schedule)
        self.ahead: Sequence[int] = [
            sum(isinstance(one, Run) for one in row[:length])
            for row, length in zip(program.instructions, run_ahead(program), strict=True)
        ]
        self.at = {
            (stage, one): index
            for stage, row in enumerate(schedule.passes)
            for index, one in enumerate(row)
        }
        self.times: dict[Node, float] = {}

    def end(self, iteration: int, stage: int) -> float:
        if iteration < 0:
            return 0.0
        return self.time((iteration, stage, self.schedule.passes[stage][-1]))

    def time(self, node: Node) -> float:
        if node not in self.times:
            self.times[node] = self._time(*node)
        return self.times[node]

    def _time(self, iteration: int, stage: int, what: Pass | str) -> float:
        """Totals and results of an iteration are those that the one before has left."""
        if what == "total":
            before = self.time((iteration, stage - 1, "total")) + self.hop if stage else 0.0
            return max(before, self.end(iteration - 1, stage))
        if what == "result":
            if stage == self.last:
                return self.time((iteration, stage, "total"))
            known = self.time((iteration, stage + 1, "result"))
            return known + self.hop
        assert isinstance(what, Pass)
        index = self.at[stage, what]
        earliest = self.begin(iteration, stage, index)
        source = self.source(stage, what)
        if source is not None:
            arrives = self.time((iteration, *source)) + self.costs.comm(source[0], stage)
            earliest = max(earliest, arrives)
        return earliest + self.costs.duration(what.kind, stage, what.chunk)

    def begin(self, iteration: int, stage: int, index: int) -> float:
        """When the stage itself is ready for a pass."""
        row = self.schedule.passes[stage]
        if index == 0:
            before = self.time((iteration, stage, "total")) + self.step
        else:
            before = self.time((iteration, stage, row[index - 1]))
        if index == self.ahead[stage] and stage < self.last:
            before = max(before, self.time((iteration, stage, "result"))) + self.commit
        return before

    def source(self, stage: int, what: Pass) -> tuple[int, Pass] | None:
        place = self.schedule.placement
        if what.kind is Kind.W:
            return None
        forward = what.kind is Kind.F
        other = (place.before if forward else place.after)(stage, what.chunk)
        if other is None:
            return None
        kinds = (Kind.F,) if forward else (Kind.B, Kind.BW)
        made = (Pass(kind, what.microbatch, other[1]) for kind in kinds)
        return next((other[0], one) for one in made if (other[0], one) in self.at)

    def period(self) -> float:
        ends = []
        for iteration in range(SETTLED + COUNTED):
            # In order, so that no recursion goes deep.
            ends.append(max(self.end(iteration, stage) for stage in range(self.last + 1)))
        return (ends[-1] - ends[SETTLED - 1]) / COUNTED


@settings(max_examples=60)
@given(
    schedule=any_schedules(3, 5),
    seed=st.integers(0, 10**6),
    step=st.floats(0, 5),
    commit=st.floats(0, 5),
    hop=st.floats(0, 2),
)
def test_a_period_is_that_of_the_longest_paths(
    schedule: Schedule, seed: int, step: float, commit: float, hop: float
) -> None:
    costs = random_costs(schedule.placement, seed)
    expected = LongestPaths(schedule, costs, step, commit, hop).period()
    found = period_with_run_ahead(schedule, costs, step=step, commit=commit, hop=hop)
    assert found == pytest.approx(expected, rel=1e-6)


@settings(max_examples=40)
@given(
    stages=st.integers(2, 8),
    more=st.integers(1, 9),
    t_w=st.floats(1, 9),
    longer_f=st.floats(1, 1.5),
    longer_b=st.floats(1, 1.5),
)
def test_without_a_barrier_an_iteration_costs_what_the_paper_says(
    stages: int, more: int, t_w: float, longer_f: float, longer_b: float
) -> None:
    """Its table 2, for T_W <= T_F and T_W <= T_B, and enough microbatches."""
    t_f, t_b, microbatches = t_w * longer_f, t_w * longer_b, 2 * stages + more
    costs = Costs.uniform(linear(stages), t_f, t_b, t_w)
    work = microbatches * (t_f + t_b + t_w)
    bubbles = {
        "1f1b": (stages - 1) * (t_f + t_b + t_w),
        "zb-h1": (stages - 1) * (t_f + t_b - t_w),
        "zb-h2": (stages - 1) * (t_f + t_b - 2 * t_w),
    }
    for name, bubble in bubbles.items():
        period = period_with_run_ahead(build(name, stages, microbatches), costs)
        assert period == pytest.approx(work + bubble)


@pytest.mark.parametrize("stages", range(2, 9))
def test_with_equal_times_zb_h2_and_zb_v_have_no_bubble_but_the_barriers(stages: int) -> None:
    microbatches = 2 * stages + 3
    for name, chunks in (("zb-h2", 1), ("zb-v", 2)):
        schedule = build(name, stages, microbatches)
        costs = Costs.uniform(schedule.placement, 1, 1, 1)
        work = 3 * chunks * microbatches
        assert period_with_run_ahead(schedule, costs) == work
        assert period_behind_barrier(schedule, costs) == work + stages - 1


def test_a_step_and_what_validation_takes_by_hand() -> None:
    # Stage 1 ends at 4, stage 0 at 5; its W is the last. Behind a barrier both step then.
    schedule = all_forwards_first(linear(2), 1, split=True)
    costs = Costs.uniform(linear(2), 1, 1, 1)
    assert period_behind_barrier(schedule, costs, step=2.5) == 7.5
    # Stage 0 steps and runs its F until 3.5. That is when stage 1 begins, which stepped meanwhile.
    assert period_with_run_ahead(schedule, costs, step=2.5) == 7.5
    # Stage 1 has the total at 2 and steps until 4.5: an F, two B's and a W remain.
    assert period_with_run_ahead(schedule, costs, step=2.5, hop=2) == 8.5
    # Stage 0 commits from 3.5 to 8.5, long after its gradient has come: a B and a W remain.
    assert period_with_run_ahead(schedule, costs, step=2.5, commit=5, hop=0.5) == 10.5
