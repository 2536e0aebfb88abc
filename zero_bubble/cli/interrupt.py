"""Ctrl-C ends the command at once, with one line."""

from __future__ import annotations

import os
import signal
import threading

__all__ = ["MESSAGE", "STOPPED", "stop_on_interrupt"]

STOPPED = 130
"""Exit code, as a shell's for a command that SIGINT ended."""
MESSAGE = "zero-bubble: stopped"


def stop_on_interrupt() -> None:
    """From now on SIGINT ends the process: `MESSAGE` on stderr, and exit code `STOPPED`.

    For a process that is the command's own, before it starts threads: importing numpy does. The
    signal is blocked here, and so in all threads that start later, and one waits for it. So it is
    heard while compiled code runs in the main thread, where Python could not react, and in solvers
    that bring a handler of their own. Where SIGINT was ignored from the start, as for a shell's
    background job, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    threading.Thread(target=_stop, name="interrupt", daemon=True).start()


def _stop() -> None:
    signal.sigwait({signal.SIGINT})
    # A bar may be on the line. Not `sys.stderr`: the main thread may be in the middle of it.
    clear = "\r\x1b[K" if os.isatty(2) else ""
    os.write(2, f"{clear}{MESSAGE}\n".encode())
    # Any other way out would wait for the threads of the search.
    os._exit(STOPPED)
