"""A line on the terminal that shows how far a long search has come."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

__all__ = ["ProgressBar"]

_SECONDS_BETWEEN = 0.1


class ProgressBar:
    """Redraws one line of stderr while a search runs; silent where stderr is no terminal.

    ::

        search  4.2 s  bubble 5.43%  bound 4.98%  gap 0.5%

    Used as a context manager it removes its line at the end, so that only results stay.
    """

    def __init__(self, label: str = "search", stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty()
        self._begun = time.monotonic()
        self._drawn = -_SECONDS_BETWEEN
        self._width = 0

    def update(self, bubble: float, bound: float | None = None, gap: float | None = None) -> None:
        """Show the best bubble rate yet, the least possible one, and the gap; 0.1 is 10 %.

        Cheap enough to call at every step: it draws at most ten times a second.
        """
        elapsed = time.monotonic() - self._begun
        if not self._shown or elapsed - self._drawn < _SECONDS_BETWEEN:
            return
        self._drawn = elapsed
        line = f"{self._label}  {elapsed:.1f} s  bubble {bubble:.2%}"
        if bound is not None:
            line += f"  bound {bound:.2%}"
        if gap is not None:
            line += f"  gap {gap:.1%}"
        self._draw(line)

    def close(self) -> None:
        """Remove the line."""
        if self._width:
            self._draw("")
            self._stream.write("\r")
            self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _draw(self, line: str) -> None:
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)
