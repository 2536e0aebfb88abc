"""What ``zero-bubble partition`` prints: stages, times, where memory would help, the flags."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Sequence
from itertools import groupby

from zero_bubble.cli.amount import amount
from zero_bubble.cli.table import table
from zero_bubble.search.advice import Advice, advise
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.partition import Layer, Partition, idle_share
from zero_bubble.search.partition_balance import reference_sizes
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate

__all__ = ["report"]

_LEAST_GAIN = 0.005
_OTHER_LAYOUT_FLAGS = (
    "--num-layers-per-virtual-pipeline-stage",
    "--num-virtual-stages-per-pipeline-rank",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
"""Megatron stops if one of them comes with a layout."""


def report(found: Partition, origin: str, output: str | None) -> str:
    """All of it, as lines.

    ``origin`` says where the memory limit comes from, ``output`` is the file that the schedule was
    saved to.
    """
    parts = [
        [_positions(found), _memory(found, origin)],
        _comparison(found),
        [_against_even(found), _against_bound(found), *_more_memory(found)],
        _flag_lines(found, output),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts)


def _positions(found: Partition) -> str:
    """A table with a row for each part of the model; memory is that of the part's whole stage."""
    placement, costs = found.problem.placement, found.costs
    weights = found.model.weight_memory(placement, found.sizes)
    peaks = simulate(found.solution.schedule, costs).peak_memory
    rows = []
    for position, part in enumerate(found.model.parts(found.sizes)):
        stage, chunk = placement.owner(position)
        times = (costs.t_f[stage][chunk], costs.t_b[stage][chunk], costs.t_w[stage][chunk])
        on_stage = sum(sum(table[stage]) for table in (costs.t_f, costs.t_b, costs.t_w))
        row = [
            f"{position}",
            f"{stage}",
            _named(part),
            *(f"{time:.4g}" for time in times),
            f"{sum(times):.4g}",
            f"{on_stage:.4g}",
            amount(peaks[stage] + weights[stage]),
        ]
        rows.append([*row, amount(weights[stage])] if any(weights) else row)
    header = ["position", "stage", "layers", "T_F", "T_B", "T_W", "work", "work of its stage"]
    header += ["peak memory", "of it weights"] if any(weights) else ["peak memory"]
    return table(header, rows)


def _memory(found: Partition, origin: str) -> str:
    limits = found.memory_limit
    if len(set(limits)) == 1:
        return f"memory limit of each stage: {amount(limits[0])} ({origin})"
    return f"memory limits of the stages: {', '.join(map(amount, limits))} ({origin})"


def _comparison(found: Partition) -> list[str]:
    """Times of an iteration: of this partition, of Megatron's own, and the least of any."""
    costs = [("this partition", found.solution.cost)]
    if found.even is not None:
        costs.append(("even partition", found.even.cost))
    costs.append(("bound for any partition", found.bound))
    stages, many = found.problem.num_stages, found.problem.num_microbatches
    rows = [
        (name, f"{cost:.6g}", f"{idle_share(found.model, stages, many, cost):.2%}")
        for name, cost in costs
    ]
    return [table(("", "ms an iteration", "idle, average of the stages"), rows)]


def _against_even(found: Partition) -> str:
    chunks = found.problem.placement.num_positions
    even_sizes = found.model.even_sizes(chunks)
    if even_sizes is None:
        return (
            f"There is no even partition: {found.model.num_layers} transformer layers do not "
            f"divide into {chunks} chunks."
        )
    if found.even is None:
        return "There is no even partition: it does not fit the memory limit."
    if found.sizes == even_sizes:
        return "This is the even partition."
    saved = 1 - found.solution.cost / found.even.cost
    return f"{max(0.0, saved):.1%} less time than with the even partition."


def _against_bound(found: Partition) -> str:
    limits = set(found.memory_limit)
    if limits == {math.inf}:
        within = ""
    elif len(limits) == 1:
        within = f" within the memory limit of {amount(found.memory_limit[0])}"
    else:
        within = " within these memory limits"
    if found.solution.cost <= found.bound * (1 + 1e-6):
        return f"No partition and schedule costs less{within}."
    return f"At most {found.gap:.1%} less is possible{within}."


def _more_memory(found: Partition) -> list[str]:
    """What more memory could do, by lower bounds: a little for this partition, much for any."""
    little = advise(found.problem)[:1]
    lines = [_little_more(found, one) for one in little]
    room = max(found.problem.memory_limit)
    cost = found.solution.cost
    if not math.isfinite(room) or not cost:
        return lines
    least = _bound_with_more(found, room)
    # Not if a little does as much.
    reached = min((_cost_of(found, one.rate_after) for one in little), default=cost)
    if least < min(cost, reached) * (1 - _LEAST_GAIN):
        lines.append(
            f"more memory: with {amount(room)} more on every stage (twice as much for microbatches)"
            f" the bound is {least:.6g} ms, {1 - least / cost:.1%} less time"
        )
    return lines


def _little_more(found: Partition, advice: Advice) -> str:
    more = [stage for stage, extra in enumerate(advice.extra) if extra > 0]
    where = "every stage" if len(more) == len(advice.extra) else f"{len(more)} of the stages"
    if len(more) == 1:
        where = f"stage {more[0]}"
    before, after = (_cost_of(found, one) for one in (advice.rate_before, advice.rate_after))
    return (
        f"more memory: with {amount(max(advice.extra))} more on {where} the bound of this partition"
        f" falls from {before:.6g} to {after:.6g} ms"
    )


def _cost_of(found: Partition, rate: float) -> float:
    """The cost in ms that a bubble rate, (cost - ideal) / cost, stands for."""
    return found.problem.ideal / (1 - rate)


def _bound_with_more(found: Partition, extra: float) -> float:
    """The least bound, in ms, of this partition and of the one that 1p is measured by."""
    model, placement = found.model, found.problem.placement
    costs = []
    for sizes in {found.sizes, reference_sizes(model, placement)}:
        weights = model.weight_memory(placement, sizes)
        limits = [
            limit + extra - weight
            for limit, weight in zip(found.memory_limit, weights, strict=True)
        ]
        try:
            problem = Problem.of(
                placement, model.costs(placement, sizes), found.problem.num_microbatches, limits
            )
        except ValueError:
            continue  # No room for one microbatch, even so.
        costs.append(lower_bound(problem).cost)
    return min(costs)


def _named(part: Sequence[Layer]) -> str:
    """``embedding + 4``: transformer layers are counted."""
    names = []
    for kind, run in groupby(layer.kind for layer in part):
        names.append(str(sum(1 for _ in run)) if kind == "transformer" else kind)
    return " + ".join(names)


def _flag_lines(found: Partition, output: str | None) -> list[str]:
    placement = found.problem.placement
    if placement.name != "linear":
        return [
            f"layout: {found.layout}",
            f"The layout is for information: Megatron cannot run schedules of {placement.name} "
            "placement yet,\nonly those of linear placement.",
        ]
    flags = [
        f"--pipeline-model-parallel-size {placement.num_stages}",
        f"--pipeline-model-parallel-layout '{found.layout}'",
    ]
    runs = placement.num_stages > 1
    if runs and output is not None:
        flags.append(f"--pipeline-schedule {shlex.quote(output)}")
    lines = [f"{flag} \\" for flag in flags[:-1]] + flags[-1:]
    if runs and output is None:
        lines += ["", "--output FILE.json saves the schedule for Megatron's --pipeline-schedule."]
    others = f"Beside a layout, Megatron takes none of {', '.join(_OTHER_LAYOUT_FLAGS)}."
    return [*lines, "", textwrap.fill(others, 100, break_on_hyphens=False)]
