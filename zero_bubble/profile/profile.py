"""A profile: the costs of a job, and which job they are of.

A profile file (version 1) is what commands read with ``--costs``::

    {
      "format": "zero-bubble profile",
      "version": 1,
      "job": {"hidden_size": 4096, "micro_batch_size": 1, ...},
      "placement": [[0], [1]],
      "costs": {"t_f": [[18.5], [18.1]], ...},
      "room": [6.1e10, 6.4e10],
      "iteration_ms": 740.0
    }

``job`` holds what must be equal for the costs to hold. ``room`` is the most memory in bytes that
each stage may give to activations; null is unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from zero_bubble.costs import Costs
from zero_bubble.placement import Placement

__all__ = ["Profile", "listed", "load_profile", "save_profile"]

_FORMAT = "zero-bubble profile"
_VERSION = 1
_REQUIRED = ("job", "placement", "costs")
_TOLD_FIRST = frozenset(
    {
        "hidden_size",
        "num_layers",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "pipeline_model_parallel_size",
        "tensor_model_parallel_size",
        "data_parallel_size",
        "device",
    }
)
_FREE = {"global_batch_size"}
"""Kept for those who read the file: costs do not depend on it."""

type Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured costs. Times in ms, memory in bytes."""

    placement: Placement
    costs: Costs
    job: Mapping[str, Scalar] = field(default_factory=dict)
    """What the costs depend on: sizes of model and batch, parallelism, software, hardware."""
    room: tuple[float | None, ...] = ()
    """The most memory each stage may give to activations; empty or None where unknown."""
    iteration_ms: float = 0.0
    """Of a whole iteration, with all that is not pipeline; 0 if unknown."""

    def differences(self, job: Mapping[str, Scalar]) -> list[str]:
        """What is not as in the profile, a text each, what people set themselves first."""
        names = sorted({*self.job, *job} - _FREE, key=lambda one: (one not in _TOLD_FIRST, one))
        return [
            f"{name} {_shown(self.job.get(name))} in the profile, {_shown(job.get(name))} here"
            for name in names
            if self.job.get(name) != job.get(name)
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON's view."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "job": dict(self.job),
            "placement": [*map(list, self.placement.positions)],
            "costs": self.costs.to_dict(),
            "room": list(self.room),
            "iteration_ms": self.iteration_ms,
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """What `to_dict` wrote; ValueError names the field that is wrong."""
        if not isinstance(data, Mapping) or data.get("format") != _FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ValueError(f"field 'format': expected {_FORMAT!r}, not {found!r}")
        if data.get("version") != _VERSION:
            raise ValueError(f"field 'version': expected {_VERSION}, not {data.get('version')!r}")
        if missing := [name for name in _REQUIRED if name not in data]:
            raise ValueError(f"field {missing[0]!r} is missing")
        if not isinstance(data["job"], Mapping):
            raise ValueError(f"field 'job': expected an object, not {data['job']!r:.80}")
        for name, value in data["job"].items():
            if value is not None and not isinstance(value, str | int | float | bool):
                raise ValueError(
                    f"field 'job': {name}: expected text or a number, not {value!r:.80}"
                )
        try:
            placement = Placement(tuple(map(tuple, data["placement"])))
        except (TypeError, ValueError) as error:
            raise ValueError(f"field 'placement': {error}") from error
        costs = Costs.from_dict(data["costs"])
        costs.require(placement)
        room, iteration = data.get("room", []), data.get("iteration_ms", 0.0)
        if not isinstance(room, list) or len(room) not in (0, placement.num_stages):
            raise ValueError(
                f"field 'room': expected bytes or null for {placement.num_stages} stages, "
                f"not {room!r:.80}"
            )
        if not all(one is None or _is_amount(one) for one in room):
            raise ValueError(f"field 'room': expected bytes or null, not {room!r:.80}")
        if not _is_amount(iteration):
            raise ValueError(f"field 'iteration_ms': expected milliseconds, not {iteration!r}")
        return cls(
            placement=placement,
            costs=costs,
            job=dict(data["job"]),
            room=tuple(room),
            iteration_ms=float(iteration),
        )


def listed(differences: Sequence[str]) -> str:
    """The first four, and how many more there are."""
    more = f"; and {len(differences) - 4} more" if len(differences) > 4 else ""
    return "; ".join(differences[:4]) + more


def save_profile(profile: Profile, path: str | Path) -> None:
    """Write a profile, a line a field; whole or not at all."""
    fields = (f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in profile.to_dict().items())
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")
    unfinished.replace(path)


def load_profile(path: str | Path) -> Profile:
    """The profile in a file; ValueError names file and field, OSError if it can't be read."""
    try:
        return Profile.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except ValueError as error:  # JSON's and Unicode's errors are such
        raise ValueError(f"{path}: {error}") from error


def _is_amount(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )


def _shown(value: Scalar) -> str:
    return "not given" if value is None else str(value)
