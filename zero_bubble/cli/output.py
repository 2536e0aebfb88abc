"""Whether a file can be written, asked before the work whose result it is to hold."""

from __future__ import annotations

import os
from pathlib import Path

from zero_bubble.cli.common import UsageError

__all__ = ["require_json", "require_writable"]


def require_writable(flag: str, path: str) -> None:
    """`UsageError` naming flag and path unless the file can be written; touches nothing."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{flag} {path}: this is a directory: name a file in it")
    if not target.parent.is_dir():
        raise UsageError(f"{flag} {path}: there is no directory {target.parent}: create it first")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UsageError(f"{flag} {path}: no permission to write there")


def require_json(flag: str, path: str) -> None:
    """As `require_writable`, and the name must be that of a schedule's file."""
    name = Path(path).name.lower()
    if not name.endswith(".json") or name.endswith(".trace.json"):
        raise UsageError(
            f"{flag} {path}: schedules are saved as FILE.json; zero-bubble export then makes other "
            "files of that one"
        )
    require_writable(flag, path)
