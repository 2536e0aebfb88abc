"""The cheapest schedule of a tiny problem, by trying every order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from zero_bubble.schedule import Kind
from zero_bubble.search.problem import Problem

type _Pass = tuple[Kind, int, int]
"""(kind, position, microbatch)"""

_KINDS = (Kind.F, Kind.B, Kind.W)


def cheapest(problem: Problem) -> float:
    """Least cost over all orders of F, B and W that fit the limits, in ms.

    Passes are added in the order of their starts, each as soon as its input is there, which meets
    every order. Only for a dozen passes a stage.
    """
    search = _Search(problem)
    search.extend(-math.inf)
    return search.best


@dataclass
class _Search:
    problem: Problem
    best: float = math.inf
    ends: dict[_Pass, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        stages = self.problem.num_stages
        last, many = self.problem.placement.num_positions, self.problem.num_microbatches
        self.owners = [self.problem.placement.owner(one) for one in range(last)]
        self.todo: list[set[_Pass]] = [set() for _ in range(stages)]
        for kind in _KINDS:
            for position, (stage, _) in enumerate(self.owners):
                self.todo[stage] |= {(kind, position, one) for one in range(many)}
        self.first = [math.nan] * stages
        self.free = [-math.inf] * stages
        self.left = [sum(map(self.duration, passes)) for passes in self.todo]
        self.held = [0.0] * stages

    def duration(self, what: _Pass) -> float:
        return self.problem.costs.duration(what[0], *self.owners[what[1]])

    def ready(self, what: _Pass) -> float:
        """When the input of a pass is there; infinity if nothing has made it yet."""
        kind, position, one = what
        stage = self.owners[position][0]
        if kind is Kind.F:
            # Microbatches are alike: the model's first chunk may take them in ascending order.
            if position == 0:
                return 0.0 if one == 0 or (Kind.F, 0, one - 1) in self.ends else math.inf
            source = (Kind.F, position - 1, one)
        elif kind is Kind.B and position + 1 < len(self.owners):
            source = (Kind.B, position + 1, one)
        else:
            source = (Kind.F if kind is Kind.B else Kind.B, position, one)
        sender = self.owners[source[1]][0]
        return self.ends.get(source, math.inf) + self.problem.costs.comm(sender, stage)

    def gain(self, what: _Pass) -> float:
        """Memory that a pass takes; negative for what it frees."""
        stage, chunk = self.owners[what[1]]
        whole, part = self.problem.costs.m_b[stage][chunk], self.problem.costs.m_w[stage][chunk]
        return {Kind.F: whole, Kind.B: part - whole, Kind.W: -part}[what[0]]

    def extend(self, latest: float) -> None:
        spans = [self.span(stage) for stage in range(len(self.todo))]
        if not any(self.todo):
            self.best = min(self.best, max(spans))
            return
        if any(span + left >= self.best for span, left in zip(spans, self.left, strict=True)):
            return
        for stage, passes in enumerate(self.todo):
            for what in sorted(passes):
                start = max(self.free[stage], self.ready(what))
                if start == math.inf or start < latest:
                    continue
                gain = self.gain(what)
                if gain > 0 and self.held[stage] + gain > self.problem.memory_limit[stage] + 1e-9:
                    continue
                self.attempt(stage, what, start, gain)

    def span(self, stage: int) -> float:
        begun = not math.isnan(self.first[stage])
        return self.free[stage] - self.first[stage] if begun else 0.0

    def attempt(self, stage: int, what: _Pass, start: float, gain: float) -> None:
        before = self.first[stage], self.free[stage], self.held[stage], self.left[stage]
        duration = self.duration(what)
        if math.isnan(self.first[stage]):
            self.first[stage] = start
        self.free[stage] = self.ends[what] = start + duration
        self.held[stage] += gain
        self.left[stage] -= duration
        self.todo[stage].remove(what)
        self.extend(start)
        self.todo[stage].add(what)
        del self.ends[what]
        self.first[stage], self.free[stage], self.held[stage], self.left[stage] = before
