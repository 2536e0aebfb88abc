"""Schedules and costs as JSON files: what one tool writes and Megatron's flags read.

A schedule file (version 1)::

    {
      "format": "zero-bubble schedule",
      "version": 1,
      "name": "zb-h1",
      "placement": [[0], [1]],
      "num_microbatches": 2,
      "passes": [
        "0F0 0F1 0I0 0W0 0I1 0W1",
        "0F0 0I0 0F1 0I1 0W0 0W1"
      ]
    }

``placement`` holds the model positions of each stage's chunks, ``passes`` a string for each stage
in PyTorch's grammar. Three more fields are optional:

- ``costs``: the costs the schedule was made for. A file of costs alone is what ``costs`` holds.
- ``memory_limit``: the most memory each stage may hold, ``[64.0, 64.0]``, in the unit of the costs;
  null is no limit.
- ``times``: when each pass runs, for programs that draw: ``[[[0.0, 1.5], ...], ...]``, start and
  end in ms, in the order of ``passes``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_bubble.costs import Costs
from zero_bubble.placement import Placement
from zero_bubble.schedule import Pass, Schedule
from zero_bubble.simulate import Span

__all__ = [
    "ScheduleFile",
    "load_costs",
    "load_file",
    "load_schedule",
    "load_schedule_and_costs",
    "parse_file",
    "save_costs",
    "save_schedule",
]

_FORMAT = "zero-bubble schedule"
_VERSION = 1
_REQUIRED = {"format", "version", "name", "placement", "num_microbatches", "passes"}
_FIELDS = _REQUIRED | {"costs", "memory_limit", "times"}


@dataclass(frozen=True, slots=True)
class ScheduleFile:
    """What a file holds; None for what it leaves out."""

    schedule: Schedule
    costs: Costs | None = None
    memory_limit: tuple[float, ...] | None = None
    """Most memory each stage may hold, in the unit of the costs; infinity is no limit."""
    spans: tuple[tuple[Span, ...], ...] | None = None
    """When each pass runs, as `Timeline.spans`."""


def save_schedule(
    schedule: Schedule,
    path: str | Path,
    costs: Costs | None = None,
    *,
    memory_limit: Sequence[float] | None = None,
    spans: Sequence[Sequence[Span]] | None = None,
) -> None:
    """Write a schedule, and if given: its costs, the limit of each stage, when each pass runs.

    ``spans`` are `Timeline.spans`. ValueError if one of these is not for this schedule.
    """
    data: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "name": schedule.name,
        "placement": [*map(list, schedule.placement.positions)],
        "num_microbatches": schedule.num_microbatches,
        "passes": [" ".join(map(str, row)) for row in schedule.passes],
    }
    if costs is not None:
        costs.require(schedule.placement)
        data["costs"] = costs.to_dict()
    if memory_limit is not None:
        limits = [None if limit == math.inf else float(limit) for limit in memory_limit]
        _memory_limit(limits, schedule.num_stages)
        data["memory_limit"] = limits
    if spans is not None:
        if [[span.what for span in row] for row in spans] != [*map(list, schedule.passes)]:
            raise ValueError("the times are not those of the passes of this schedule")
        data["times"] = [[[span.start, span.end] for span in row] for row in spans]
    _write(path, data)


def load_schedule(path: str | Path) -> Schedule:
    """The schedule of a file, legal or not: `zero_bubble.check` says.

    ValueError names the file, the field and what is expected there; OSError if it can't be read.
    """
    return load_schedule_and_costs(path)[0]


def load_schedule_and_costs(path: str | Path) -> tuple[Schedule, Costs | None]:
    """As `load_schedule`, with the costs in the file, if any."""
    found = load_file(path)
    return found.schedule, found.costs


def load_file(path: str | Path) -> ScheduleFile:
    """As `load_schedule`, with everything else in the file."""
    data = _read(path)
    try:
        return parse_file(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def parse_file(data: dict[str, Any]) -> ScheduleFile:
    """What a file's JSON holds; ValueError names the field and what is expected there."""
    schedule = _schedule(data)
    costs = limits = spans = None
    if "costs" in data:
        costs = Costs.from_dict(data["costs"])
        costs.require(schedule.placement)
    if "memory_limit" in data:
        limits = _memory_limit(data["memory_limit"], schedule.num_stages)
    if "times" in data:
        spans = _spans(data["times"], schedule)
    return ScheduleFile(schedule, costs, limits, spans)


def save_costs(costs: Costs, path: str | Path) -> None:
    """Write costs alone."""
    _write(path, costs.to_dict())


def load_costs(path: str | Path) -> Costs:
    """The costs in a file of costs, or of a schedule that has them; errors as `load_schedule`."""
    data = _read(path)
    if "format" in data and "costs" not in data:
        raise ValueError(f"{path}: field 'costs' is missing: this schedule was saved without costs")
    try:
        return Costs.from_dict(data.get("costs", data))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _schedule(data: dict[str, Any]) -> Schedule:
    if "format" not in data and "t_f" in data:
        raise ValueError("costs alone, without a schedule: they are what --costs reads")
    if data.get("format") != _FORMAT:
        raise ValueError(f"field 'format': expected {_FORMAT!r}, not {data.get('format')!r}")
    if data.get("version") != _VERSION:
        raise ValueError(f"field 'version': expected {_VERSION}, not {data.get('version')!r}")
    if unknown := sorted(set(data) - _FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    name, microbatches = data.get("name", ""), data.get("num_microbatches")
    if not isinstance(name, str):
        raise ValueError(f"field 'name': expected a string, not {name!r}")
    if not isinstance(microbatches, int) or not _is_whole(microbatches) or microbatches < 1:
        raise ValueError(f"field 'num_microbatches': expected a number >= 1, not {microbatches!r}")
    placement, passes = _placement(data.get("placement")), _passes(data.get("passes"))
    if len(passes) != placement.num_stages:
        raise ValueError(
            f"field 'passes': expected a string for each of {placement.num_stages} stages, not "
            f"{len(passes)}"
        )
    if (longest := max(map(len, passes))) < 2 * microbatches:
        raise ValueError(
            f"field 'num_microbatches': {microbatches} need 2 passes each, but no stage has "
            f"more than {longest} passes"
        )
    return Schedule(placement, microbatches, passes, name=name)


def _placement(value: object) -> Placement:
    expected = "expected the model positions of each stage's chunks, such as [[0, 3], [1, 2]]"
    if not isinstance(value, list) or not all(
        isinstance(row, list) and row and all(map(_is_whole, row)) for row in value
    ):
        raise ValueError(f"field 'placement': {expected}, not {value!r}")
    try:
        return Placement(tuple(map(tuple, value)))
    except ValueError as error:
        raise ValueError(f"field 'placement': {error}") from error


def _passes(value: object) -> tuple[tuple[Pass, ...], ...]:
    if not isinstance(value, list) or not all(isinstance(row, str) for row in value):
        raise ValueError(f"field 'passes': expected a string for each stage, not {value!r:.80}")
    rows = []
    for stage, text in enumerate(value):
        try:
            rows.append(tuple(map(Pass.parse, text.split())))
        except ValueError as error:
            raise ValueError(f"field 'passes', stage {stage}: {error}") from error
    return tuple(rows)


def _memory_limit(value: object, stages: int) -> tuple[float, ...]:
    expected = f"field 'memory_limit': expected a number at least 0, or null, for {stages} stages"
    if not isinstance(value, list) or len(value) != stages:
        raise ValueError(f"{expected}, not {value!r:.80}")
    for limit in value:
        if limit is not None and not (_is_finite(limit) and limit >= 0):
            raise ValueError(f"{expected}, not {limit!r} in {value!r:.80}")
    return tuple(math.inf if limit is None else float(limit) for limit in value)


def _spans(value: object, schedule: Schedule) -> tuple[tuple[Span, ...], ...]:
    expected = "expected [[[start, end], ...], ...], a pair for each of a stage's passes"
    if not isinstance(value, list) or len(value) != schedule.num_stages:
        raise ValueError(f"field 'times': {expected}, not {value!r:.80}")
    rows = []
    for stage, (row, passes) in enumerate(zip(value, schedule.passes, strict=True)):
        if not isinstance(row, list) or len(row) != len(passes):
            raise ValueError(f"field 'times', stage {stage}: {expected}, not {row!r:.80}")
        if wrong := [pair for pair in row if not _is_span(pair)]:
            raise ValueError(f"field 'times', stage {stage}: {expected}, not {wrong[0]!r}")
        rows.append(
            tuple(
                Span(what, float(start), float(end))
                for what, (start, end) in zip(passes, row, strict=True)
            )
        )
    return tuple(rows)


def _is_span(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(map(_is_finite, value))
        and value[0] <= value[1]
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(path: str | Path) -> dict[str, Any]:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, not {type(data).__name__}")
    if "traceEvents" in data:
        raise ValueError(
            f"{path}: a Chrome trace, which is only to look at (https://ui.perfetto.dev): give the "
            "JSON or CSV file that it was made from"
        )
    return data


def _write(path: str | Path, data: dict[str, Any]) -> None:
    """A line a field and a line a stage's passes, so that two files can be compared by eye."""
    lines = []
    for key, value in data.items():
        if key in {"passes", "times"}:
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        else:
            text = json.dumps(value)
        lines.append(f"  {json.dumps(key)}: {text}")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
