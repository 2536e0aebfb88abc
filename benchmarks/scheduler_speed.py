"""How long it takes from a profile to a checked program: search, lowering, and the two checks.

Run ``python benchmarks/scheduler_speed.py``. Efforts normal and quick. Times are those of the
paper's profile with 32 stages and 256 microbatches, the memory limit is what 1F1B needs (1p), the
number of microbatches is 8p. Exits with 1 if a bar is missed or a check finds anything.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from common import verdict

from zero_bubble.check import check
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.lower import lower
from zero_bubble.placement import linear, v_shape
from zero_bubble.search.problem import Problem

PLACEMENTS = {"linear": linear, "v": v_shape}
TOTAL_BARS = {32: 10.0, 64: 60.0}
"""Most seconds in all, by number of stages, at effort normal."""
QUICK_BARS = {32: 2.0}
"""Most seconds of the search, by number of stages, at effort quick."""
STEPS = ("search", "lower", "check", "check_program")


def problem(placement_name: str, stages: int, microbatches: int) -> Problem:
    """The profiled times of a stage, divided among its chunks."""
    (profile,) = (one for one in paper_profiles() if (one.stages, one.microbatches) == (32, 256))
    placement, costs = PLACEMENTS[placement_name](stages), profile.costs
    chunks = placement.num_chunks(0)
    divided = Costs.uniform(
        placement,
        costs.t_f[0][0] / chunks,
        costs.t_b[0][0] / chunks,
        costs.t_w[0][0] / chunks,
        costs.t_comm,
        costs.m_b[0][0] / chunks,
        costs.m_w[0][0] / chunks,
    )
    return Problem.of(placement, divided, microbatches, stages * costs.m_b[0][0])


def measure(wanted: Problem, effort: str) -> tuple[dict[str, float], float, int]:
    """Seconds of each step, the schedule's bubble rate, and the number of violations."""
    from zero_bubble.search.auto import auto

    seconds = {}

    def timed[Result](step: str, run: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        result = run()
        seconds[step] = time.perf_counter() - begin
        return result

    found = timed("search", lambda: auto(wanted, effort=effort))
    program = timed("lower", lambda: lower(found.schedule))
    violations = timed(
        "check",
        lambda: check(found.schedule, costs=wanted.costs, memory_limit=wanted.memory_limit),
    )
    violations += timed("check_program", lambda: check_program(program))
    return seconds, wanted.bubble_rate(found.cost), len(violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[8, 16, 32, 64], metavar="P")
    arguments = parser.parse_args()

    begin = time.perf_counter()
    for name in PLACEMENTS:
        measure(problem(name, 2, 4), "normal")
    print(f"first use, with what is compiled: {time.perf_counter() - begin:.2f} s")

    heading = "".join(f"{step:>15}" for step in (*STEPS, "total", "bubble rate"))
    print(f"{'effort':<8}{'placement':<10}{'stages':>7}{'microbatches':>13}{heading}   (s)")
    code = 0
    results = []
    for effort in ("normal", "quick"):
        for stages in arguments.stages:
            for name in PLACEMENTS:
                seconds, bubble, found = measure(problem(name, stages, 8 * stages), effort)
                total = sum(seconds.values())
                cells = "".join(f"{one:>15.2f}" for one in (*map(seconds.get, STEPS), total))
                size = f"{effort:<8}{name:<10}{stages:>7}{8 * stages:>13}"
                print(f"{size}{cells}{bubble:>15.2%}", flush=True)
                results.append((effort, name, stages, seconds["search"], total))
                if found:
                    code |= verdict(False, f"{name}, {stages} stages: {found} violations")
    for effort, name, stages, search, total in results:
        size = f"{effort}, {name}, {stages} stages, {8 * stages} microbatches"
        if effort == "normal" and stages in TOTAL_BARS:
            bar = TOTAL_BARS[stages]
            code |= verdict(total <= bar, f"{size}: {total:.1f} s in all, at most {bar:.0f} s")
        if effort == "quick" and stages in QUICK_BARS:
            bar = QUICK_BARS[stages]
            code |= verdict(search <= bar, f"{size}: search {search:.2f} s, at most {bar:.0f} s")
    return code


if __name__ == "__main__":
    sys.exit(main())
