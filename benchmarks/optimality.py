"""How far the search is from the best schedule there is, on instances small enough to prove it.

Run ``python benchmarks/optimality.py`` (needs OR-Tools and highspy; 1 to 3 minutes
on 2 cores). Each instance has its own stages, microbatches, times and memory limits, drawn from
the seed shown. CP-SAT starts from the schedule that the search found; HiGHS solves the smaller
instances again. Exits with 1 unless the search is within 1 % of the best bound on every instance
and optimal on 9 out of 10, and both solvers agree.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from dataclasses import dataclass

from common import verdict

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import linear
from zero_bubble.search.auto import auto
from zero_bubble.search.exact import TOLERANCE, solve_cpsat, solve_highs
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

WITHIN = 0.01
OPTIMAL = 0.9
HIGHS_PASSES = 110
"""HiGHS solves the instances with at most so many passes F, B and W."""


@dataclass(frozen=True, slots=True)
class Result:
    found: Solution
    cpsat: Solution
    highs: Solution | None

    @property
    def optimum(self) -> float:
        """Cost of the best schedule that any of them found, in ms."""
        return min(one.cost for one in (self.found, self.cpsat, self.highs) if one is not None)

    @property
    def bound(self) -> float:
        """The best proven bound on the cost, in ms."""
        return max(one.bound for one in (self.cpsat, self.highs) if one is not None)

    @property
    def is_within(self) -> bool:
        return self.found.cost <= self.bound * (1 + WITHIN)

    @property
    def is_optimal(self) -> bool:
        return self.found.cost <= self.bound * (1 + TOLERANCE)

    @property
    def agrees(self) -> bool:
        """Whether no solver found less than the other, or the search, proved to be the least."""
        return self.bound <= self.optimum * (1 + TOLERANCE)


def instance(seed: int) -> Problem:
    """Up to 6 stages and 12 microbatches; times differ between stages by up to a third."""
    draw = random.Random(seed)
    stages = draw.randint(2, 6)
    microbatches = draw.randint(stages, 12)
    placement = linear(stages)

    def times(low: float, high: float, spread: float) -> Table:
        mean = draw.uniform(low, high)
        return tuple((mean * draw.uniform(1 - spread, 1 + spread),) for _ in range(stages))

    spread = draw.choice((0.0, 0.05, 0.15))
    kept = draw.uniform(0.2, 0.9)
    costs = Costs(
        t_f=times(8, 20, spread),
        t_b=times(8, 20, spread),
        t_w=times(4, 20, spread),
        m_b=((1.0,),) * stages,
        m_w=((kept,),) * stages,
        t_comm=draw.uniform(0, 2),
    )
    limit = stages * draw.choice((0.75, 1, 1.25, 1.5, 2))
    limits = [max(1.0, limit * draw.choice((1, 1, 0.9, 1.1))) for _ in range(stages)]
    return Problem.of(placement, costs, microbatches, limits)


def measure(problem: Problem, cpsat_limit: float, highs_limit: float) -> Result:
    found = auto(problem, effort="normal")
    # The bound of the search is not passed on: what is proven here stands on its own.
    cpsat = solve_cpsat(problem, found.schedule, time_limit=cpsat_limit)
    highs = None
    if 3 * problem.num_stages * problem.num_microbatches <= HIGHS_PASSES:
        highs = solve_highs(problem, found.schedule, time_limit=highs_limit)
    return Result(found, cpsat, highs)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the search with proven optima.")
    parser.add_argument("--instances", type=int, default=24, help="how many (default: 24)")
    parser.add_argument("--cpsat-limit", type=float, default=15.0, help="seconds an instance")
    parser.add_argument("--highs-limit", type=float, default=20.0, help="seconds an instance")
    options = parser.parse_args()
    print(
        f"{'seed':>4}{'p':>3}{'m':>4}{'limits (M_B)':>14}{'search':>11}{'optimum':>11}{'bound':>11}"
        f"{'CP-SAT':>11}{'HiGHS':>11}{'seconds':>9}"
    )
    results = []
    for seed in range(options.instances):
        problem = instance(seed)
        began = time.monotonic()
        one = measure(problem, options.cpsat_limit, options.highs_limit)
        results.append(one)
        limits = f"{min(problem.memory_limit):.1f}-{max(problem.memory_limit):.1f}"
        print(
            f"{seed:>4}{problem.num_stages:>3}{problem.num_microbatches:>4}{limits:>14}"
            f"{one.found.cost:>11.4f}{one.optimum:>11.4f}{one.bound:>11.4f}"
            f"{_proof(one.cpsat):>11}{_proof(one.highs):>11}{time.monotonic() - began:>9.1f}",
            flush=True,
        )
    count = len(results)
    within = sum(one.is_within for one in results)
    optimal = sum(one.is_optimal for one in results)
    agree = sum(one.agrees for one in results)
    worst = max(one.found.cost / one.bound - 1 for one in results)
    return verdict(
        within == count and agree == count and optimal >= math.ceil(OPTIMAL * count),
        f"{within} of {count} within {WITHIN:.0%} of the bound (the worst at {worst:.3%}; bar "
        f"{count}), {optimal} optimal (bar {math.ceil(OPTIMAL * count)}), solvers agree on {agree}",
    )


def _proof(one: Solution | None) -> str:
    if one is None:
        return "-"
    return "proven" if one.is_optimal else f"gap {one.gap:.2%}"


if __name__ == "__main__":
    sys.exit(main())
