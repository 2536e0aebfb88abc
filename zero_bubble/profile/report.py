"""What one rank has measured: times of its passes, memory, messages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from zero_bubble.schedule import Kind

__all__ = ["BatchTimes", "RankReport"]

type BatchTimes = Mapping[tuple[Kind, int], Sequence[float]]
"""Of one batch: ms of each pass, by kind and chunk."""

_OUTLIER = 1.5
"""A pass that took so many times the median is told of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's measurements of one or more batches.

    Times in ms, memory in bytes; tables are indexed by chunk. Medians of batches, each of which
    counts with the median of its passes.
    """

    rank: int
    stage: int
    batches: int
    """How many batches the times are from."""
    times: Mapping[Kind, tuple[float, ...]]
    """Of a pass of each kind that ran, by chunk."""
    outliers: int = 0
    """Passes that took more than 1.5 times the median of their kind and chunk."""
    worst: float = 1.0
    """The worst of them, in units of the median."""
    m_b: tuple[float, ...] = ()
    """What F of a microbatch adds, with R; empty if memory was not measured."""
    m_w: tuple[float, ...] = ()
    """The part of it that B leaves for W."""
    m_r: tuple[float, ...] = ()
    """What F adds where R adds the rest of ``m_b``; empty without R's."""
    room: float | None = None
    """The most that activations may take on this rank's device, as far as is known."""
    edges: tuple[tuple[int, int, float], ...] = ()
    """(source stage, target stage, ms) of messages that this rank measured."""
    iteration_ms: float = 0.0
    """From the start of one batch to that of the next; 0 if unknown."""

    @classmethod
    def of(
        cls,
        rank: int,
        stage: int,
        chunks: int,
        batches: Sequence[BatchTimes],
        **measured: Any,
    ) -> Self:
        """The report on batches of which each has the same passes.

        ``measured`` are further fields. ValueError without a batch.
        """
        if not batches:
            raise ValueError("a report needs the times of at least one batch")
        times: dict[Kind, tuple[float, ...]] = {}
        outliers, worst = 0, 1.0
        for kind in Kind:
            ran = [chunk for chunk in range(chunks) if (kind, chunk) in batches[0]]
            # A chunk without R's beside one with them has nothing to compute again.
            if not ran or (len(ran) < chunks and kind is not Kind.R):
                continue
            medians = []
            for chunk in range(chunks):
                if chunk not in ran:
                    medians.append(0.0)
                    continue
                median = statistics.median(statistics.median(one[kind, chunk]) for one in batches)
                medians.append(median)
                ratios = [time / median for one in batches for time in one[kind, chunk] if median]
                outliers += sum(ratio > _OUTLIER for ratio in ratios)
                worst = max([worst, *ratios])
            times[kind] = tuple(medians)
        return cls(
            rank=rank,
            stage=stage,
            batches=len(batches),
            times=times,
            outliers=outliers,
            worst=worst,
            **measured,
        )

    def to_json(self) -> str:
        """Text for `from_json`."""
        data = {name: getattr(self, name) for name in self.__slots__}
        data["times"] = {str(kind): list(row) for kind, row in self.times.items()}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        data = json.loads(text)
        data["times"] = {Kind(kind): tuple(row) for kind, row in data["times"].items()}
        for name in ("m_b", "m_w", "m_r"):
            data[name] = tuple(data[name])
        data["edges"] = tuple((source, target, ms) for source, target, ms in data["edges"])
        return cls(**data)
