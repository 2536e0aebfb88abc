"""What others have to be told before this process ends is told, whatever signals come.

Ranks have sessions of their own, and a service goes on by itself: nobody else ends them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["held_back", "stopping_once"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Of Ctrl-C, of a scheduler, of a terminal that is closed."""


@dataclass(slots=True)
class _State:
    """Of the main thread, which alone hears of signals."""

    inside: bool = False
    """Whether it is in a `stopping_once`."""
    held: int = 0
    """In how many blocks that nothing may interrupt."""
    noted: bool = False
    """Whether a signal has come there."""
    stopped: bool = False
    """Whether the one interrupt has been raised."""

    def hear(self, *_: Any) -> None:
        """The handler."""
        self.noted = True
        self.interrupt()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt if it is due."""
        if self.noted and not self.held and not self.stopped:
            self.stopped = True
            raise KeyboardInterrupt


_state = _State()


@contextmanager
def stopping_once() -> Iterator[None]:
    """The first signal that stops raises KeyboardInterrupt; until the block is left, others are
    ignored. Does nothing within another such block, or in another thread than the main one.

    A signal that was ignored from the start, as by nohup, stays ignored.
    """
    if _state.inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in STOPPING}
    heard = [one for one in STOPPING if before[one] is not signal.SIG_IGN]
    _state.inside, _state.held, _state.noted, _state.stopped = True, 1, False, False
    try:
        for one in heard:
            signal.signal(one, _state.hear)
        _state.held = 0
        _state.interrupt()
        yield
    finally:
        _state.held += 1  # from here on nobody is interrupted by what comes
        for one in heard:
            signal.signal(one, before[one])
        _state.inside, _state.held = False, 0
    _state.interrupt()


@contextmanager
def held_back() -> Iterator[None]:
    """Within `stopping_once`: a signal that comes in this block interrupts at its end."""
    if not _state.inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.held += 1
    try:
        yield
    finally:
        _state.held -= 1
    _state.interrupt()
