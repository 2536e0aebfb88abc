"""The ``zero-bubble`` command: build, compare, check, draw and export schedules.

Each command is a module of this package with ``add(commands)``, which registers its parser, and
``run(arguments)``, which returns the exit code. A new one joins by its name in ``_COMMANDS``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Protocol

from zero_bubble.cli import (
    bound,
    check,
    compare,
    curve,
    draw,
    export,
    partition,
    schedule,
    simulate,
)
from zero_bubble.cli.common import Commands, Parser

__all__ = ["main"]


class _Command(Protocol):
    def add(self, commands: Commands, /) -> None: ...


_COMMANDS: tuple[_Command, ...] = (
    schedule,
    bound,
    curve,
    partition,
    compare,
    check,
    draw,
    simulate,
    export,
)
"""In the order of ``zero-bubble --help``."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 0, 1 if ``check`` found a violation, 2 for a user's error."""
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"zero-bubble: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"zero-bubble: {error}", file=sys.stderr)
        return 2
    except (OverflowError, RecursionError, MemoryError) as error:
        print(f"zero-bubble: a number or file is too large: {error}", file=sys.stderr)
        return 2


def _parser() -> Parser:
    parser = Parser(
        prog="zero-bubble",
        description="Pipeline schedules without bubbles.",
        epilog="zero-bubble COMMAND --help shows a command's flags, with examples.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    return parser
