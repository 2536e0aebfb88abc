"""Recomputation within the backward and as a pass of its own (R): bubble, memory, samples/s.

Run ``python benchmarks/recompute.py [--json FILE.json]`` (two to four minutes on 2 cores). For the
paper's four models (Table 5, the middle number of microbatches) it finds the best schedules of one
chunk a stage and of the V under memory limits, without recomputation, with all of the forward
computed again within B, and with that as a pass. Times of F, B, W and messages are the paper's, of
a V's chunk half of its stage's. T_R is T_F: the whole forward again. M_R is the input of each
layer, 2sbh bytes of its sb(34h + 5as) (the paper's Table 1). Samples/s are those that the simulated
cost predicts, for one data-parallel replica. Exits with 1 if a schedule breaks its limit, or a pass
of its own costs more than recomputation within B.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from common import verdict

from zero_bubble.builders import one_f_one_b
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.check import check
from zero_bubble.costs import Costs, Table, paper_profiles
from zero_bubble.placement import linear, v_shape
from zero_bubble.schedule import Schedule
from zero_bubble.search.auto import EFFORTS, auto
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import Timeline, simulate

ROWS = (1, 4, 7, 10)
"""Of Table 5: the middle number of microbatches of each model."""
SCHEDULES = ("1f1b", "zb-1p", "zb-v")
MODES = ("none", "in B", "pass")
LIMITS = (1.0, 0.5)
SWEEP = (0.25, 0.375, 0.5, 0.75, 1.0)
"""In units of p M_B."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to train under one limit."""

    timeline: Timeline | None
    """None if nothing fits."""
    bound: float | None
    """No schedule costs less, in ms; None if that is not known."""
    is_legal: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """A model, and what was found for it."""

    model: str
    stages: int
    microbatches: int
    microbatch_size: int
    one: Costs
    """Of one chunk a stage, with recomputation; M_B of a stage is 1."""
    two: Costs
    """The same stages as two chunks of half their time and memory each; messages as they are."""
    m_b: float
    """M_B of a stage in bytes."""
    found: dict[tuple[str, str, float], Cell] = field(default_factory=dict)
    """By schedule, mode and limit."""

    def cell(self, schedule: str, mode: str, factor: float, effort: str) -> Cell:
        key = schedule, mode, factor
        if key not in self.found:
            self.found[key] = self._cell(*key, effort)
        return self.found[key]

    def _cell(self, schedule: str, mode: str, factor: float, effort: str) -> Cell:
        costs = self.two if schedule == "zb-v" else self.one
        if mode == "none":
            costs = costs.without_recomputation()
        limit = factor * self.stages
        if schedule == "1f1b":
            fixed = one_f_one_b(self.stages, self.microbatches)
            whole = with_recomputation(fixed) if mode == "pass" else fixed
            return _fitting(whole, costs, limit)
        placement = (v_shape if schedule == "zb-v" else linear)(self.stages)
        problem = Problem.of(
            placement, costs, self.microbatches, limit, recompute_in_backward=mode == "in B"
        )
        solution = auto(problem, effort=effort)
        legal = not check(solution.schedule, costs=costs, memory_limit=limit)
        return Cell(simulate(solution.schedule, costs), solution.bound, legal)

    def samples(self, cell: Cell) -> float:
        """Samples a second; 0 if nothing fits."""
        if cell.timeline is None:
            return 0.0
        return 1000 * self.microbatches * self.microbatch_size / cell.timeline.cost


def _fitting(schedule: Schedule, costs: Costs, limit: float) -> Cell:
    fits = not check(schedule, costs=costs, memory_limit=limit)
    return Cell(simulate(schedule, costs) if fits else None, None)


def settings() -> list[Setting]:
    text = files("zero_bubble").joinpath("data", "paper_table5.json").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = json.loads(text)["rows"]
    found = []
    for index in ROWS:
        profile, row = paper_profiles()[index], rows[index]
        seq, hidden, size = row["seq"], row["hidden"], row["microbatch_size"]
        layer = 34 * hidden + 5 * row["heads"] * seq  # bytes a token
        kept = 2 * hidden / layer
        m_r = tuple(tuple(kept * whole for whole in part) for part in profile.costs.m_b)
        one = replace(profile.costs, t_r=profile.costs.t_f, m_r=m_r)
        found.append(
            Setting(
                profile.model,
                profile.stages,
                profile.microbatches,
                size,
                one,
                _halved(one),
                float(profile.layers_per_stage * seq * size * layer),
            )
        )
    return found


def _halved(costs: Costs) -> Costs:
    def halves(table: Table | None) -> Table:
        return tuple((row[0] / 2, row[0] / 2) for row in table or ())

    return replace(
        costs,
        t_f=halves(costs.t_f),
        t_b=halves(costs.t_b),
        t_w=halves(costs.t_w),
        t_r=halves(costs.t_r),
        m_b=halves(costs.m_b),
        m_w=halves(costs.m_w),
        m_r=halves(costs.m_r),
    )


def show(setting: Setting, effort: str) -> None:
    """All schedules and modes at `LIMITS`, against 1F1B without recomputation at 1p."""
    unit = setting.m_b * setting.stages / 2**30
    print(
        f"\n{setting.model}, {setting.stages} stages, {setting.microbatches} microbatches of "
        f"{setting.microbatch_size}; 1p is {unit:.1f} GiB of activations"
    )
    print(
        f"{'limit':>6} {'schedule':<9}{'recompute':<10}{'bubble':>8}{'bound':>8}{'peak':>8}"
        f"{'GiB':>7}{'samples/s':>11}{'to 1F1B':>9}"
    )
    base = setting.samples(setting.cell("1f1b", "none", 1.0, effort))
    for factor in LIMITS:
        for schedule in SCHEDULES:
            for mode in MODES:
                cell = setting.cell(schedule, mode, factor, effort)
                head = f"{factor:>5.3g}p {schedule:<9}{mode:<10}"
                if cell.timeline is None:
                    print(f"{head} does not fit")
                    continue
                peak = max(cell.timeline.peak_memory) / setting.stages
                samples = setting.samples(cell)
                rate = max(0.0, cell.timeline.bubble_rate)
                print(
                    f"{head}{rate:>8.2%}{_bound_rate(cell):>8}{peak:>7.3f}p"
                    f"{peak * unit:>7.1f}{samples:>11.2f}{samples / base:>8.3f}x"
                )
    sys.stdout.flush()


def _bound_rate(cell: Cell) -> str:
    """The least bubble rate that is possible; ``=`` if it is that of the schedule."""
    timeline, bound = cell.timeline, cell.bound
    if timeline is None or bound is None:
        return "-"
    if timeline.cost <= bound * (1 + 1e-9):
        return "="
    return f"{1 - max(timeline.work) / bound:.2%}"


def show_sweep(setting: Setting, effort: str) -> None:
    """No recomputation against R as a pass, over the limits."""
    print(f"\n{setting.model}: samples/s without recomputation / with R as a pass, and their ratio")
    print(f"{'limit':>8}{'zb-1p':>26}{'zb-v':>26}")
    for factor in SWEEP:
        cells = ""
        for schedule in SCHEDULES[1:]:
            none, again = (
                setting.samples(setting.cell(schedule, mode, factor, effort))
                for mode in ("none", "pass")
            )
            cells += f"{none:>9.2f} /{again:>7.2f}{again / none:>7.3f}x"
        print(f"{factor:>7.3g}p{cells}")
    sys.stdout.flush()


def answer(found: Sequence[Setting], effort: str) -> None:
    """What recomputation as a pass is good for, in sentences."""
    print("\nZB-1p (one chunk a stage) at the memory of 1F1B, 1p:")
    for one in found:
        none, again = (one.cell("zb-1p", mode, 1.0, effort) for mode in ("none", "pass"))
        if none.timeline is None or again.timeline is None:
            continue
        ratio = one.samples(again) / one.samples(none)
        print(
            f"  {one.model}: R as a pass leaves a bubble of {again.timeline.bubble_rate:.2%}, "
            f"without recomputation it is {none.timeline.bubble_rate:.2%}; samples/s "
            f"{ratio:.3f} times those without: {'faster' if ratio > 1 else 'slower'}"
        )
    print("A smaller bubble is not more speed: R is T_F more of work for each microbatch.")
    for schedule in SCHEDULES[1:]:
        wins = {
            one.model: [
                factor
                for factor in SWEEP
                if one.samples(one.cell(schedule, "pass", factor, effort))
                > one.samples(one.cell(schedule, "none", factor, effort))
            ]
            for one in found
        }
        parts = (
            f"{model} at {', '.join(f'{factor:g}p' for factor in factors) or 'none of them'}"
            for model, factors in wins.items()
        )
        print(f"{schedule}, R as a pass beats no recomputation: {'; '.join(parts)}")


def records(found: Sequence[Setting]) -> list[dict[str, object]]:
    return [
        {
            "model": one.model,
            "stages": one.stages,
            "microbatches": one.microbatches,
            "microbatch_size": one.microbatch_size,
            "m_b_bytes": one.m_b,
            "schedule": schedule,
            "recompute": mode,
            "limit": factor,
            "cost_ms": cell.timeline and cell.timeline.cost,
            "bound_ms": cell.bound,
            "bubble_rate": cell.timeline and cell.timeline.bubble_rate,
            "peak_memory": cell.timeline and max(cell.timeline.peak_memory) / one.stages,
            "samples_per_s": one.samples(cell),
        }
        for one in found
        for (schedule, mode, factor), cell in one.found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--effort", choices=list(EFFORTS), default="quick")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    began = time.monotonic()
    found = settings()
    for one in found:
        show(one, options.effort)
    for one in found:
        show_sweep(one, options.effort)
    answer(found, options.effort)
    if options.json is not None:
        options.json.write_text(json.dumps(records(found), indent=1) + "\n", encoding="utf-8")
    cells = [cell for one in found for cell in one.found.values()]
    illegal = sum(not cell.is_legal for cell in cells)
    worse = sum(
        one.samples(cell) < one.samples(one.found[schedule, "in B", factor]) * (1 - 1e-9)
        for one in found
        for (schedule, mode, factor), cell in one.found.items()
        if mode == "pass" and (schedule, "in B", factor) in one.found
    )
    optimal = sum(cell.bound is not None and _bound_rate(cell) == "=" for cell in cells)
    print(f"{time.monotonic() - began:.0f} s; {optimal} of {len(cells)} are on their bound (=)")
    return verdict(
        illegal == worse == 0,
        f"{illegal} schedules break their limit, {worse} with R as a pass cost more than with "
        "recomputation within B (bars 0)",
    )


if __name__ == "__main__":
    sys.exit(main())
