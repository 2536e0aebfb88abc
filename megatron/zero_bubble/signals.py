"""What others have to be told before this process ends is told, whatever signals come.

Ranks have sessions of their own, and a service goes on by itself: nobody else ends them.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

__all__ = ["stopping_once", "undisturbed"]

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Of Ctrl-C, of a scheduler, of a terminal that is closed."""
_inside = False


@contextmanager
def stopping_once() -> Iterator[None]:
    """The first signal that stops raises KeyboardInterrupt; until the block is left others wait
    in vain. Does nothing within another such block, or in another thread than the main one.

    A signal that was ignored from the start, as by nohup, stays ignored.
    """
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.getsignal(one) for one in STOPPING}
    heard = [one for one in STOPPING if before[one] is not signal.SIG_IGN]

    def stop(*_: Any) -> NoReturn:
        for one in heard:
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    _inside = True
    try:
        for one in heard:
            signal.signal(one, stop)
        yield
    finally:
        _inside = False
        for one in heard:
            signal.signal(one, before[one])


@contextmanager
def undisturbed() -> Iterator[None]:
    """No signal that stops is heard in this block; does nothing but in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {one: signal.signal(one, signal.SIG_IGN) for one in STOPPING}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
