"""W's at the tail by parameter: how much of the reduction of gradients is left after the last pass.

Run ``python benchmarks/tail_reordering.py`` (half a minute on 2 cores). The paper's 1.5B profile, 8
stages, 32 microbatches; reductions over the data-parallel group take as long as 1 to 8 W's of a
stage, in 8 buckets a chunk. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace

from common import verdict

from zero_bubble.builders import build
from zero_bubble.check_program import check_program
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.lower import lower
from zero_bubble.placement import linear, v_shape
from zero_bubble.profile.rearrange import rearranged
from zero_bubble.reduction import Reduced, exposed_reduction
from zero_bubble.schedule import Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate
from zero_bubble.tail import reorder_tail

STAGES, MICROBATCHES = 8, 32
REDUCTIONS = (1, 2, 4, 8)
"""In W's of a stage."""
BEHIND_BARRIER = ("zb-2p", "zb-v", "auto-v")
IN_SUM = ("zb-h2", "zb-2p", "zb-v", "auto-v")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=8, help="of each chunk (8)")
    buckets = parser.parse_args().buckets
    print(f"1.5B, {STAGES} stages, {MICROBATCHES} microbatches, {buckets} buckets a chunk")
    print("what is exposed, in W's of a stage; W's as they are / reordered by parameter")
    print("barrier: of an iteration whose step waits for all stages; ahead: with post-validation")
    shares: dict[str, tuple[float, float]] = {}
    found = list(schedules())
    for name, schedule, _ in found:
        require_legal(name, schedule, buckets)
    for reduction in REDUCTIONS:
        print(f"\nreduction of {reduction} W's\n{'':<8}{'':<10}stage 0 to {STAGES - 1}"
              f"{'':<29}{'sum':>8}{'barrier':>9}{'ahead':>8}")  # fmt: skip
        for name, schedule, costs in found:
            plain, reordered = (
                exposed(schedule, costs, reduction, buckets, reordered=how) for how in (False, True)
            )
            print(line(name, "as is", plain))
            print(line("", "reordered", reordered))
            shares[name] = (
                sum(reordered.exposed) / sum(plain.exposed),
                reordered.behind_barrier / plain.behind_barrier,
            )
    return judge(shares)


def schedules() -> Iterator[tuple[str, Schedule, Costs]]:
    """Those one would run: by name, and the search's with the memory of 1F1B and twice of it."""
    (costs,) = (
        one.costs
        for one in paper_profiles()
        if (one.model, one.microbatches) == ("1.5B", MICROBATCHES)
    )
    for name in ("zb-h1", "zb-h2"):
        yield name, build(name, STAGES, MICROBATCHES), costs
    for name, limit in (("zb-1p", STAGES), ("zb-2p", 2 * STAGES)):
        problem = Problem.of(linear(STAGES), costs, MICROBATCHES, float(limit))
        yield name, auto(problem, effort="quick").schedule, costs
    placement = v_shape(STAGES)
    halved = rearranged(costs, linear(STAGES), placement)
    yield "zb-v", build("zb-v", STAGES, MICROBATCHES, costs=halved), halved
    problem = Problem.of(placement, halved, MICROBATCHES, float(STAGES))
    yield "auto-v", auto(problem, effort="quick").schedule, halved


def require_legal(name: str, schedule: Schedule, buckets: int) -> None:
    """RuntimeError unless the independent checker agrees."""
    if found := check_program(reorder_tail(lower(schedule), buckets)):
        raise RuntimeError(f"reordering {name} made an illegal program: {found[0]}")


def exposed(
    schedule: Schedule, costs: Costs, reduction: float, buckets: int, *, reordered: bool
) -> Reduced:
    times = tuple(tuple(reduction * one for one in row) for row in costs.t_w)
    timeline = simulate(schedule, replace(costs, t_reduce=times))
    return exposed_reduction(timeline, buckets, reordered=reordered)


def line(name: str, how: str, reduced: Reduced) -> str:
    w = sum(reduced.timeline.costs.t_w[0])
    stages = "".join(f"{one / w:>5.2f}" for one in reduced.exposed)
    return (
        f"{name:<8}{how:<10}{stages}{sum(reduced.exposed) / w:>8.2f}"
        f"{reduced.behind_barrier / w:>9.2f}{reduced.with_run_ahead / w:>8.2f}"
    )


def judge(shares: dict[str, tuple[float, float]]) -> int:
    """Print each bar, for the longest reduction, and whether it is met."""
    print(f"\nof a reduction of {REDUCTIONS[-1]} W's, what reordering leaves exposed")
    missed = 0
    for name in IN_SUM:
        missed += verdict(shares[name][0] <= 0.5, f"{name}, sum of stages: {shares[name][0]:.1%}")
    for name in BEHIND_BARRIER:
        missed += verdict(shares[name][1] <= 0.5, f"{name}, iteration: {shares[name][1]:.1%}")
    for name in ("zb-h1", "zb-1p"):
        print(f"no bar: {name}, sum of stages: {shares[name][0]:.1%}")
    print(
        "no bar: zb-h1, zb-h2 and zb-1p, iteration: stage 0 ends last, and one W follows its last "
        "B.\nNo bucket is complete before that B, so no order of W's hides more of its reduction."
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
