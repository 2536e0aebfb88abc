"""The trade of microbatch size against bubble, from profiles at several microbatch sizes.

A larger microbatch takes less time a sample, but leaves fewer microbatches in the same batch, and
fewer of them fit in memory: the bubble grows (paper, section 6.1). Which size is best is therefore
a question of the schedule too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from zero_bubble.amount import amount
from zero_bubble.placement import v_shape
from zero_bubble.profile.batch import Batch
from zero_bubble.profile.profile import Profile, Scalar
from zero_bubble.profile.whatif import (
    Case,
    Limit,
    Outcome,
    cases,
    cheapest,
    judged,
    named,
    room_limit,
    searched,
)

__all__ = ["Choice", "Trade", "largest_of", "trade"]

_ONE_F_ONE_B = ("1f1b", "interleaved")
_PLAIN = (*_ONE_F_ONE_B, "gpipe")
"""What is no zero-bubble schedule."""
_SIZE, _BATCH, _REPLICAS = "micro_batch_size", "global_batch_size", "data_parallel_size"
_CHOSEN = (
    _BATCH,
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "seq_length",
    "num_experts",
    "tensor_model_parallel_size",
    "context_parallel_size",
    _REPLICAS,
    "device",
)
"""What people choose, and others follow from: differences between jobs begin with these."""
_MOST_TOLD = 4
"""Differences."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A microbatch size with a schedule."""

    size: int
    """Samples of a microbatch."""
    batch: Batch
    family: str
    """``1F1B``, ``zero bubble``, or ``zero bubble, V``."""
    outcome: Outcome

    def __str__(self) -> str:
        guess = ", estimated" if self.outcome.estimated else ""
        return f"size {self.size} with {self.outcome.name} ({self.outcome.cost:.2f} ms{guess})"

    def more_than(self, other: Choice) -> str:
        """``3.1% more``: the time of a batch."""
        return f"{self.outcome.cost / other.outcome.cost - 1:.1%} more"


@dataclass(frozen=True, slots=True)
class Trade:
    """What each microbatch size makes of one global batch size in one memory."""

    global_batch_size: int
    memory: tuple[float, ...]
    """The most that each stage may hold."""
    memory_origin: str
    """Where that comes from."""
    choices: tuple[Choice, ...]
    """By microbatch size. At least one."""
    left_out: tuple[tuple[int, str], ...] = ()
    """(size, family) of what does not fit in memory."""

    @property
    def best(self) -> Choice:
        """The one of least time a batch."""
        best = self._best(lambda one: True)
        assert best is not None  # `trade` sees to it
        return best

    @property
    def best_measured(self) -> Choice | None:
        """The best of those whose costs are not estimated."""
        return self._best(lambda one: not one.outcome.estimated)

    @property
    def best_1f1b(self) -> Choice | None:
        """The best without zero-bubble schedules; None if none fits."""
        return self._best(lambda one: one.family == "1F1B")

    def _best(self, wanted: Callable[[Choice], bool]) -> Choice | None:
        best = cheapest(one.outcome for one in self.choices if wanted(one))
        return next((one for one in self.choices if one.outcome is best), None)

    def conclusion(self) -> str:
        """Which size and schedule win, by how much, and what 1F1B alone would have chosen."""
        best, plain = self.best, self.best_1f1b
        other = self._best(lambda one: one.size != best.size)
        told = [best]
        text = f"best: {best}"
        for prefix, one in (("of another size", other), ("measured", self.best_measured)):
            if one is not None and one not in told:
                told.append(one)
                text += f"; {prefix}: {one}, {one.more_than(best)}"
        if plain is None:
            return f"{text}; 1F1B does not fit at any size"
        if plain in told:
            return f"{text}; 1F1B's best size is {plain.size}"
        return f"{text}; best 1F1B: {plain}, {plain.more_than(best)}"


def trade(
    profiles: Sequence[tuple[str, Profile]],
    *,
    global_batch_size: int | None = None,
    limit: Limit | None = None,
    effort: str = "quick",
) -> Trade:
    """1F1B and the best zero-bubble schedules of each microbatch size, in one memory.

    ``profiles`` come with their files' names, for errors. The memory is the ``limit`` (multiples of
    p M_B are those of the largest microbatch) and the rooms of all profiles, whichever is less on a
    stage; without either it is what 1F1B takes with the largest microbatch. The V is estimated from
    another placement's costs, and 1F1B from those of a V.

    ValueError names the file and what differs but the microbatch size, or what nothing fits in.
    """
    by_size = _by_size(profiles, batch_given=global_batch_size is not None)
    _, _, largest = by_size[-1]
    common = _common_limit([profile for _, _, profile in by_size], limit)
    choices: list[Choice] = []
    left_out: list[tuple[int, str]] = []
    batches = [_batch(name, profile, global_batch_size) for _, name, profile in by_size]
    for (size, _, profile), batch in zip(by_size, batches, strict=True):
        for family, outcome in _families(profile, batch.microbatches, common, effort):
            if outcome is None:
                left_out.append((size, family))
            else:
                choices.append(Choice(size, batch, family, outcome))
    if not choices:
        size, _, smallest = by_size[0]
        raise ValueError(
            f"{common.origin}: at no microbatch size does one microbatch fit: with size {size} it "
            f"takes up to {amount(max(map(math.fsum, smallest.costs.m_b)))} on a stage"
        )
    return Trade(
        global_batch_size=choices[0].batch.samples or 0,
        memory=tuple(common.of(largest.placement, largest.costs)),
        memory_origin=common.origin,
        choices=tuple(choices),
        left_out=tuple(left_out),
    )


def largest_of(profiles: Sequence[tuple[str, Profile]], *, batch_given: bool) -> Profile:
    """The profile of the largest microbatch, whose M_B a memory limit counts in.

    ValueError as `trade`; ``batch_given`` is whether the jobs' global batch sizes may differ.
    """
    return _by_size(profiles, batch_given=batch_given)[-1][2]


def _batch(name: str, profile: Profile, global_batch_size: int | None) -> Batch:
    try:
        return Batch.of(profile, global_batch_size=global_batch_size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _families(
    profile: Profile, microbatches: int, limit: Limit, effort: str
) -> Iterator[tuple[str, Outcome | None]]:
    """The best of each family within the limit; None if nothing of it fits."""

    def fitting(case: Case) -> list[Outcome]:
        return [
            one for one in (judged(one, limit) for one in named(case, microbatches)) if one.fits
        ]

    def best(case: Case) -> Outcome | None:
        known = [one for one in fitting(case) if one.name not in _PLAIN]
        if _holds_one(case, limit):
            known.append(searched(case, microbatches, limit, effort))
        return cheapest(known)

    own, *others = cases(profile)[0]
    with_1f1b = own
    if own.placement.name not in ("linear", "interleaved"):
        with_1f1b = next((one for one in others if one.placement.name == "linear"), own)
    yield "1F1B", cheapest(one for one in fitting(with_1f1b) if one.name in _ONE_F_ONE_B)
    yield "zero bubble", best(own)
    for case in others:
        if case.placement == v_shape(case.placement.num_stages):
            yield "zero bubble, V", best(case)


def _holds_one(case: Case, limit: Limit) -> bool:
    """Whether one microbatch fits, without which nothing does."""
    pairs = zip(case.costs.m_b, limit.of(case.placement, case.costs), strict=True)
    return all(math.fsum(row) <= most * (1 + 1e-9) for row, most in pairs)


def _common_limit(profiles: Sequence[Profile], limit: Limit | None) -> Limit:
    """One memory for all microbatch sizes; the last profile is that of the largest."""
    placement, costs = profiles[-1].placement, profiles[-1].costs
    rooms = [room for one in profiles if (room := room_limit(one)) is not None]
    known = [*([] if limit is None else [limit]), *rooms]
    if known:
        memory = tuple(map(min, zip(*(one.of(placement, costs) for one in known), strict=True)))
        origins = [] if limit is None else [limit.origin]
        if rooms:
            whose = "the profiles" if len(rooms) > 1 else "one of the profiles"
            origins.append(f"the room of {whose}")
        origin = " and ".join(origins)
    else:
        memory = tuple(placement.num_stages * math.fsum(row) for row in costs.m_b)
        origin = "1p of the largest microbatch"
    return Limit("", lambda placement, costs: memory, origin)


def _by_size(
    profiles: Sequence[tuple[str, Profile]], *, batch_given: bool
) -> list[tuple[int, str, Profile]]:
    """By microbatch size; ValueError unless nothing else that counts differs."""
    free = {_SIZE, _BATCH} if batch_given else {_SIZE}
    first_name, first = profiles[0]
    sized: dict[int, tuple[int, str, Profile]] = {}
    for name, one in profiles:
        if one.placement != first.placement:
            raise ValueError(
                f"{name}: placement {_placed(one)}, not {_placed(first)} as in {first_name}"
            )
        if missing := [key for key in (_SIZE, _REPLICAS) if one.job.get(key) is None]:
            raise ValueError(
                f"{name}: field 'job' has no {missing[0]}, without which microbatch sizes cannot "
                "be compared"
            )
        _require_equal(name, one, first_name, first, free)
        size = one.job[_SIZE]
        if not isinstance(size, int):
            raise ValueError(f"{name}: {_SIZE}: expected a number, at least 1, not {size!r}")
        if size in sized:
            raise ValueError(
                f"{sized[size][1]} and {name}: both have {_SIZE} {size}: give profiles of "
                "different microbatch sizes"
            )
        sized[size] = size, name, one
    return [sized[size] for size in sorted(sized)]


def _require_equal(
    name: str, one: Profile, other_name: str, other: Profile, free: set[str]
) -> None:
    differing = [
        key
        for key in dict.fromkeys((*_CHOSEN, *sorted({*one.job, *other.job})))
        if key not in free and one.job.get(key) != other.job.get(key)
    ]
    if not differing:
        return
    told = [
        f"{key} {_shown(other.job.get(key))} in {other_name}, {_shown(one.job.get(key))} in {name}"
        for key in differing[:_MOST_TOLD]
    ]
    more = f" and {rest} more" if (rest := len(differing) - len(told)) else ""
    hint = ", or give --global-batch-size" if differing == [_BATCH] else ""
    raise ValueError(f"{'; '.join(told)}{more}: only {_SIZE} may differ{hint}")


def _shown(value: Scalar) -> str:
    return "nothing" if value is None else str(value)


def _placed(profile: Profile) -> str:
    return f"{profile.placement.name} of {profile.placement.num_stages} stages"
