"""Parameters that do not train, as a user's model provider would have them.

The same in a reference run and in one of ours: Megatron has no flag for it.
"""

from __future__ import annotations

import re
from typing import Any

from tests.distributed.gathering import named_parameters

__all__ = ["install"]


def install(pattern: str) -> None:
    """Freeze every parameter with ``pattern`` in its name in the model, before it is wrapped."""
    if not pattern:
        return
    from megatron.core.models.gpt import GPTModel

    frozen, build = re.compile(pattern), GPTModel.__init__

    def build_and_freeze(self: Any, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        for name, parameter in named_parameters(self):
            if frozen.search(name):
                parameter.requires_grad_(False)

    GPTModel.__init__ = build_and_freeze
