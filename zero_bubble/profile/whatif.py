"""What each schedule would give for a profile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from zero_bubble.builders import BUILDERS, build
from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.profile.profile import Profile
from zero_bubble.profile.rearrange import rearranged
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.bounds import lower_bound
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import Timeline, simulate

__all__ = [
    "Case",
    "Limit",
    "Outcome",
    "WhatIf",
    "cases",
    "cheapest",
    "judged",
    "named",
    "room_limit",
    "searched",
    "what_if",
]

_ROUNDING = 1e-9
_FACTORS = (1.0, 2.0)
"""Limits that are always searched, in units of p M_B."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A memory limit with its name; what it comes to may depend on placement and costs."""

    name: str
    """Ends the names of what was searched for it: ``1p``, ``12GiB``, ``room``."""
    of: Callable[[Placement, Costs], Sequence[float]]
    """The most memory of each stage, in the unit of the costs; ValueError if there is none."""
    origin: str
    """Where it comes from, for people: ``--memory-limit 12GiB``."""


@dataclass(frozen=True, slots=True)
class Case:
    """A placement with its costs."""

    placement: Placement
    costs: Costs
    estimated: bool = False
    """Whether the costs were measured on another placement (see `rearranged`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A schedule on the profile's costs."""

    timeline: Timeline
    bound: float
    """No schedule with its memory costs less, in ms.

    Its memory is the limit that it was searched for, or, on every stage, the peak of its worst.
    """
    estimated: bool = False
    fits: bool | None = None
    """Whether it keeps to the limit; None if there is none."""

    @property
    def name(self) -> str:
        return self.timeline.schedule.name

    @property
    def cost(self) -> float:
        """ms of the pipeline: without the optimizer and what else an iteration holds."""
        return self.timeline.cost

    @property
    def peak(self) -> float:
        """Most memory that a stage holds for activations."""
        return max(self.timeline.peak_memory)


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The schedules of a profile, and those that it cannot have."""

    outcomes: tuple[Outcome, ...]
    left_out: tuple[tuple[str, str], ...] = ()
    """(name, reason)."""

    @property
    def best(self) -> Outcome | None:
        """Of those that do not break the limit; None if all do. See `cheapest`."""
        return cheapest(one for one in self.outcomes if one.fits is not False)


def cheapest(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The one of least cost; of equals one that was measured, and of these the one of least peak.

    None of none.
    """
    known = [*outcomes]
    least = min((one.cost for one in known), default=0.0) * (1 + _ROUNDING)
    equal = (one for one in known if one.cost <= least)
    return min(equal, key=lambda one: (one.estimated, one.peak), default=None)


def room_limit(profile: Profile) -> Limit | None:
    """What the profile says that stages may use; None if it does not. Unknown stages have none."""
    if not any(one is not None for one in profile.room):
        return None
    room = tuple(math.inf if one is None else one for one in profile.room)
    return Limit("room", lambda placement, costs: room, "the room of the profile")


def cases(profile: Profile) -> tuple[list[Case], list[tuple[str, str]]]:
    """The profile's own placement, then the others estimated; and (name, reason) of those left out.

    The others are linear, interleaved with two chunks, and V.
    """
    own = profile.placement
    found, left_out = [Case(own, profile.costs)], []
    stages = own.num_stages
    for other in (linear(stages), interleaved(stages, 2), v_shape(stages)):
        if any(other == one.placement for one in found) or other.name == own.name:
            continue
        layers = profile.job.get("num_layers")
        if isinstance(layers, int) and layers < other.num_positions:
            reason = f"{layers} layers cannot be cut into {other.num_positions} chunks"
            left_out.append((f"placement {other.name}", reason))
            continue
        try:
            costs = rearranged(profile.costs, own, other)
        except ValueError as error:
            left_out.append((f"placement {other.name}", str(error)))
        else:
            found.append(Case(other, costs, estimated=True))
    return found, left_out


def what_if(
    profile: Profile,
    microbatches: int,
    limit: Limit | None = None,
    *,
    effort: str = "quick",
) -> WhatIf:
    """Every known schedule of every placement, and what a search finds at 1p, 2p and the limit.

    ``limit`` says what fits; without it nothing is judged. ValueError if the profile's own
    placement cannot meet it, or there is no microbatch.
    """
    if limit is not None:
        _problem(Case(profile.placement, profile.costs), microbatches, limit)
    found, left_out = cases(profile)
    outcomes: list[Outcome] = []
    for case in found:
        outcomes += named(case, microbatches, left_out)
    for case in found:
        outcomes += _searches(case, microbatches, limit, effort, left_out)
    return WhatIf(tuple(judged(one, limit) for one in outcomes), tuple(left_out))


def named(
    case: Case, microbatches: int, left_out: list[tuple[str, str]] | None = None
) -> Iterator[Outcome]:
    """The known schedules of this placement; those it cannot have are added to ``left_out``."""
    stages, chunks = case.placement.num_stages, case.placement.num_chunks(0)
    for name, builder in BUILDERS.items():
        if builder.takes_chunks and chunks == 1:
            continue  # these are then the schedules of one chunk, under another name
        choice = chunks if builder.takes_chunks else None
        if builder.placement(stages, choice) != case.placement:
            continue
        try:
            schedule = build(name, stages, microbatches, chunks=choice, costs=case.costs)
        except ValueError as error:
            if left_out is not None:
                left_out.append((name, str(error)))
        else:
            yield _outcome(schedule, case)


def searched(case: Case, microbatches: int, limit: Limit, effort: str) -> Outcome:
    """What the search finds within a limit; ValueError if one microbatch is more than that."""
    problem = _problem(case, microbatches, limit)
    solution = auto(problem, effort=effort)
    name = "-".join(filter(None, ("auto", case.placement.name, limit.name)))
    schedule = replace(solution.schedule, name=name)
    return Outcome(
        timeline=simulate(schedule, case.costs), bound=solution.bound, estimated=case.estimated
    )


def _searches(
    case: Case,
    microbatches: int,
    limit: Limit | None,
    effort: str,
    left_out: list[tuple[str, str]],
) -> Iterator[Outcome]:
    seen: set[tuple[float, ...]] = set()
    for one in (*map(_multiple, _FACTORS), *([] if limit is None else [limit])):
        try:
            memory = tuple(one.of(case.placement, case.costs))
            if memory not in seen:
                seen.add(memory)
                yield searched(case, microbatches, one, effort)
        except ValueError as error:
            left_out.append((f"auto-{case.placement.name}-{one.name}", str(error)))


def _multiple(factor: float) -> Limit:
    """So many times p M_B, with the M_B of each stage."""

    def of(placement: Placement, costs: Costs) -> list[float]:
        return [factor * placement.num_stages * sum(row) for row in costs.m_b]

    return Limit(f"{factor:g}p", of, f"{factor:g}p")


def _problem(case: Case, microbatches: int, limit: Limit) -> Problem:
    memory = limit.of(case.placement, case.costs)
    try:
        return Problem.of(case.placement, case.costs, microbatches, memory)
    except ValueError as error:
        raise ValueError(f"{limit.origin}: {error}") from error


def _outcome(schedule: Schedule, case: Case) -> Outcome:
    timeline = simulate(schedule, case.costs)
    fused = any(one.kind is Kind.BW for row in schedule.passes for one in row)
    costs = _split(case.costs) if fused else case.costs
    limit = max(timeline.peak_memory) * (1 + _ROUNDING)
    problem = Problem.of(case.placement, costs, schedule.num_microbatches, limit)
    return Outcome(
        timeline=timeline,
        bound=lower_bound(problem).cost,
        estimated=case.estimated,
    )


def _split(costs: Costs) -> Costs:
    """B and W that together take no longer than the fused backward, nor either than it does.

    Bounds do not know the fused backward. What holds for these times holds for schedules with it:
    each could run B and W in its place, with results no later.
    """
    if costs.t_bw is None:
        return costs

    def merged(one: Table, other: Table, choose: Callable[[float, float], float]) -> Table:
        rows = zip(one, other, strict=True)
        return tuple(tuple(map(choose, *pair)) for pair in rows)

    t_b = merged(costs.t_b, costs.t_bw, min)
    left = merged(costs.t_bw, t_b, lambda both, first: both - first)
    return replace(costs, t_b=t_b, t_w=merged(costs.t_w, left, min), t_bw=None)


def judged(one: Outcome, limit: Limit | None) -> Outcome:
    """With its ``fits``: whether every stage keeps to the limit."""
    if limit is None:
        return one
    timeline = one.timeline
    limits = limit.of(timeline.schedule.placement, timeline.costs)
    fits = all(
        peak <= most * (1 + _ROUNDING)
        for peak, most in zip(timeline.peak_memory, limits, strict=True)
    )
    return replace(one, fits=fits)
