"""The bubble rate over the memory limit, for one chunk a stage and for the V.

Run ``python benchmarks/memory_curve.py`` (about a minute on 2 cores). For four of the paper's
profiled configurations it searches at 14 limits from a third of 1F1B's memory, p M_B, to two and a
half times that, and prints what it finds beside the lower bound. Every schedule is checked and
simulated anew. Exits with 1 if one breaks its limit, a curve rises with memory, or a cost is below
its bound. Writes the picture ``docs/memory-curve.svg``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from common import verdict
from memory_curve_picture import Curve, Panel, picture

from zero_bubble.check import check
from zero_bubble.costs import Costs, PaperProfile, paper_profiles, paper_v_profiles
from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.search.appendix_b import flattening
from zero_bubble.search.auto import EFFORTS
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.curve import memory_curve
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution
from zero_bubble.simulate import simulate

FACTORS = (1 / 3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5)
"""Limits in units of p M_B."""
PICTURE = Path(__file__).parents[1] / "docs" / "memory-curve.svg"
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Setting:
    """A profiled configuration, for one chunk a stage and for two."""

    name: str
    microbatches: int
    one: Costs
    """Of a linear placement."""
    two: Costs
    """The same stages as two chunks of half their time and memory each; messages as they are."""

    @property
    def stages(self) -> int:
        return len(self.one.shape)


@dataclass(frozen=True, slots=True)
class Point:
    """What was found at one limit."""

    problem: Problem
    solution: Solution
    bound: float
    """In ms, computed anew."""
    cost: float
    """In ms, simulated anew."""
    is_legal: bool

    @property
    def rate(self) -> float:
        return self.problem.bubble_rate(self.cost)

    @property
    def bound_rate(self) -> float:
        return self.problem.bubble_rate(self.bound)


def settings() -> list[Setting]:
    def named(profile: PaperProfile, source: str, one: Costs, two: Costs) -> Setting:
        name = f"{profile.model}, {profile.stages} stages, {profile.microbatches} microbatches"
        return Setting(f"{name} ({source})", profile.microbatches, one, two)

    found = []
    for row in (0, 3, 6):
        profile = paper_profiles()[row]
        found.append(named(profile, "Table 5", profile.costs, _mapped(profile.costs, _halves)))
    profile = paper_v_profiles()[0]
    found.append(named(profile, "Table 8", _mapped(profile.costs, _whole), profile.costs))
    return found


def _halves(row: Sequence[float]) -> tuple[float, ...]:
    return row[0] / 2, row[0] / 2


def _whole(row: Sequence[float]) -> tuple[float, ...]:
    return (sum(row),)


def _mapped(costs: Costs, change: Callable[[Sequence[float]], tuple[float, ...]]) -> Costs:
    """Other chunks on the same stages: ``change`` is applied to each stage's row of each table."""
    return replace(
        costs,
        t_f=tuple(map(change, costs.t_f)),
        t_b=tuple(map(change, costs.t_b)),
        t_w=tuple(map(change, costs.t_w)),
        m_b=tuple(map(change, costs.m_b)),
        m_w=tuple(map(change, costs.m_w)),
    )


def measure(placement: Placement, costs: Costs, microbatches: int, effort: str) -> list[Point]:
    """The curve of one placement, checked and simulated."""
    limits = [[factor * placement.num_stages * sum(row) for row in costs.m_b] for factor in FACTORS]
    curve = memory_curve(placement, costs, microbatches, limits, effort=effort)
    points = []
    for limit, solution in zip(limits, curve, strict=True):
        problem = Problem.of(placement, costs, microbatches, limit)
        legal = not check(solution.schedule, costs=costs, memory_limit=limit)
        cost = simulate(solution.schedule, costs).cost
        points.append(Point(problem, solution, lower_bound(problem).cost, cost, legal))
    return points


def show(setting: Setting, one: Sequence[Point], two: Sequence[Point], seconds: float) -> None:
    print(f"\n{setting.name}, {seconds:.0f} s")
    print(f"{'limit':>7}{'linear':>10}{'bound':>10}{'V':>10}{'bound':>10}")
    for factor, *points in zip(FACTORS, one, two, strict=True):
        cells = "".join(f"{point.rate:>10.2%}{point.bound_rate:>10.2%}" for point in points)
        print(f"{factor:>6.3f}p{cells}")
    if limits := flattening(linear(setting.stages), setting.one):
        print(
            f"paper, appendix B (linear): almost linear up to {limits.knee / setting.stages:.2f}p, "
            f"last bubbles gone at {limits.last_bubbles / setting.stages:.2f}p"
        )
    sys.stdout.flush()


def panel(setting: Setting, one: Sequence[Point], two: Sequence[Point]) -> Panel:
    limits = flattening(linear(setting.stages), setting.one)
    return Panel(
        title=setting.name,
        curves=tuple(
            Curve(
                shade,
                tuple(zip(FACTORS, [point.rate for point in points], strict=True)),
                tuple(zip(FACTORS, [point.bound_rate for point in points], strict=True)),
            )
            for shade, points in (("linear", one), ("v", two))
        ),
        mark=None if limits is None else limits.knee / setting.stages,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--effort", choices=list(EFFORTS), default="quick")
    parser.add_argument(
        "--output", type=Path, default=PICTURE, help="picture (default: docs/memory-curve.svg)"
    )
    options = parser.parse_args()
    panels, curves = [], []
    for setting in settings():
        began = time.monotonic()
        one, two = (
            measure(arrange(setting.stages), costs, setting.microbatches, options.effort)
            for arrange, costs in ((linear, setting.one), (v_shape, setting.two))
        )
        show(setting, one, two, time.monotonic() - began)
        panels.append(panel(setting, one, two))
        curves += [one, two]
    options.output.write_text(picture(panels), encoding="utf-8")
    points = [point for curve in curves for point in curve]
    illegal = sum(not point.is_legal for point in points)
    below = sum(point.cost < point.bound * (1 - ROUNDING) for point in points)
    rises = sum(
        after.cost > before.cost * (1 + ROUNDING)
        for curve in curves
        for before, after in pairwise(curve)
    )
    met = sum(point.cost <= point.bound * (1 + 1e-6) for point in points)
    return verdict(
        illegal == below == rises == 0,
        f"{len(points)} schedules: {illegal} break their limit, {below} cost less than the bound, "
        f"{rises} cost more than with less memory (bars 0); {met} meet the bound",
    )


if __name__ == "__main__":
    sys.exit(main())
