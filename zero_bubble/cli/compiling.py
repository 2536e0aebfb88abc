"""Says that something is being compiled: each part of the search once, when it is first used."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

__all__ = ["COMPILING", "announce_compiling"]

COMPILING = "zero-bubble: compiling, the first time this is used (up to about half a minute)"


def announce_compiling() -> None:
    """From now on, a line on stderr when something has to be compiled; at most one a call."""
    _listener().said = False


@cache
def _listener() -> Any:
    """The one that is told when machine code is not on disk; numba keeps it for the process."""
    from numba.core import event

    class Listener(event.Listener):
        said = False

        def on_start(self, _: object) -> None:
            if not self.said:
                self.said = True
                # A bar may be on the line.
                clear = "\r\x1b[K" if sys.stderr.isatty() else ""
                print(f"{clear}{COMPILING}", file=sys.stderr, flush=True)

        def on_end(self, _: object) -> None:
            pass

    listener = Listener()
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    return listener
