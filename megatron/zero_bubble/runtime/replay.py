"""Data that can be read again: microbatches that forwards took, whose results are thrown away."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron.zero_bubble.runtime.host_random import HostRandomStates

__all__ = ["ReplayableIterator", "ReplayableIterators"]


@dataclass(frozen=True, slots=True)
class _Read:
    """An item, and what the host's random generators were after it had been read.

    Reading it again draws nothing, and whatever draws after it must draw the same as before.
    """

    item: Any
    after: HostRandomStates


class ReplayableIterator(Iterator[Any]):
    """Iterates as ``source`` does, and can go back to where `remember` was called."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._again: deque[_Read] = deque()
        self._taken: list[_Read] | None = None

    def __next__(self) -> Any:
        if self._again:
            read = self._again.popleft()
            read.after.restore()
            item = read.item
        else:
            item = next(self.source)
        if self._taken is not None:
            # A copy, for a forward step may take its batch apart.
            self._taken.append(_Read(copy.copy(item), HostRandomStates.capture()))
        return item

    def __getattr__(self, name: str) -> Any:
        # A forward step may know its iterator by more than `next`.
        return getattr(self.source, name)

    def remember(self) -> None:
        """Keep what is read from now on."""
        self._taken = []

    def forget(self) -> None:
        """What was read stays read."""
        self._taken = None

    def rewind(self) -> None:
        """Go back to where `remember` was called."""
        self._again.extendleft(reversed(self._taken or ()))
        self._taken = None


class ReplayableIterators:
    """One replayable iterator for each of Megatron's, as long as the job runs."""

    def __init__(self) -> None:
        self._known: dict[int, ReplayableIterator] = {}

    def of(self, source: Any) -> Any:
        """The replayable form of an iterator; None stays None."""
        if source is None or isinstance(source, ReplayableIterator):
            return source
        # It holds on to its source, so that no other object can get the same id.
        return self._known.setdefault(id(source), ReplayableIterator(source))
