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
in PyTorch's grammar. ``costs`` is optional: the costs the schedule was made for. A file of costs
alone is what ``costs`` holds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from zero_bubble.costs import Costs
from zero_bubble.placement import Placement
from zero_bubble.schedule import Pass, Schedule

__all__ = ["load_costs", "load_schedule", "load_schedule_and_costs", "save_costs", "save_schedule"]

_FORMAT = "zero-bubble schedule"
_VERSION = 1
_FIELDS = {"format", "version", "name", "placement", "num_microbatches", "passes", "costs"}


def save_schedule(schedule: Schedule, path: str | Path, costs: Costs | None = None) -> None:
    """Write a schedule, and the costs it was made for; ValueError if they do not fit it."""
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
    _write(path, data)


def load_schedule(path: str | Path) -> Schedule:
    """The schedule of a file, legal or not: `zero_bubble.check` says.

    ValueError names the file, the field and what is expected there; OSError if it can't be read.
    """
    return load_schedule_and_costs(path)[0]


def load_schedule_and_costs(path: str | Path) -> tuple[Schedule, Costs | None]:
    """As `load_schedule`, with the costs in the file, if any."""
    data = _read(path)
    try:
        schedule = _schedule(data)
        if "costs" not in data:
            return schedule, None
        costs = Costs.from_dict(data["costs"])
        costs.require(schedule.placement)
        return schedule, costs
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(path: str | Path) -> dict[str, Any]:
    text = Path(path).read_text(encoding="utf-8")
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, not {type(data).__name__}")
    return data


def _write(path: str | Path, data: dict[str, Any]) -> None:
    """A line a field and a line a stage's passes, so that two files can be compared by eye."""
    lines = []
    for key, value in data.items():
        if key == "passes":
            text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
        else:
            text = json.dumps(value)
        lines.append(f"  {json.dumps(key)}: {text}")
    Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
