"""What is known about the order of a block's passes before any search.

A pair of passes has a known order if one needs the other, if microbatch order says so, if the
other order would cost more than the incumbent, or if it would leave too little memory. Each pair
known may decide others, so this goes on until nothing changes. The rest is the solver's.
"""

from __future__ import annotations

import math
import time
from itertools import combinations, pairwise

import numpy as np
import numpy.typing as npt

from zero_bubble.search.exact_block import Block
from zero_bubble.search.problem import Ints

__all__ = ["KnownOrder"]

type Matrix = npt.NDArray[np.bool_]

_FAR = 1 << 45
"""Later than any pass ends, in ticks."""


class KnownOrder:
    """Known pairs and the times they imply, for all orders that cost no more than the incumbent."""

    before: Matrix
    """``before[x, y]``: x ends before y starts."""
    earliest: Ints
    """Earliest start of each pass."""
    latest: Ints
    """Latest start of each pass."""

    def __init__(self, block: Block, deadline: float = math.inf) -> None:
        """Stops looking for more pairs when `time.monotonic` passes the deadline."""
        self.block = block
        self.edges = [(one, other, lag) for one, other, lag in block.edges]
        self.edges += [(*pair, 0) for chain in block.chains for pair in pairwise(chain)]
        for stage, (first, source, lag) in block.entry.items():
            self.edges.append((source, first, lag))
            self.edges += [(first, other, 0) for other in block.rows[stage] if other != first]
        self.members = [np.array(row, dtype=np.int64) for row in block.rows]
        # The incumbent keeps every known order, and no pass takes no time: its starts sort them.
        self.sorted = np.argsort(block.start, kind="stable").tolist()
        while True:
            self._close()
            self._bound_times()
            found = [*self._by_time(), *self._by_memory()]
            if not found or time.monotonic() > deadline:
                break
            self.edges += [(int(one), int(other), 0) for one, other in found]

    @property
    def bound(self) -> int:
        """What every order costs at least, in ticks; never above the incumbent's cost."""
        block, bound = self.block, self.block.floor
        for stage, members in enumerate(self.members):
            if len(members):
                ends = _sequence(self.earliest[members], block.duration[members])
                start = -int(self.latest[block.entry[stage][0]]) if stage in block.entry else 0
                bound = max(bound, ends + int(block.tail[members].min()) + start)
        through = self.earliest + block.duration + block.tail
        own_entry = np.isin(block.stage, list(block.entry))
        return min(block.target, max(bound, int(through[~own_entry].max(initial=0))))

    def undecided(self) -> list[tuple[int, int]]:
        """Pairs of passes of one stage whose order is open."""
        return [
            (one, other)
            for row in self.block.rows
            for one, other in combinations(row, 2)
            if not self.before[one, other] and not self.before[other, one]
        ]

    def direct(self) -> list[tuple[int, int]]:
        """Known pairs of one stage that do not follow from two others."""
        found = []
        for members in self.members:
            known = self.before[np.ix_(members, members)]
            implied = (known.astype(np.int32) @ known.astype(np.int32)) > 0
            found += [(int(members[x]), int(members[y])) for x, y in np.argwhere(known & ~implied)]
        return found

    def _close(self) -> None:
        """All pairs that follow from the edges."""
        count = len(self.sorted)
        self.before = np.zeros((count, count), dtype=np.bool_)
        later: list[list[int]] = [[] for _ in range(count)]
        for one, other, _ in self.edges:
            later[one].append(other)
        for one in reversed(self.sorted):
            row = self.before[one]
            for other in later[one]:
                if not row[other]:
                    row |= self.before[other]
                    row[other] = True
        self.edges = [edge for edge in dict.fromkeys(self.edges) if self._is_direct(edge, later)]

    def _is_direct(self, edge: tuple[int, int, int], later: list[list[int]]) -> bool:
        """Whether an edge says more than others: messages do, and what no other pass is between."""
        one, other, lag = edge
        return lag > 0 or not any(self.before[next_, other] for next_ in later[one])

    def _bound_times(self) -> None:
        """Earliest and latest starts, each stage being able to run one pass at a time."""
        block = self.block
        count = len(self.sorted)
        self.earliest, self.latest = block.release.copy(), np.full(count, _FAR, dtype=np.int64)
        into: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        out: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for one, other, lag in self.edges:
            into[other].append((one, lag))
            out[one].append((other, lag))
        for one in self.sorted:
            start = int(self.earliest[one])
            for other, lag in into[one]:
                start = max(start, int(self.earliest[other] + block.duration[other]) + lag)
            members = self.members[block.stage[one]]
            needed = members[self.before[members, one]]
            if len(needed):
                ends = _sequence(self.earliest[needed], block.duration[needed])
                start = max(start, ends)
            self.earliest[one] = start
        own = [block.target - int(tail) for tail in block.tail]
        for stage in block.entry:
            for one in block.rows[stage]:
                own[one] = _FAR
        self._latest(own, out)
        if block.entry:
            for stage, (first, _, _) in block.entry.items():
                for one in block.rows[stage]:
                    own[one] = block.target + int(self.latest[first])
            self._latest(own, out)

    def _latest(self, own: list[int], out: list[list[tuple[int, int]]]) -> None:
        block = self.block
        for one in reversed(self.sorted):
            end = own[one]
            for other, lag in out[one]:
                end = min(end, int(self.latest[other]) - lag)
            members = self.members[block.stage[one]]
            needing = members[self.before[one, members]]
            if len(needing):
                ends = self.latest[needing] + block.duration[needing]
                end = min(end, -_sequence(-ends, block.duration[needing]))
            self.latest[one] = end - block.duration[one]

    def _by_time(self) -> list[tuple[int, int]]:
        found = []
        for members in self.members:
            ends = self.earliest[members] + self.block.duration[members]
            too_late = ends[:, None] > self.latest[members][None, :]
            known = self.before[np.ix_(members, members)]
            np.fill_diagonal(too_late, False)
            found += [(members[y], members[x]) for x, y in np.argwhere(too_late & ~known.T)]
        return found

    def _by_memory(self) -> list[tuple[int, int]]:
        """Releases without which an F finds no room, whatever else runs before it."""
        found = []
        for stage, memory in self.block.memory.items():
            members = self.members[stage]
            delta = np.array([memory.delta[one] for one in members.tolist()], dtype=np.int64)
            known = self.before[np.ix_(members, members)]
            with_later = (known | np.eye(len(members), dtype=np.bool_)).astype(np.int64)
            forward = self._forward(members)
            for x in np.flatnonzero(delta > 0):
                at_least = np.int64(delta[x]) + delta[known[:, x]].sum()
                # What an F took that may come later is released at most once it has come.
                held = np.append(known[:, x], True)[forward]
                open_ = ~known[x] & ~known[:, x] & (delta < 0) & held
                released = -delta * open_
                without = at_least - released.sum() + with_later @ released
                needed = open_ & (without > memory.room)
                found += [(members[y], members[x]) for y in np.flatnonzero(needed)]
        return found

    def _forward(self, members: Ints) -> Ints:
        """Index among the stage's passes of each one's F; -1 if that is fixed before the block."""
        code = self.block.code[members]
        index = {one: at for at, one in enumerate(code.tolist())}
        return np.array([index.get(one, -1) for one in (code % self.block.per_kind).tolist()])


def _sequence(ready: Ints, duration: Ints) -> int:
    """When a stage that runs these passes one by one, each once it is ready, is done with all."""
    order = np.argsort(-ready)
    return int((ready[order] + np.cumsum(duration[order])).max())
