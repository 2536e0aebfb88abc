"""The ``zero-bubble`` command: build, compare, check, draw and export schedules.

Each command is a module of this package with ``add(commands)``, which registers its parser, and
``run(arguments)``, which returns the exit code. A new one joins by its name in ``_COMMANDS``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from zero_bubble.cli.interrupt import MESSAGE, STOPPED, stop_on_interrupt

if TYPE_CHECKING:
    from zero_bubble.cli.common import Commands, Parser

__all__ = ["main"]

_COMMANDS = (
    "schedule",
    "bound",
    "curve",
    "partition",
    "compare",
    "check",
    "draw",
    "simulate",
    "export",
    "doctor",
)
"""In the order of ``zero-bubble --help``."""


class _Command(Protocol):
    def add(self, commands: Commands, /) -> None: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 for a violation that it found, 2 for a user's error.

    130 for Ctrl-C. Without ``argv`` this is the whole process, which Ctrl-C then ends.
    """
    if argv is None:
        stop_on_interrupt()
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        arguments = _parser().parse_args(argv)
        _require_size(arguments)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(MESSAGE, file=sys.stderr)
        return STOPPED
    except OSError as error:
        where = error.filename or "standard output"
        print(f"zero-bubble: {where}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"zero-bubble: {error}", file=sys.stderr)
        return 2
    except (OverflowError, RecursionError, MemoryError) as error:
        print(f"zero-bubble: a number or file is too large: {error}", file=sys.stderr)
        return 2


def _require_size(arguments: argparse.Namespace) -> None:
    from zero_bubble.cli.common import require_size

    require_size(arguments)


def _parser() -> Parser:
    # Imported late: numpy starts threads, and these have to inherit what `stop_on_interrupt` does.
    from zero_bubble.cli.common import Parser

    parser = Parser(
        prog="zero-bubble",
        description="Pipeline schedules without bubbles.",
        epilog="zero-bubble COMMAND --help shows a command's flags, with examples.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in _COMMANDS:
        cast(_Command, import_module(f"{__name__}.{name}")).add(commands)
    return parser
