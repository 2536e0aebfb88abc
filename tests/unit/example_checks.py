"""What test_examples.py asks of Megatron, in a process in CPU mode."""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any


def validated(flags: list[str], ranks: int) -> dict[str, Any]:
    """The arguments that Megatron and the adaptor make of pretrain_gpt.py's flags, of simple type.

    Raises:
        SystemExit: a flag that is unknown or wrong; others as Megatron raises them.
    """
    importlib.import_module("megatron.zero_bubble.adaptor")
    from megatron.training import arguments

    before, sys.argv = sys.argv, ["pretrain_gpt.py", *flags]
    try:
        parsed = arguments.parse_args()
    finally:
        sys.argv = before
    args = argparse.Namespace(**vars(parsed) | {"world_size": ranks})
    arguments.validate_args(args)
    return {
        name: value
        for name, value in vars(args).items()
        if isinstance(value, int | float | str | None)
    }
