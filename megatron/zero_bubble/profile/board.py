"""Notes that ranks leave for each other, for whoever looks: nobody waits, nothing is broadcast."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

__all__ = ["Board"]


class Board:
    """Texts by name, on the store by which the job's ranks found each other.

    A note is there for all ranks from the moment that `post` returns.

    Args:
        store: shared by all ranks.
        patience: seconds that `wait` waits.
    """

    def __init__(self, store: dist.Store, patience: float = 600.0) -> None:
        self._store = dist.PrefixStore("zero-bubble", store)
        self._patience = timedelta(seconds=patience)

    @classmethod
    def of_job(cls, patience: float = 600.0) -> Board:
        """On the store of torch's default process group."""
        return cls(dist.distributed_c10d._get_default_store(), patience)

    def post(self, name: str, text: str) -> None:
        """Leave a note; one of this name is replaced."""
        self._store.set(name, text)

    def look(self, name: str) -> str | None:
        """The note of this name, if it is there."""
        return str(self._store.get(name).decode()) if self._store.check([name]) else None

    def remove(self, name: str) -> None:
        """Take a note away that nobody needs any more."""
        self._store.delete_key(name)

    def has_all(self, names: list[str]) -> bool:
        """Whether all these notes are there."""
        return bool(self._store.check(names))

    def wait(self, name: str) -> str:
        """The note of this name, once it is there; RuntimeError if it does not come."""
        self._store.wait([name], self._patience)
        return str(self._store.get(name).decode())
