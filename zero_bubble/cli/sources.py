"""Where a command's schedules come from: a name with sizes and costs, or a file."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from zero_bubble.builders import BUILDERS, build
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.cli.common import UsageError, costs_of, has_cost_flags, recomputes_in_a_pass
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import ScheduleFile, load_file
from zero_bubble.export.pytorch_csv import load_csv
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import Timeline, simulate

__all__ = ["Source", "build_named", "read", "recomputed", "source_of"]


@dataclass(frozen=True, slots=True)
class Source:
    """A schedule with the costs that a command is to use."""

    schedule: Schedule
    costs: Costs
    assumed: bool = False
    """Whether nobody gave these costs: they are the flags' defaults."""
    memory_limit: tuple[float, ...] | None = None
    """What the file it comes from says, if these are the file's costs."""

    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.costs)


def build_named(name: str, arguments: argparse.Namespace) -> tuple[Schedule, Costs]:
    """The named schedule for ``--stages``, ``--microbatches`` and ``--chunks``, and its costs.

    ValueError for an unknown name, or sizes or costs that it cannot have.
    """
    stages, microbatches, chunks = arguments.stages, arguments.microbatches, arguments.chunks
    builder = BUILDERS.get(name)
    if builder is None or (chunks is not None and not builder.takes_chunks):
        schedule = build(name, stages, microbatches, chunks=chunks)  # says what is wrong
        return schedule, costs_of(arguments, schedule.placement)
    costs = costs_of(arguments, builder.placement(stages, chunks))
    schedule = build(name, stages, microbatches, chunks=chunks, costs=costs)
    return recomputed(schedule, costs, arguments), costs


def recomputed(schedule: Schedule, costs: Costs, arguments: argparse.Namespace) -> Schedule:
    """A known schedule with R's, if ``--recompute`` asks for them."""
    return with_recomputation(schedule) if recomputes_in_a_pass(arguments, costs) else schedule


def read(path: str) -> ScheduleFile:
    """A file: PyTorch's CSV if it ends in ``.csv``, else JSON.

    A schedule without a name is called after its file. ValueError names file and place.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in {"", ".json", ".csv"} and Path(path).is_file():
        raise UsageError(f"{path}: only .json and .csv schedules can be read")
    found = ScheduleFile(load_csv(path)) if path.lower().endswith(".csv") else load_file(path)
    if found.schedule.name:
        return found
    return replace(found, schedule=replace(found.schedule, name=Path(path).stem))


def source_of(what: str, arguments: argparse.Namespace) -> Source:
    """A named schedule, or else a file's.

    Costs on the command line come before those in the file; without either they are the flags'
    defaults.
    """
    if what in BUILDERS:
        if arguments.stages is None or arguments.microbatches is None:
            raise UsageError(f"{what} needs --stages and --microbatches")
        return Source(*build_named(what, arguments))
    if not Path(what).exists():
        raise UsageError(f"{what!r} is neither a file nor one of {', '.join(BUILDERS)}")
    found = read(what)
    if found.costs is not None and not has_cost_flags(arguments):
        return Source(found.schedule, found.costs, memory_limit=found.memory_limit)
    costs = costs_of(arguments, found.schedule.placement)
    return Source(found.schedule, costs, assumed=not has_cost_flags(arguments))
