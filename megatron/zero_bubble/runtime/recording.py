"""When the passes of one batch ran, on the clock of the device that ran them.

On a GPU the host only launches: there the marks are CUDA events, which cost the stream nothing to
speak of and are read once they are past, so that nothing waits for the device. On a CPU the host's
own clock tells the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch

from zero_bubble.schedule import Pass
from zero_bubble.trace.rank_file import Phase, TracedPass

__all__ = ["Clock", "DeviceClock", "HostClock", "Recording", "clock_for"]

_FAR_MS = 10_000.0
"""From an event up to which another one is told to about a microsecond."""


class Clock(Protocol):
    """Marks moments, and tells later when they were."""

    def mark(self) -> Any:
        """This moment in the order of the device's work; waits for nothing."""

    def is_past(self, mark: Any) -> bool:
        """Whether `ms` can tell without waiting."""

    def ms(self, mark: Any) -> float:
        """When it was, in ms of the host's monotonic clock; waits if it is not past."""


class HostClock:
    """For devices whose work is done when the host goes on."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def is_past(self, mark: int) -> bool:
        return True

    def ms(self, mark: int) -> float:
        return mark / 1e6


class DeviceClock:
    """CUDA events on the current stream, and one whose time on the host's clock is known.

    To be made between batches: it waits for the device, once.
    """

    def __init__(self) -> None:
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_ms = time.perf_counter_ns() / 1e6

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def ms(self, mark: torch.cuda.Event) -> float:
        if not mark.query():
            mark.synchronize()
        elapsed = float(self._zero.elapsed_time(mark))
        if abs(elapsed) > _FAR_MS:
            # CUDA tells it in 32 bits: after an hour to a quarter of a ms. Count from here instead.
            self._zero, self._zero_ms = mark, self._zero_ms + elapsed
            return self._zero_ms
        return self._zero_ms + elapsed


def clock_for(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(slots=True)
class Recording:
    """Notes the passes of one batch on one stage; the interpreter tells of them.

    Shares of W's are noted as whole W's: as many shares that follow one another as one is cut into
    make one, and the W whose shares begin first comes first. So what is read from the notes has the
    passes of a schedule, each as often as it should, whatever order its shares have.
    """

    clock: Clock
    held: Callable[[], int] | None = None
    """Bytes of activations held now, asked after each pass."""
    _passes: list[tuple[Pass, Any, Any, Any, int | None]] = field(default_factory=list)
    _phases: list[tuple[str, Any, Any]] = field(default_factory=list)
    _cut: dict[Pass, None] = field(default_factory=dict)
    """W's of which a share has run, in the order of the first ones."""
    _wholes: int = 0
    """How many of them are noted."""
    _shares: list[Any] = field(default_factory=list)
    """When each share of the next one to be noted began."""
    _begin: Any = None
    _ready: Any = None

    def begin(self) -> None:
        """A pass or a phase begins."""
        self._begin = self._ready = self.clock.mark()

    def ready(self) -> None:
        """The pass that has begun has got its message."""
        self._ready = self.clock.mark()

    def end(self, what: Pass | str, parts: int = 1) -> None:
        """A pass, one of its ``parts`` shares, or a phase of that name, has ended."""
        if parts > 1 and isinstance(what, Pass):
            self._cut.setdefault(what)
            self._shares.append(self._begin)
            if len(self._shares) < parts:
                return
            self._begin = self._ready = self._shares[0]
            self._shares.clear()
            what = next(islice(self._cut, self._wholes, None))
            self._wholes += 1
        now = self.clock.mark()
        if isinstance(what, str):
            self._phases.append((what, self._begin, now))
        else:
            held = None if self.held is None else self.held()
            self._passes.append((what, self._begin, self._ready, now, held))

    @property
    def nbytes(self) -> int:
        """What the notes take of the host's memory, marks included."""
        rows = [*self._passes, *self._phases]
        marks = {id(one): one for row in rows for one in row[1:]}
        kept = [self._passes, self._phases, *rows, *marks.values()]
        return sum(map(sys.getsizeof, kept))

    @property
    def is_past(self) -> bool:
        """Whether all that was noted can be told without waiting."""
        last = [one[-2] for one in self._passes[-1:]] + [one[-1] for one in self._phases[-1:]]
        return all(map(self.clock.is_past, last))

    def passes(self) -> tuple[TracedPass, ...]:
        """The passes, in order; waits for the device unless all `is_past`."""
        ms = self.clock.ms
        return tuple(
            TracedPass(what, ms(begin), ms(ready), ms(end), held)
            for what, begin, ready, end, held in self._passes
        )

    def phases(self) -> tuple[Phase, ...]:
        """The rest of the iteration, in order; waits as `passes` does."""
        ms = self.clock.ms
        return tuple(Phase(what, ms(begin), ms(end)) for what, begin, end in self._phases)
