"""V placement on the profiles of the paper's Table 8: bubble rates by memory limit, beside bounds.

Run ``python benchmarks/table8.py [--effort quick|normal|thorough]``. Exits with 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping

from common import verdict

from zero_bubble.check import check
from zero_bubble.costs import PaperProfile, paper_v_profiles
from zero_bubble.placement import v_shape
from zero_bubble.search.advice import late_stage_limits
from zero_bubble.search.auto import EFFORTS, auto
from zero_bubble.search.problem import Problem
from zero_bubble.search.solution import Solution

LIMITS = ("1p", "1p+2", "p/2+1", "1.25p", "0.375p")
PUBLISHED = {"1p": "zb-v", "p/2+1": "v-half", "0.375p": "v-min"}
LATE = {(16, 48): 0.0545, (24, 72): 0.050}
"""Bars with up to two more chunks on late stages, by (stages, microbatches)."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--effort", choices=EFFORTS, default="normal")
    effort = parser.parse_args().effort
    print(f"bubble rates in %, found / bound / published; effort {effort}, * thorough")
    print(f"{'model':<7}{'p':>3}{'m':>5}" + "".join(f"{name:>24}" for name in LIMITS))
    rates: dict[str, list[tuple[float, float, float | None]]] = {name: [] for name in LIMITS}
    begun = time.perf_counter()
    for profile in paper_v_profiles():
        cells = ""
        for name in LIMITS:
            problem = problem_of(profile, name)
            hard = name == "1p+2" and (profile.stages, profile.microbatches) in LATE
            solution = auto(problem, effort="thorough" if hard else effort)
            require_legal(problem, solution)
            row = (
                problem.bubble_rate(solution.cost),
                problem.bubble_rate(solution.bound),
                profile.bubble_rates.get(PUBLISHED.get(name, "")),
            )
            rates[name].append(row)
            mark = "=" if solution.is_optimal else "*" if hard else " "
            published = "-" if row[2] is None else f"{100 * row[2]:.2f}"
            cells += f"{100 * row[0]:>10.3f}{mark}{100 * row[1]:>7.3f}{published:>6}"
        print(f"{profile.model:<7}{profile.stages:>3}{profile.microbatches:>5}{cells}", flush=True)
    means = {name: sum(found for found, _, _ in rates[name]) / len(rates[name]) for name in LIMITS}
    print("means: " + ", ".join(f"{name} {mean:.3%}" for name, mean in means.items()))
    print("p/2+1: V-Half's memory. 1p+2: up to two chunks more on late stages (see advice.py)")
    print(f"= is on the bound, hence optimal; {time.perf_counter() - begun:.0f} s in all")
    return judge(rates)


def problem_of(profile: PaperProfile, name: str) -> Problem:
    """The profile under a memory limit; M_B of a stage is 1, of a chunk 1/2."""
    stages = profile.stages
    limit = {"p/2+1": stages / 2 + 1, "1.25p": 1.25 * stages, "0.375p": 0.375 * stages}.get(
        name, float(stages)
    )
    problem = Problem.of(v_shape(stages), profile.costs, profile.microbatches, limit)
    if name == "1p+2":
        limits = late_stage_limits(problem, 2)
        return Problem.of(v_shape(stages), profile.costs, profile.microbatches, limits)
    return problem


def require_legal(problem: Problem, solution: Solution) -> None:
    """RuntimeError unless the independent checker agrees."""
    limits = problem.memory_limit
    if found := check(solution.schedule, costs=problem.costs, memory_limit=limits):
        raise RuntimeError(f"the search made an illegal schedule: {found[0]}")


def judge(rates: Mapping[str, list[tuple[float, float, float | None]]]) -> int:
    """Print each bar and whether it is met."""
    profiles = paper_v_profiles()
    missed = 0
    at_1p = rates["1p"]
    missed += verdict(
        all(round(found, 4) <= published for found, _, published in at_1p if published),
        "1p: never above the paper's zb-v",
    )
    small = [row for row, profile in zip(at_1p, profiles, strict=True) if profile.stages == 16]
    missed += verdict(
        all(found - bound < 1e-8 for found, bound, _ in small),
        "1p: on the lower bound in the three rows of 16 stages",
    )
    worst = max(found - bound for found, bound, _ in at_1p)
    missed += verdict(worst <= 0.0012, f"1p: at most 0.12 points above it elsewhere ({worst:.3%})")
    worst = max(found - bound for found, bound, _ in rates["p/2+1"])
    missed += verdict(worst <= 0.001, f"p/2 + 1 chunk: at most 0.1 points above it ({worst:.3%})")
    mean = sum(found for found, _, _ in rates["1.25p"]) / len(profiles)
    missed += verdict(mean <= 0.0127, f"1.25p: a mean of at most 1.27% ({mean:.3%})")
    missed += verdict(
        all(round(found, 4) <= published for found, _, published in rates["0.375p"] if published),
        "0.375p: at or below the published figures",
    )
    for row, profile in zip(rates["1p+2"], profiles, strict=True):
        bar = LATE.get((profile.stages, profile.microbatches))
        if bar is not None:
            size = f"{profile.stages}x{profile.microbatches}"
            text = f"1p and two more chunks on late stages, {size}: at most {bar:.2%}"
            missed += verdict(row[0] <= bar, f"{text} ({row[0]:.3%})")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
