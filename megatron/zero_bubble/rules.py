"""A Megatron feature that something of ours cannot run with, as a row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Rule"]


@dataclass(frozen=True, slots=True)
class Rule:
    """A flag of Megatron's, its argument's allowed values, and what to do about any other."""

    flag: str
    attribute: str
    remedy: str
    allowed: tuple[Any, ...] = (None, False)
    same_as: str | None = None
    """Another argument, whose value is allowed too: Megatron's validation fills in some so."""

    def broken(self, args: Any) -> bool:
        allowed = self.allowed
        if self.same_as is not None:
            allowed = (*allowed, getattr(args, self.same_as, None))
        return getattr(args, self.attribute, allowed[0]) not in allowed

    def complaint(self, args: Any, ours: str) -> str:
        """What to tell the user, where ``ours`` is our flag."""
        value = getattr(args, self.attribute)
        shown = "" if value is True else f" {value}"
        return f"{ours} does not work with {self.flag}{shown}: {self.remedy}"
