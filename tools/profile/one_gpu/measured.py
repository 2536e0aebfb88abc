"""What a job's turns brought: times of passes, memory, and the schedules they lead to."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.merge import load_traces

__all__ = [
    "MeasuredTurn",
    "costs_of",
    "iteration_ms",
    "load_turns",
    "megatrons_bubble",
    "search",
    "split_ratio",
    "traces_of",
]

type Report = dict[str, Any]
"""A line that a rank has written of a turn."""


@dataclass(frozen=True, slots=True)
class MeasuredTurn:
    """All ranks' reports of one turn, and the traces of its iterations if it was one of ours."""

    label: str
    reports: tuple[Report, ...]
    """By rank."""
    iterations: tuple[Measured, ...] = ()

    @property
    def losses(self) -> list[float]:
        """Of the rank that computes them."""
        return next((one["losses"] for one in self.reports if one["losses"]), [])

    @property
    def digests(self) -> dict[str, int]:
        """Of all parameters of the model after the turn."""
        return {name: value for one in self.reports for name, value in one["digests"].items()}


def load_turns(directory: Path, ranks: int) -> list[MeasuredTurn]:
    """The turns that all ranks have written, in order; none if there is no file yet."""
    files = [directory / f"rank{rank}.jsonl" for rank in range(ranks)]
    if not all(file.is_file() for file in files):
        return []
    rows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    turns = []
    for number, reports in enumerate(zip(*rows, strict=False)):
        traces = directory / f"turn{number:03d}"
        iterations = load_traces(traces).measured if traces.is_dir() else ()
        turns.append(MeasuredTurn(reports[0]["label"], tuple(reports), iterations))
    return turns


def traces_of(directory: Path) -> list[tuple[Measured, ...]]:
    """Those of every turn so far that was one of ours."""
    return [load_traces(one).measured for one in sorted(directory.glob("turn*"))]


def iteration_ms(reports: Sequence[Report]) -> float:
    """Mean time of a turn's iterations, first and last left out, on the rank where it is longest.

    With post-validation a stage ends an iteration with the beginning of the next one, but for the
    last of a turn: between these two the distance of ends is what an iteration takes.
    """
    means: list[float] = [
        (one["marks"][-2] - one["marks"][1]) / (len(one["marks"]) - 3) for one in reports
    ]
    return max(means)


def megatrons_bubble(reports: Sequence[Report]) -> float | None:
    """Median over a turn's iterations, the first left out, of (cost - work) / cost.

    Cost and work as in `zero_bubble.trace.measured.Measured`. None if nothing was noted.
    """
    rates = []
    for rows in list(zip(*(one.get("passes", ()) for one in reports), strict=True))[1:]:
        cost = max(row[-1][1] - row[0][0] for row in rows)
        work = max(sum(end - begin for begin, end in row) for row in rows)
        rates.append((cost - work) / cost)
    return statistics.median(rates) if rates else None


def costs_of(
    placement: Placement, turns: Iterable[Sequence[Measured]], fused: Collection[str] = ()
) -> Costs:
    """Median times of all passes of a placement, in ms, and memory of one microbatch, in bytes.

    Memory is that of the first turn whose schedule is not one of ``fused``: there F, B and W each
    change it; if there is none, that of the first turn. A turn's first iteration has it, whose
    times do not count if there are others. Messages take their median on each edge.

    Raises:
        ValueError: there is no turn.
    """
    turns = [one for one in turns if one]
    if not turns:
        raise ValueError("no schedule of this placement has been traced")
    splits = (one for one in turns if one[0].schedule.name not in fused)
    memory = next(splits, turns[0])[0].costs
    times: dict[tuple[Kind, int, int], list[float]] = defaultdict(list)
    edges: dict[tuple[int, int], list[float]] = defaultdict(list)
    for turn in turns:
        for iteration in turn[1:] or turn:
            for stage, row in enumerate(iteration.rows):
                for one in row:
                    times[one.what.kind, stage, one.what.chunk].append(one.end - one.ready)
        for source, target, ms in turn[0].edges:
            edges[source, target].append(ms)
    median = {key: statistics.median(values) for key, values in times.items()}
    for (kind, stage, chunk), ms in list(median.items()):
        if kind is Kind.BW:  # where B and W were not timed, only their sum is known
            median.setdefault((Kind.B, stage, chunk), ms / 2)
            median.setdefault((Kind.W, stage, chunk), ms / 2)
    has_fused = any(kind is Kind.BW for kind, _, _ in median)
    messages = tuple((*edge, statistics.median(edges[edge])) for edge in sorted(edges))
    return Costs(
        t_f=_table(placement, median, Kind.F),
        t_b=_table(placement, median, Kind.B),
        t_w=_table(placement, median, Kind.W),
        t_bw=_table(placement, median, Kind.BW) if has_fused else None,
        m_b=memory.m_b,
        m_w=memory.m_w,
        t_comm=statistics.median(ms for _, _, ms in messages) if messages else 0.0,
        t_edges=messages,
    )


def _table(
    placement: Placement, median: Mapping[tuple[Kind, int, int], float], kind: Kind
) -> Table:
    return tuple(
        tuple(median.get((kind, stage, chunk), 0.0) for chunk in range(len(held)))
        for stage, held in enumerate(placement.positions)
    )


def split_ratio(turns: Iterable[Sequence[Measured]], costs: Costs) -> float | None:
    """(B + W) / fused backward, over all stages; None unless both were timed.

    Args:
        turns: what ``costs`` are made of.
    """
    passes = (one for turn in turns for row in turn[0].schedule.passes for one in row)
    fused = sum(map(sum, costs.t_bw or ()))
    if not fused or all(one.kind is not Kind.W for one in passes):
        return None
    return (sum(map(sum, costs.t_b)) + sum(map(sum, costs.t_w))) / fused


def search(directory: Path, limit: float, fused: Collection[str]) -> Schedule:
    """The best schedule for what a job has measured so far.

    Args:
        directory: of the job, with traces.
        limit: most memory of a stage, in units of p M_B of that stage.
        fused: schedules that tell nothing of B and W apart.
    """
    # Compiled code, which nothing but a search needs.
    from zero_bubble.search.auto import auto
    from zero_bubble.search.problem import Problem

    turns = traces_of(directory)
    sample = turns[0][0]
    placement, costs = sample.placement, costs_of(sample.placement, turns, fused)
    stages = placement.num_stages
    limits = [limit * stages * sum(row) if math.isfinite(limit) else math.inf for row in costs.m_b]
    problem = Problem.of(placement, costs, sample.schedule.num_microbatches, limits)
    return auto(problem).schedule
