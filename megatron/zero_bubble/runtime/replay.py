"""Data that can be read again: microbatches that forwards took, whose results are thrown away."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["ReplayableIterator", "ReplayableIterators"]


class ReplayableIterator(Iterator[Any]):
    """Iterates as ``source`` does, and can go back to where `remember` was called."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self._again: deque[Any] = deque()
        self._taken: list[Any] | None = None

    def __next__(self) -> Any:
        item = self._again.popleft() if self._again else next(self.source)
        if self._taken is not None:
            # A forward step may take its batch apart.
            self._taken.append(copy.copy(item))
        return item

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
