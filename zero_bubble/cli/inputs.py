"""The schedules that a command is given: names take from the files beside them what they lack."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from zero_bubble.builders import BUILDERS, build
from zero_bubble.check import check
from zero_bubble.cli.common import UsageError, has_cost_flags
from zero_bubble.cli.sources import Source, recomputed, source_of
from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement
from zero_bubble.simulate import Timeline

__all__ = ["Input", "counted", "inputs", "say", "warn_of_differences", "warn_of_illegal"]

_SIZE_FLAGS = ("stages", "microbatches", "chunks")


@dataclass(frozen=True, slots=True)
class Input:
    """A schedule with its costs, and where it comes from."""

    what: str
    """As the user wrote it: a name or a path."""
    is_file: bool
    source: Source
    notes: tuple[str, ...] = ()
    """What was assumed, or taken from another file: a line each."""
    label: str = ""
    """What it is called beside others: the name, or the file's without its ending."""

    def timeline(self) -> Timeline:
        """ValueError, with the file's name, if it deadlocks."""
        try:
            return self.source.timeline()
        except ValueError as error:
            raise ValueError(f"{self.what}: {error}" if self.is_file else str(error)) from error


def inputs(whats: Sequence[str], arguments: argparse.Namespace) -> list[Input]:
    """The schedules of names and files, in their order.

    Cost flags are for all of them. Without any, a file has its own costs, or else those of the
    first file that has some; names take those, too, and the numbers of stages and microbatches of
    the first file, where no flag gives them. Costs are taken only by the placement they are for.
    ValueError for a name or file that cannot be had, or a flag that is for names alone.
    """
    for what in whats:
        if what == "auto" and not Path(what).exists():
            raise UsageError(
                "auto is a search: save what it finds with zero-bubble schedule auto --stages P "
                "--microbatches M --output FILE.json, and give FILE.json here"
            )
    if not any(what in BUILDERS for what in whats):
        _refuse_sizes(arguments)
    files = [
        Input(what, True, source_of(what, arguments)) for what in whats if what not in BUILDERS
    ]
    donor = None
    if not has_cost_flags(arguments):
        donor = next((one for one in files if not one.source.assumed), None)
    by_path = {one.what: one for one in files}
    return _labelled(
        _with_costs(by_path[what], donor)
        if what in by_path
        else _named(what, arguments, files[0] if files else None, donor)
        for what in whats
    )


def say(found: Sequence[Input]) -> None:
    """Print the notes of all, to stderr."""
    for note in dict.fromkeys(note for one in found for note in one.notes):
        print(f"zero-bubble: note: {note}", file=sys.stderr)


def warn_of_illegal(found: Sequence[Input]) -> None:
    """A line on stderr for each file whose schedule `zero_bubble.check` refuses."""
    for one in found:
        if one.is_file and (violations := check(one.source.schedule)):
            number = counted(len(violations), "violation")
            print(
                f"zero-bubble: warning: {one.what} is illegal, {number}, first: {violations[0]}",
                file=sys.stderr,
            )


def warn_of_differences(found: Sequence[Input]) -> None:
    """A line on stderr that names those that cannot be compared with the first, and why."""
    first, *others = found
    texts = [(one.label, ", ".join(_differences(first.source, one.source))) for one in others]
    if different := [f"{label} ({text})" for label, text in texts if text]:
        print(
            f"zero-bubble: warning: not comparable with {first.label}: {', '.join(different)}",
            file=sys.stderr,
        )


def counted(number: int, noun: str) -> str:
    """``1 stage``, ``2 stages``, ``2 microbatches``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _refuse_sizes(arguments: argparse.Namespace) -> None:
    for flag in _SIZE_FLAGS:
        value = getattr(arguments, flag)
        if value is not None:
            raise UsageError(
                f"--{flag} {value} is for names such as 1f1b: a file has its own number of {flag}"
            )
    if arguments.recompute is not None:
        raise UsageError(
            f"--recompute {arguments.recompute} is for names such as 1f1b: a file has R's or not"
        )


def _with_costs(file: Input, donor: Input | None) -> Input:
    """A file's schedule, with another's costs if it has none of its own."""
    if not file.source.assumed:
        return file
    placement = file.source.schedule.placement
    if donor is None:
        note = f"no costs in {file.what}: {_unit(placement)}"
    elif donor.source.schedule.placement == placement:
        source = replace(file.source, costs=donor.source.costs, assumed=False)
        return replace(
            file, source=source, notes=(f"no costs in {file.what}: those of {donor.what}",)
        )
    else:
        note = (
            f"no costs in {file.what}, and those of {donor.what} are for another placement: "
            f"{_unit(placement)}"
        )
    return replace(file, notes=(note,))


def _named(
    name: str, arguments: argparse.Namespace, first: Input | None, donor: Input | None
) -> Input:
    """A known schedule, with the sizes and costs that no flag gives from the files."""
    if first is None:
        return Input(name, False, source_of(name, arguments))
    model, size, taken = first.source.schedule, argparse.Namespace(**vars(arguments)), []
    if size.stages is None:
        size.stages = model.num_stages
        taken.append(counted(model.num_stages, "stage"))
    if size.microbatches is None:
        size.microbatches = model.num_microbatches
        taken.append(counted(model.num_microbatches, "microbatch"))
    if (
        size.chunks is None
        and BUILDERS[name].takes_chunks
        and model.placement.name == "interleaved"
    ):
        size.chunks = model.placement.num_chunks(0)
        taken.append(f"{counted(size.chunks, 'chunk')} a stage")
    if donor is not None:
        size.recompute = None  # The costs that it needs are the donor's.
    source, notes = source_of(name, size), list[str]()
    if donor is not None:
        if donor.source.schedule.placement == source.schedule.placement:
            costs = donor.source.costs
            schedule = build(name, size.stages, size.microbatches, chunks=size.chunks, costs=costs)
            source = Source(recomputed(schedule, costs, arguments), costs)
            if donor.what == first.what:
                taken.append("costs")
            else:
                notes.append(f"{name}: costs as in {donor.what}")
        else:
            unit = _unit(source.schedule.placement)
            notes.append(f"{name}: the costs of {donor.what} are for another placement: {unit}")
            recomputed(source.schedule, source.costs, arguments)  # says what is missing
    if taken:
        notes.insert(0, f"{name}: {', '.join(taken)} as in {first.what}")
    return Input(name, False, source, tuple(notes))


def _unit(placement: Placement) -> str:
    """What the cost flags' defaults say."""
    several = any(len(held) > 1 for held in placement.positions)
    return f"1 ms a pass{' of a whole stage' if several else ''}"


def _labelled(found: Iterator[Input]) -> list[Input]:
    plain = [(one, Path(one.what).stem if one.is_file else one.what) for one in found]
    times = Counter(label for _, label in {(one.what, label) for one, label in plain})
    return [replace(one, label=label if times[label] == 1 else one.what) for one, label in plain]


def _differences(one: Source, other: Source) -> Iterator[str]:
    ours, theirs = one.schedule, other.schedule
    if ours.num_stages != theirs.num_stages:
        yield counted(theirs.num_stages, "stage")
    if ours.num_microbatches != theirs.num_microbatches:
        yield counted(theirs.num_microbatches, "microbatch")
    if ours.placement == theirs.placement:
        if one.costs != other.costs:
            yield "other costs"
    elif not all(map(_are_close, _totals(one.costs), _totals(other.costs))):
        yield "other costs"


def _totals(costs: Costs) -> tuple[float, ...]:
    """Times of the whole model, and of a message: what another placement leaves as it is."""

    def total(table: Table) -> float:
        return math.fsum(value for row in table for value in row)

    fused = total(costs.t_b) + total(costs.t_w) if costs.t_bw is None else total(costs.t_bw)
    again = 0.0 if costs.t_r is None else total(costs.t_r)
    return total(costs.t_f), total(costs.t_b), total(costs.t_w), fused, again, costs.t_comm


def _are_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)
