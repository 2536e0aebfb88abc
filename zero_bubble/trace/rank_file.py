"""The file a rank of a traced job writes: when each of its passes waited, ran and ended.

A file (version 1), ``trace-rank00003.json`` for global rank 3::

    {
      "format": "zero-bubble trace", "version": 1,
      "rank": 3, "stage": 3, "pipeline": [0, 1, 2, 3],
      "placement": [[0], [1], [2], [3]],
      "clock_offset_ms": 0.12,
      "edges": [[2, 3, 0.25], [3, 2, 0.25]],
      "iterations": [
        {"iteration": 10, "schedule": "zb-h1", "num_microbatches": 8,
         "passes": [{"what": "0F0", "begin": 1.5, "ready": 2.0, "end": 7.0, "held": 123456}],
         "phases": [{"what": "finalize", "begin": 50.0, "end": 51.0}]}
      ]
    }

All times are milliseconds. Those of passes and phases are on the rank's own monotonic clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zero_bubble.placement import Placement
from zero_bubble.schedule import Pass

__all__ = [
    "Phase",
    "RankTrace",
    "TracedIteration",
    "TracedPass",
    "load_rank",
    "rank_file",
    "save_rank",
]

_FORMAT = "zero-bubble trace"
_VERSION = 1
_FIELDS = {
    "format",
    "version",
    "rank",
    "stage",
    "pipeline",
    "placement",
    "clock_offset_ms",
    "edges",
    "iterations",
}
_DIGITS = 4
"""Times are kept to 0.1 microseconds."""
_OVERLAP = 0.05
"""ms by which a pass may seem to begin before the last one ends: device clocks are that coarse."""


@dataclass(frozen=True, slots=True)
class TracedPass:
    """A pass with its times in ms: it waits from ``begin`` and computes from ``ready`` to ``end``.

    What it waits for is its message. A pass without one is ready when it begins.
    """

    what: Pass
    begin: float
    ready: float
    end: float
    held: int | None = None
    """Bytes of activations that the stage holds after the pass; None if nobody counted."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Something else a rank does in an iteration, such as its optimizer step; times in ms."""

    what: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class TracedIteration:
    """One rank's iteration: passes in the order they ran, and phases."""

    iteration: int
    schedule: str
    """The schedule's name."""
    num_microbatches: int
    passes: tuple[TracedPass, ...]
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one rank recorded."""

    rank: int
    """Global rank."""
    stage: int
    pipeline: tuple[int, ...]
    """Global ranks of this rank's pipeline, by stage."""
    placement: Placement
    clock_offset_ms: float
    """What to add to this rank's times to have them on the clock of the pipeline's stage 0."""
    edges: tuple[tuple[int, int, float], ...]
    """(source stage, target stage, ms of a message) where this rank measured it."""
    iterations: tuple[TracedIteration, ...]


def rank_file(directory: str | Path, rank: int) -> Path:
    """Where the trace of a global rank lies."""
    return Path(directory) / f"trace-rank{rank:05d}.json"


def save_rank(trace: RankTrace, directory: str | Path) -> Path:
    """Write a rank's trace into a directory, which is made if need be; the file's path.

    The file appears whole or not at all. ValueError for a time that is not finite, OSError if it
    can't be written.
    """
    path = rank_file(directory, trace.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "format": _FORMAT,
        "version": _VERSION,
        "rank": trace.rank,
        "stage": trace.stage,
        "pipeline": trace.pipeline,
        "placement": trace.placement.positions,
        "clock_offset_ms": round(trace.clock_offset_ms, _DIGITS),
        "edges": [[source, target, round(ms, _DIGITS)] for source, target, ms in trace.edges],
        "iterations": [*map(_iteration_data, trace.iterations)],
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def load_rank(path: str | Path) -> RankTrace:
    """The trace in a file.

    ValueError names the file, the field and what is expected there; OSError if it can't be read.
    """
    try:
        return _rank_trace(json.loads(Path(path).read_text(encoding="utf-8")))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8: {error}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _iteration_data(one: TracedIteration) -> dict[str, Any]:
    return {
        "iteration": one.iteration,
        "schedule": one.schedule,
        "num_microbatches": one.num_microbatches,
        "passes": [
            {
                "what": str(each.what),
                "begin": round(each.begin, _DIGITS),
                "ready": round(each.ready, _DIGITS),
                "end": round(each.end, _DIGITS),
                "held": each.held,
            }
            for each in one.passes
        ],
        "phases": [
            {
                "what": each.what,
                "begin": round(each.begin, _DIGITS),
                "end": round(each.end, _DIGITS),
            }
            for each in one.phases
        ],
    }


def _rank_trace(data: object) -> RankTrace:
    if not isinstance(data, dict):
        raise ValueError(f"expected a JSON object, not {type(data).__name__}")
    if data.get("format") != _FORMAT:
        raise ValueError(f"field 'format': expected {_FORMAT!r}, not {data.get('format')!r:.80}")
    if data.get("version") != _VERSION:
        raise ValueError(f"field 'version': expected {_VERSION}, not {data.get('version')!r:.80}")
    if unknown := sorted(set(data) - _FIELDS):
        raise ValueError(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    placement = _placement(data.get("placement"))
    stages = placement.num_stages
    pipeline = _list(data, "pipeline", f"the global ranks of {stages} stages", _is_count)
    if len(set(pipeline)) != stages or len(pipeline) != stages:
        raise ValueError(f"field 'pipeline': expected {stages} different ranks, not {pipeline}")
    rank, stage = _count(data, "rank"), _count(data, "stage")
    if stage >= stages or pipeline[stage] != rank:
        raise ValueError(f"field 'stage': {stage} is not the place of rank {rank} in {pipeline}")
    edges = _list(data, "edges", "[[source stage, target stage, ms], ...]", _is_edge)
    for source, target, _ in edges:
        if source == target or max(source, target) >= stages:
            raise ValueError(
                f"field 'edges': {source} -> {target} is not from one of {stages} stages to another"
            )
    found = []
    for index, each in enumerate(_list(data, "iterations", "a list of objects", _is_object)):
        try:
            found.append(_iteration(each, placement.num_chunks(stage)))
        except ValueError as error:
            raise ValueError(f"field 'iterations', entry {index}: {error}") from error
    numbers = [each.iteration for each in found]
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"field 'iterations': one is there twice in {numbers!s:.80}")
    return RankTrace(
        rank,
        stage,
        tuple(pipeline),
        placement,
        _time(data, "clock_offset_ms"),
        tuple((source, target, float(ms)) for source, target, ms in edges),
        tuple(found),
    )


def _placement(value: object) -> Placement:
    if not isinstance(value, list) or not all(
        isinstance(row, list) and row and all(map(_is_count, row)) for row in value
    ):
        raise ValueError(
            "field 'placement': expected the model positions of each stage's chunks, such as "
            f"[[0, 3], [1, 2]], not {value!r:.80}"
        )
    try:
        return Placement(tuple(map(tuple, value)))
    except ValueError as error:
        raise ValueError(f"field 'placement': {error}") from error


def _iteration(data: dict[str, Any], chunks: int) -> TracedIteration:
    name, microbatches = data.get("schedule"), _count(data, "num_microbatches")
    if not isinstance(name, str):
        raise ValueError(f"field 'schedule': expected a name, not {name!r:.80}")
    passes: list[TracedPass] = []
    for index, each in enumerate(_list(data, "passes", "a list of objects", _is_object)):
        try:
            one = _pass(each)
            if one.what.chunk >= chunks or one.what.microbatch >= microbatches:
                raise ValueError(
                    f"field 'what': {one.what} is not of {chunks} chunks and {microbatches} "
                    "microbatches"
                )
            if passes and one.begin < passes[-1].end - _OVERLAP:
                raise ValueError(
                    f"field 'begin': {one.what} begins at {one.begin} ms, before {passes[-1].what} "
                    f"ends at {passes[-1].end} ms"
                )
        except ValueError as error:
            raise ValueError(f"field 'passes', entry {index}: {error}") from error
        passes.append(one)
    phases = []
    for index, each in enumerate(_list(data, "phases", "a list of objects", _is_object)):
        try:
            phases.append(_phase(each))
        except ValueError as error:
            raise ValueError(f"field 'phases', entry {index}: {error}") from error
    number = _count(data, "iteration")
    return TracedIteration(number, name, microbatches, tuple(passes), tuple(phases))


def _pass(data: dict[str, Any]) -> TracedPass:
    text, held = data.get("what"), data.get("held")
    if not isinstance(text, str):
        raise ValueError(f"field 'what': expected a pass such as '0F3', not {text!r:.80}")
    what = Pass.parse(text)
    begin, ready, end = (_time(data, name) for name in ("begin", "ready", "end"))
    if not begin <= ready <= end:
        raise ValueError(
            f"{what} has begin {begin}, ready {ready} and end {end}: expected ascending times"
        )
    if held is not None and not _is_count(held):
        raise ValueError(f"field 'held': expected bytes or null, not {held!r:.80}")
    return TracedPass(what, begin, ready, end, held)


def _phase(data: dict[str, Any]) -> Phase:
    what, begin, end = data.get("what"), _time(data, "begin"), _time(data, "end")
    if not isinstance(what, str) or not what:
        raise ValueError(f"field 'what': expected the phase's name, not {what!r:.80}")
    if begin > end:
        raise ValueError(f"{what} begins at {begin} and ends at {end}: expected ascending times")
    return Phase(what, begin, end)


def _list(
    data: dict[str, Any], name: str, expected: str, fits: Callable[[object], bool]
) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list) or not all(map(fits, value)):
        raise ValueError(f"field {name!r}: expected {expected}, not {value!r:.80}")
    return value


def _count(data: dict[str, Any], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or not _is_count(value):
        raise ValueError(f"field {name!r}: expected a whole number at least 0, not {value!r:.80}")
    return value


def _time(data: dict[str, Any], name: str) -> float:
    value = data.get(name)
    if not isinstance(value, int | float) or not _is_finite(value):
        raise ValueError(f"field {name!r}: expected milliseconds, not {value!r:.80}")
    return float(value)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_edge(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(map(_is_count, value[:2]))
        and _is_finite(value[2])
        and value[2] >= 0
    )
