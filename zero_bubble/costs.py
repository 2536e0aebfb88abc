"""What passes cost: times and memory of every (stage, chunk), and the times of messages.

Times are milliseconds. Memory is in any one unit, bytes for a profiled job, or M_B (what one
microbatch's forward keeps on a stage) where a formula of the paper is meant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Self

from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.schedule import Kind

__all__ = ["Costs", "PaperProfile", "Table", "paper_profiles", "paper_v_profiles"]

type Table = tuple[tuple[float, ...], ...]
"""A number for every ``[stage][chunk]``."""

_LEAST, _MOST = 1e-30, 1e30
"""Sums and products of times and memory stay far from what a number can hold."""
_TABLES = ("t_f", "t_b", "t_w", "m_b", "m_w")
_OPTIONAL = ("t_bw", "t_r", "m_r", "t_reduce")


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Times in ms and memory of each chunk; tables are indexed ``[stage][chunk]``.

    Raises ValueError for tables of unequal shape, a number that is negative or not finite, an
    ``m_w`` or ``m_r`` above its ``m_b``, or one of ``t_r`` and ``m_r`` alone.
    """

    t_f: Table
    """Time of F."""
    t_b: Table
    """Time of B, the gradient of the input."""
    t_w: Table
    """Time of W, the gradient of the weights."""
    m_b: Table
    """Memory one microbatch holds from the start of its F to the end of its B."""
    m_w: Table
    """The part of ``m_b`` that stays until the end of its W."""
    t_r: Table | None = None
    """Time of R, the forward again; None if all that F computes is kept. Not part of ``t_b``."""
    m_r: Table | None = None
    """With ``t_r``: what one microbatch holds from the start of its F until R starts, or B where
    the schedule has no R's."""
    t_reduce: Table | None = None
    """Time to reduce all of the chunk's gradients over its data-parallel group."""
    t_bw: Table | None = None
    """Time of the fused backward; None means ``t_b + t_w``."""
    t_comm: float = 0.0
    """Time of a message between two stages, where ``t_edges`` says nothing else."""
    t_edges: tuple[tuple[int, int, float], ...] = ()
    """(source stage, target stage, time of a message between them)."""

    def __post_init__(self) -> None:
        shape = self.shape
        if not shape or 0 in shape:
            raise ValueError(f"t_f needs a time for every chunk of every stage, not {self.t_f}")
        tables = [(name, getattr(self, name)) for name in _TABLES]
        optional = [(name, getattr(self, name)) for name in _OPTIONAL]
        tables += [(name, table) for name, table in optional if table is not None]
        for name, table in tables:
            if tuple(map(len, table)) != shape:
                raise ValueError(
                    f"{name} has {tuple(map(len, table))} chunks on its stages where t_f has "
                    f"{shape}: all tables need one shape"
                )
            for stage, row in enumerate(table):
                for chunk, value in enumerate(row):
                    _require_amount(f"{name} of stage {stage}, chunk {chunk},", value)
        for stage, rows in enumerate(zip(self.m_b, self.m_w, strict=True)):
            for chunk, (whole, part) in enumerate(zip(*rows, strict=True)):
                if part > whole:
                    raise ValueError(
                        f"m_w of stage {stage}, chunk {chunk}, is {part:.6g}, more than its m_b "
                        f"{whole:.6g}: it is the part of m_b that stays until W"
                    )
        if (self.t_r is None) is not (self.m_r is None):
            raise ValueError("t_r and m_r, of recomputation, are given both or not at all")
        for stage, rows in enumerate(zip(self.m_b, self.m_r or self.m_b, strict=True)):
            for chunk, (whole, part) in enumerate(zip(*rows, strict=True)):
                if part > whole:
                    raise ValueError(
                        f"m_r of stage {stage}, chunk {chunk}, is {part:.6g}, more than its m_b "
                        f"{whole:.6g}: it is what of m_b is kept until it is computed again"
                    )
        _require_amount("t_comm", self.t_comm)
        for source, target, time in self.t_edges:
            if source == target or not {source, target} <= set(range(len(shape))):
                raise ValueError(
                    f"t_edges names the edge {source} -> {target}: expected two different stages "
                    f"out of 0..{len(shape) - 1}"
                )
            _require_amount(f"t_edges {source} -> {target}", time)

    @classmethod
    def uniform(
        cls,
        placement: Placement,
        t_f: float,
        t_b: float,
        t_w: float,
        t_comm: float = 0.0,
        m_b: float = 1.0,
        m_w: float | None = None,
        t_bw: float | None = None,
        t_r: float | None = None,
        m_r: float | None = None,
        t_reduce: float | None = None,
    ) -> Costs:
        """The same costs for every *chunk* (not: every stage) of a placement.

        ``m_w`` defaults to ``m_b``, the most that W can keep: a schedule that fits then fits any
        model. Raises ValueError for a number that is negative or not finite.
        """

        def spread(value: float) -> Table:
            return tuple((float(value),) * len(held) for held in placement.positions)

        return cls(
            t_f=spread(t_f),
            t_b=spread(t_b),
            t_w=spread(t_w),
            m_b=spread(m_b),
            m_w=spread(m_b if m_w is None else m_w),
            t_bw=None if t_bw is None else spread(t_bw),
            t_r=None if t_r is None else spread(t_r),
            m_r=None if m_r is None else spread(m_r),
            t_reduce=None if t_reduce is None else spread(t_reduce),
            t_comm=float(t_comm),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of chunks of each stage."""
        return tuple(map(len, self.t_f))

    def duration(self, kind: Kind, stage: int, chunk: int) -> float:
        """Time of a pass, in ms; of B and BW without recomputation, see `recomputation`."""
        match kind:
            case Kind.F:
                return self.t_f[stage][chunk]
            case Kind.B:
                return self.t_b[stage][chunk]
            case Kind.W:
                return self.t_w[stage][chunk]
            case Kind.BW if self.t_bw is not None:
                return self.t_bw[stage][chunk]
            case Kind.BW:
                return self.t_b[stage][chunk] + self.t_w[stage][chunk]
            case Kind.R:
                if self.t_r is None:
                    raise ValueError(
                        "the schedule recomputes (R), but the costs do not say how long that takes "
                        "(t_r) and what is kept until then (m_r)"
                    )
                return self.t_r[stage][chunk]

    def recomputation(self, stage: int, chunk: int) -> float:
        """Time that recomputing takes, in ms: of R, or within B or BW where there are no R's."""
        return 0.0 if self.t_r is None else self.t_r[stage][chunk]

    def kept(self, stage: int, chunk: int) -> float:
        """Memory one microbatch takes at the start of its F: m_r with recomputation, else m_b."""
        return (self.m_b if self.m_r is None else self.m_r)[stage][chunk]

    def without_recomputation(self) -> Costs:
        """The same of a job that keeps everything."""
        return replace(self, t_r=None, m_r=None)

    def comm(self, source: int, target: int) -> float:
        """Time of a message from one stage to another, in ms; 0 within a stage."""
        if source == target:
            return 0.0
        for one, other, time in self.t_edges:
            if (one, other) == (source, target):
                return time
        return self.t_comm

    def require(self, placement: Placement) -> None:
        """ValueError unless these are the costs of such a placement's chunks."""
        wanted = tuple(map(len, placement.positions))
        if self.shape != wanted:
            raise ValueError(
                f"the costs are for stages of {self.shape} chunks, the schedule's stages have "
                f"{wanted}: profile the placement that the schedule uses"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON's view: tables as lists of lists, fields left at None or empty not written."""
        data: dict[str, Any] = {name: [*map(list, getattr(self, name))] for name in _TABLES}
        for name in _OPTIONAL:
            if (table := getattr(self, name)) is not None:
                data[name] = [*map(list, table)]
        data["t_comm"] = self.t_comm
        if self.t_edges:
            data["t_edges"] = [*map(list, self.t_edges)]
        return data

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """The costs that `to_dict` wrote; ValueError names the field and what it should be."""
        if not isinstance(data, Mapping):
            raise ValueError(f"costs: expected an object with {', '.join(_TABLES)}, not {data!r}")
        known = {*_TABLES, *_OPTIONAL, "t_comm", "t_edges"}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"costs: unknown field {unknown[0]!r}; known: {sorted(known)}")
        if missing := [name for name in _TABLES if name not in data]:
            raise ValueError(
                f"costs: field {missing[0]!r} is missing: expected [[chunk, ...], ...]"
            )
        tables = {name: _table(name, data[name]) for name in _TABLES}
        edges = data.get("t_edges", [])
        if not isinstance(edges, list) or not all(_is_edge(edge) for edge in edges):
            raise ValueError(f"t_edges: expected [[source, target, ms], ...], not {edges!r}")
        comm = data.get("t_comm", 0.0)
        if not _is_number(comm):
            raise ValueError(f"t_comm: expected milliseconds, not {comm!r}")
        optional = {name: data[name] for name in _OPTIONAL if data.get(name) is not None}
        return cls(
            **tables,
            **{name: _table(name, value) for name, value in optional.items()},
            t_comm=float(comm),
            t_edges=tuple((source, target, float(time)) for source, target, time in edges),
        )


@dataclass(frozen=True, slots=True)
class PaperProfile:
    """A row of the paper's Tables 5 and 9, or of Table 8."""

    model: str
    layers: int
    """Transformer layers of the whole model."""
    stages: int
    microbatches: int
    costs: Costs
    """Profiled times in ms; memory in units of a whole stage's M_B."""
    bubble_rates: Mapping[str, float]
    """Published bubble rate of each schedule, by its name; 0.1 is 10 %."""

    @property
    def layers_per_stage(self) -> int:
        """Of a stage in the middle.

        The first and last stage hold one layer fewer, for the embedding and the output layer.
        """
        return (self.layers + 2) // self.stages


def paper_profiles() -> tuple[PaperProfile, ...]:
    """The twelve profiled configurations of the paper, one chunk a stage (Tables 5 and 9).

    M_W / M_B is 32h / (34h + 5as), from Table 1.
    """
    return tuple(_profile(row, linear(row["stages"])) for row in _paper_rows("paper_table5.json"))


def paper_v_profiles() -> tuple[PaperProfile, ...]:
    """The nine profiled configurations of the paper's V, two equal chunks a stage (Table 8).

    Times are those of a chunk. A chunk's memory is 0.5 M_B, so that a limit of p is that of 1F1B;
    M_W / M_B as in `paper_profiles`.
    """
    return tuple(_profile(row, v_shape(row["stages"])) for row in _paper_rows("paper_table8.json"))


def _paper_rows(name: str) -> list[Mapping[str, Any]]:
    text = files("zero_bubble").joinpath("data", name).read_text(encoding="utf-8")
    rows: list[Mapping[str, Any]] = json.loads(text)["rows"]
    return rows


def _profile(row: Mapping[str, Any], placement: Placement) -> PaperProfile:
    hidden, scores = row["hidden"], row["heads"] * row["seq"]
    chunk = 1 / placement.num_chunks(0)
    costs = Costs.uniform(
        placement,
        row["t_f"],
        row["t_b"],
        row["t_w"],
        row["t_comm"],
        m_b=chunk,
        m_w=chunk * 32 * hidden / (34 * hidden + 5 * scores),
    )
    return PaperProfile(
        row["model"], row["layers"], row["stages"], row["microbatches"], costs, row["bubble"]
    )


def _require_amount(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number, at least 0, not {value}")
    if value and not _LEAST <= value <= _MOST:
        raise ValueError(f"{name} must be 0 or from {_LEAST} to {_MOST}, not {value}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_edge(edge: object) -> bool:
    return (
        isinstance(edge, list)
        and len(edge) == 3
        and all(isinstance(stage, int) and not isinstance(stage, bool) for stage in edge[:2])
        and _is_number(edge[2])
    )


def _table(name: str, value: object) -> Table:
    if isinstance(value, list) and value and all(map(_is_number, value)):
        return tuple((float(one),) for one in value)  # one chunk a stage
    if isinstance(value, list) and all(
        isinstance(row, list) and all(map(_is_number, row)) for row in value
    ):
        return tuple(tuple(map(float, row)) for row in value)
    raise ValueError(f"{name}: expected a list of numbers for each stage, not {value!r}")
