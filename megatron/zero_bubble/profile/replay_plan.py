"""What a replay is to run: schedule and times from flags, a file, or the paper's profiles."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from pathlib import Path

from zero_bubble.builders import BUILDERS, build
from zero_bubble.check import check
from zero_bubble.cli.common import UsageError, require_size
from zero_bubble.cli.inputs import counted
from zero_bubble.cli.memory_limit import limit_line, memory_limits
from zero_bubble.cli.sources import read
from zero_bubble.costs import Costs, PaperProfile, Table, paper_profiles, paper_v_profiles
from zero_bubble.export.json_io import ScheduleFile, load_costs
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.schedule import Kind, Schedule

# The search is imported where it is used: errors should not wait for a compiler.

__all__ = [
    "AUTO",
    "DEFAULT_PRESET",
    "DEFAULT_STAGES",
    "LEAST_PAUSE_MS",
    "MOST_STAGES",
    "PAUSE_MS_A_SHARE",
    "Plan",
    "Preset",
    "default_least_pause",
    "plan_of",
    "preset_of",
    "scaled",
]

AUTO, DEFAULT_PRESET, DEFAULT_STAGES = "auto", "1.5B", 8
MOST_STAGES = 32
LEAST_PAUSE_MS, PAUSE_MS_A_SHARE = 5.0, 2.0
"""See `default_least_pause`."""
_OF_FILES = ("stages", "microbatches", "placement", "chunks", "memory_limit")
_OF_AUTO = ("placement", "memory_limit")


@dataclass(frozen=True, slots=True)
class Preset:
    """Times of the paper for a placement."""

    costs: Costs
    microbatches: int
    text: str
    """Where they are from."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to run."""

    schedule: Schedule
    costs: Costs
    """Scaled: the times of pauses and messages."""
    scale: float
    """What the given times were multiplied by."""
    lines: tuple[str, ...]
    """How it came to this, to be printed."""
    bound: float | None = None
    """What no schedule within the search's limits costs less than, in ms; None without a search."""


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the flags of ``tools/profile/replay.py`` ask for.

    ValueError names the flag or file that is wrong, OSError a file that cannot be read.
    """
    require_size(arguments)
    what: str = arguments.schedule
    file = None if what == AUTO or what in BUILDERS else _file_of(arguments)
    placement = _placement_of(arguments) if file is None else file.schedule.placement
    if (stages := placement.num_stages) > MOST_STAGES:
        raise UsageError(
            f"{stages} stages (--stages, or the file's): at most {MOST_STAGES} run on one machine"
        )
    times = _times_of(arguments, placement, file)
    scale = _scale_of(arguments.least_pause, times.costs)
    costs = scaled(times.costs, scale)
    lines = [f"times: {times.text}", f"all times x {scale:.4g}: {_times_line(costs)}"]
    bound = None
    if file is not None:
        schedule = file.schedule
    elif what == AUTO:
        schedule, bound, line = _searched(arguments, placement, costs, times.microbatches)
        lines.append(line)
    else:
        chunks: int | None = arguments.chunks
        schedule = build(what, stages, times.microbatches, chunks=chunks, costs=costs)
    if violations := check(schedule):
        raise ValueError(f"--schedule {what} cannot run: {violations[0]}")
    return Plan(schedule, costs, scale, tuple(lines), bound)


def preset_of(model: str, placement: Placement, microbatches: int | None = None) -> Preset:
    """The times that the paper profiled for a model of this size, for any placement.

    Those of the row nearest in stages, then in microbatches (None: the row with the fewest). A V
    takes a row of Table 8 if the model has one. A stage's times are divided among its chunks; its
    memory is 1. The number of microbatches is that asked for, else the row's if the number of
    stages is, else 3 for each stage. ValueError for an unknown model.
    """
    rows, table = _rows(model, placement)
    stages = placement.num_stages

    def distance(row: PaperProfile) -> tuple[int, int]:
        wanted = microbatches or 0
        return abs(row.stages - stages), abs(row.microbatches - wanted)

    row = min(rows, key=distance)
    text = (
        f"{model}, table {table} of the paper, {row.stages} stages, {row.microbatches} microbatches"
    )
    if row.stages != stages:
        text += f" (it has none for {counted(stages, 'stage')}; this is the nearest)"
    if microbatches is None:
        microbatches = row.microbatches if row.stages == stages else 3 * stages
    costs = row.costs

    def spread(table: Table) -> Table:
        whole = sum(table[0])
        return tuple((whole / len(held),) * len(held) for held in placement.positions)

    return Preset(
        Costs(
            t_f=spread(costs.t_f),
            t_b=spread(costs.t_b),
            t_w=spread(costs.t_w),
            m_b=spread(costs.m_b),
            m_w=spread(costs.m_w),
            t_comm=costs.t_comm,
        ),
        microbatches,
        text,
    )


def scaled(costs: Costs, factor: float) -> Costs:
    """The same with all times, also those of messages, multiplied; memory as it is."""

    def times(table: Table) -> Table:
        return tuple(tuple(factor * one for one in row) for row in table)

    return replace(
        costs,
        t_f=times(costs.t_f),
        t_b=times(costs.t_b),
        t_w=times(costs.t_w),
        t_bw=None if costs.t_bw is None else times(costs.t_bw),
        t_comm=factor * costs.t_comm,
        t_edges=tuple((source, target, factor * ms) for source, target, ms in costs.t_edges),
    )


def default_least_pause(stages: int) -> float:
    """What the shortest pass should last at least, in ms, for the runtime's own time to be little.

    An instruction takes a core for a while, a message two. The more stages share a core, the more
    often one waits for it.
    """
    return LEAST_PAUSE_MS + PAUSE_MS_A_SHARE * stages / (os.cpu_count() or 1)


def _rows(model: str, placement: Placement) -> tuple[list[PaperProfile], int]:
    """The paper's rows of a model, and the number of their table."""
    if placement == v_shape(placement.num_stages):
        rows = [row for row in paper_v_profiles() if row.model == model]
        if rows:
            return rows, 8
    rows = [row for row in paper_profiles() if row.model == model]
    if not rows:
        known = ", ".join(dict.fromkeys(row.model for row in paper_profiles()))
        raise ValueError(f"--preset {model}: the paper has no such model; known: {known}")
    return rows, 5


def _file_of(arguments: argparse.Namespace) -> ScheduleFile:
    what: str = arguments.schedule
    if not Path(what).exists():
        known = ", ".join((AUTO, *BUILDERS))
        raise UsageError(f"--schedule {what}: neither a file nor one of {known}")
    for name in _OF_FILES:
        if getattr(arguments, name) is not None:
            raise UsageError(f"{_given(arguments, name)} is not for a file: {what} has its own")
    return read(what)


def _placement_of(arguments: argparse.Namespace) -> Placement:
    """Of a named schedule, or of a search."""
    what, chunks = arguments.schedule, arguments.chunks
    stages = _stages_of(arguments)
    if stages < 1:
        raise UsageError(f"--stages {stages}: at least 1 stage is needed")
    if what in BUILDERS:
        for name in _OF_AUTO:
            if getattr(arguments, name) is not None:
                raise UsageError(
                    f"{_given(arguments, name)} is for --schedule auto: {what} has its own"
                )
        return BUILDERS[what].placement(stages, chunks)
    kind: str = arguments.placement or "linear"
    if chunks is not None and (kind != "interleaved" or chunks < 1):
        raise UsageError(f"--chunks {chunks}: at least 1, and for --placement interleaved alone")
    if kind == "interleaved":
        return interleaved(stages, 2 if chunks is None else chunks)
    return v_shape(stages) if kind == "v" else linear(stages)


def _stages_of(arguments: argparse.Namespace) -> int:
    if arguments.stages is not None:
        return int(arguments.stages)
    return DEFAULT_STAGES if arguments.costs is None else len(load_costs(arguments.costs).shape)


def _times_of(
    arguments: argparse.Namespace, placement: Placement, file: ScheduleFile | None
) -> Preset:
    """Times before they are scaled, and the number of microbatches."""
    microbatches: int | None = arguments.microbatches
    if file is not None:
        microbatches = file.schedule.num_microbatches
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"--microbatches {microbatches}: at least 1 is needed")
    several = microbatches or 3 * placement.num_stages
    if arguments.costs is not None:
        costs = load_costs(arguments.costs)
        if (known := len(costs.shape)) != (wanted := placement.num_stages):
            place = "--stages is" if file is None else f"the schedule of {arguments.schedule} has"
            raise UsageError(
                f"--costs {arguments.costs}: costs are for {counted(known, 'stage')}, "
                f"{place} {wanted}"
            )
        try:
            costs.require(placement)
        except ValueError as error:
            raise ValueError(f"--costs {arguments.costs}: {error}") from error
        return Preset(costs, several, arguments.costs)
    if file is not None and file.costs is not None and arguments.preset is None:
        return Preset(file.costs, several, arguments.schedule)
    return preset_of(arguments.preset or DEFAULT_PRESET, placement, microbatches)


def _scale_of(least: float | None, costs: Costs) -> float:
    if least is None:
        least = default_least_pause(len(costs.shape))
    times = [one for one in _pauses(costs) if one > 0]
    if not times:
        raise ValueError("all passes take no time: there is nothing to measure; see --costs")
    return max(1.0, least / min(times))


def _pauses(costs: Costs) -> list[float]:
    """The times of all passes, in ms; of the fused backward only if it has its own."""
    tables = [costs.t_f, costs.t_b, costs.t_w, *([] if costs.t_bw is None else [costs.t_bw])]
    return [one for table in tables for row in table for one in row]


def _times_line(costs: Costs) -> str:
    def span(kind: Kind) -> str:
        found = [
            costs.duration(kind, stage, chunk)
            for stage, chunks in enumerate(costs.shape)
            for chunk in range(chunks)
        ]
        least, most = min(found), max(found)
        return f"{kind} {least:.4g}" + (f" to {most:.4g}" if most > least else "")

    edges = [costs.t_comm, *(ms for _, _, ms in costs.t_edges)]
    comm = f"{min(edges):.3g}" + (f" to {max(edges):.3g}" if max(edges) > min(edges) else "")
    return f"{', '.join(map(span, (Kind.F, Kind.B, Kind.W)))}, a message {comm} ms"


def _searched(
    arguments: argparse.Namespace, placement: Placement, costs: Costs, microbatches: int
) -> tuple[Schedule, float, str]:
    """(schedule, bound in ms, the limit as a line)."""
    from zero_bubble.cli.searching import search
    from zero_bubble.search.bounds import lower_bound
    from zero_bubble.search.problem import Problem

    text: str | None = arguments.memory_limit
    if text is None:  # what the paper's own schedules of zero bubbles need
        text = "1p" if placement == v_shape(placement.num_stages) else "2p"
    limits = memory_limits(text, placement, costs)
    try:
        problem = Problem(placement, costs, microbatches, limits)
    except ValueError as error:
        raise ValueError(f"--memory-limit {text}: {error}") from error
    found = search(problem, lower_bound(problem), effort=arguments.effort)
    return found.solution.schedule, found.best_bound, limit_line(text, limits, costs)


def _given(arguments: argparse.Namespace, name: str) -> str:
    """A flag and its value, as they were given."""
    return f"--{name.replace('_', '-')} {getattr(arguments, name)}"
