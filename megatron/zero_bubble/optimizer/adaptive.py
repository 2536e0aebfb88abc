"""When optimistic steps are undone too often to be worth it."""

from __future__ import annotations

from collections import deque

__all__ = ["Calm"]


class Calm:
    """Whether few of the last steps were clipped or skipped, whichever way they were taken.

    Args:
        window: how many steps count; 0 is always calm.
        threshold: the largest part of them, 0 to 1, that may be clipped or skipped in calm times;
            0 is always calm. Until ``window`` steps have been seen, it is calm.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._seen: deque[bool] = deque(maxlen=window)
        self._window, self._threshold = window, threshold
        self.is_calm = True

    def see(self, disturbed: bool) -> bool:
        """Count a step; returns whether ``is_calm`` has changed."""
        if self._window == 0 or self._threshold == 0:
            return False
        self._seen.append(disturbed)
        before = self.is_calm
        enough = len(self._seen) == self._window
        self.is_calm = not (enough and self.disturbed > self._threshold)
        return before != self.is_calm

    @property
    def disturbed(self) -> float:
        """Which part of the last steps was clipped or skipped."""
        return sum(self._seen) / max(1, len(self._seen))
