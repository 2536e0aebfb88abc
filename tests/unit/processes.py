"""Whether processes that a test has started, or caused, are still there."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_running"]


def is_running(process: int) -> bool:
    """Whether it runs: one that has ended and that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
