"""What an order of passes costs when their times vary: no profile is exact, no GPU is even.

The order stays, and so does what waits for what. So the passes are sorted once into an order in
which they can run, and each repeat only adds up other times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from zero_bubble.costs import Costs
from zero_bubble.noise import Noise
from zero_bubble.schedule import Kind, Pass, Schedule
from zero_bubble.search.compiled import compiled
from zero_bubble.search.problem import Arrays, Floats, Ints
from zero_bubble.simulate import Timeline, simulate

__all__ = ["JitterResult", "jittered", "mean_cost"]

_KINDS = (Kind.F, Kind.B, Kind.W, Kind.R, Kind.BW)
"""By code: those of `zero_bubble.search.orders`, and the fused backward."""


@dataclass(frozen=True, slots=True, eq=False)
class JitterResult:
    """What a schedule costs in each of the repeats; arrays have shape (repeats,)."""

    schedule: Schedule
    cost: float
    """Without noise, in ms."""
    costs: Floats
    """In ms, as `Timeline.cost`."""
    bubble_rates: Floats
    """(cost - ideal) / cost, where the ideal is what the busiest stage computes in this repeat,
    with the noise and the drift: what no order could beat with the same times."""

    @property
    def mean(self) -> float:
        """Mean cost, in ms."""
        return float(np.mean(self.costs))

    @property
    def p95(self) -> float:
        """The cost that 95 % of the repeats stay below, in ms."""
        return float(np.quantile(self.costs, 0.95))

    @property
    def deviation(self) -> float:
        """Standard deviation of the cost, in ms."""
        return float(np.std(self.costs))

    @property
    def bubble_rate(self) -> float:
        """Mean of ``bubble_rates``."""
        return float(np.mean(self.bubble_rates))

    def beats(self, other: JitterResult) -> float:
        """Share of the repeats in which this schedule costs less, of two runs with one seed.

        ValueError if the numbers of repeats differ.
        """
        if len(self.costs) != len(other.costs):
            raise ValueError(
                f"{len(self.costs)} repeats against {len(other.costs)}: give both the same number"
            )
        return float(np.mean(self.costs < other.costs))


def jittered(
    schedule: Schedule,
    costs: Costs,
    *,
    sigma: float = 0.05,
    drift: tuple[int, float] | None = None,
    repeats: int = 100,
    seed: int = 0,
) -> JitterResult:
    """Run the schedule's fixed order with times that vary, each pass as soon as its input is there.

    Every time, that of a message too, is multiplied by a factor of `zero_bubble.noise.Noise`:
    log-normal, mean 1, standard deviation ``sigma``. ``drift`` is (stage, factor) for a stage whose
    passes all take longer: (3, 1.1) makes stage 3 10 % slower. A fused backward takes the noise of
    its B and of its W, each for its share of the time; its gradient leaves at its end.

    Schedules are comparable: with the same seed, the same pass meets the same noise. ValueError
    where `simulate` or `Noise` raises it, for less than one repeat, or for times that add up to
    infinity.
    """
    if repeats < 1:
        raise ValueError(f"at least 1 repeat is needed, not {repeats}")
    placement, microbatches = schedule.placement, schedule.num_microbatches
    noise = Noise(placement, microbatches, sigma=sigma, drift=drift, seed=seed)
    timeline = simulate(schedule, costs)
    stages = np.array([placement.owner(one)[0] for one in range(placement.num_positions)])
    steps = _steps(stages, *_amounts(timeline), microbatches, _codes(schedule))
    found, ideal = np.empty(repeats), np.empty(repeats)
    for repeat in range(repeats):
        times = noise.factors(repeat)
        found[repeat], ideal[repeat] = _replay(steps, placement.num_stages, times)
    if not np.isfinite(found).all():
        raise ValueError(
            f"with jitter {sigma} and drift {drift}, the times of the passes add up to more than a "
            "number can hold"
        )
    rates = (found - ideal) / np.where(found > 0, found, 1.0)
    return JitterResult(schedule, timeline.cost, found, rates)


@compiled
def mean_cost(arrays: Arrays, microbatches: int, rows: Ints, factors: Floats) -> float:
    """Mean cost of an order over a table of factors (see `Noise.table`), in ms; -1 if it deadlocks.

    Compiled, and callable from compiled code: it ranks a search's candidates. ``rows`` are codes,
    as in `zero_bubble.search.orders`.
    """
    times = np.zeros((5, len(arrays.stage)))
    times[0], times[1], times[2], times[3] = arrays.t_f, arrays.t_b, arrays.t_w, arrays.t_r
    delays = np.empty((2, len(arrays.stage)))
    delays[0], delays[1] = arrays.delay_f, arrays.delay_b
    steps = _steps(arrays.stage, times, delays, microbatches, rows)
    if not len(steps.code):
        return -1.0
    total = 0.0
    for repeat in range(len(factors)):
        total += _replay(steps, len(rows), factors[repeat])[0]
    return total / len(factors)


def _amounts(timeline: Timeline) -> tuple[Floats, Floats]:
    """Times of F, B, W, R and BW, and delays of activation and gradient, by position."""
    placement, costs = timeline.schedule.placement, timeline.costs
    kinds = [kind for kind in _KINDS if kind is not Kind.R or costs.t_r is not None]
    owners = [placement.owner(position) for position in range(placement.num_positions)]
    times = np.zeros((len(_KINDS), len(owners)))
    for kind in kinds:
        for position, (stage, chunk) in enumerate(owners):
            time = timeline.duration(Pass(kind, 0, chunk), stage)
            times[_KINDS.index(kind), position] = time
    delays = np.zeros((2, len(owners)))
    for position in range(1, len(owners)):
        here, before = owners[position][0], owners[position - 1][0]
        delays[0, position] = costs.comm(before, here)
        delays[1, position - 1] = costs.comm(here, before)
    return times, delays


def _codes(schedule: Schedule) -> Ints:
    """Rows of codes, as in `zero_bubble.search.orders`; the fused backward is kind 4."""
    placement, microbatches = schedule.placement, schedule.num_microbatches
    kinds = {kind: index * placement.num_positions for index, kind in enumerate(_KINDS)}
    rows = np.full((schedule.num_stages, max(map(len, schedule.passes))), -1, dtype=np.int64)
    for stage, (held, row) in enumerate(zip(placement.positions, schedule.passes, strict=True)):
        rows[stage, : len(row)] = [
            (kinds[one.kind] + held[one.chunk]) * microbatches + one.microbatch for one in row
        ]
    return rows


class _Steps(NamedTuple):
    """An order's passes so that each comes after what it waits for; an array entry a step.

    A pass is a step, a fused backward two: its B, and then its W. ``before`` and ``source`` are the
    steps that a step waits for, on its stage and for its input; the number of steps where there is
    none. It takes ``time * factors[code]``, its input ``delay * factors[message]``.
    """

    stage: Ints
    before: Ints
    source: Ints
    delay: Floats
    message: Ints
    time: Floats
    code: Ints


@compiled
def _input(kind: int, place: int, microbatches: int, size: int) -> int:
    """Code of the pass that a pass waits for, -1 if none; ``place`` is its code without kind."""
    if kind == 0:
        return place - microbatches if place >= microbatches else -1
    if kind == 2:
        return size + place
    if kind == 3:
        return place
    return size + place + microbatches if place + microbatches < size else place


@compiled
def _steps(stages: Ints, times: Floats, delays: Floats, microbatches: int, rows: Ints) -> _Steps:
    """Sort an order's passes; no steps if some wait for each other in a circle.

    ``times[kind, position]`` are those of F, B, W, R and BW, ``delays[0]`` those of activations and
    ``delays[1]`` those of gradients on their way to a position.
    """
    size = len(stages) * microbatches
    count = int(np.sum(rows >= 0) + np.sum(rows >= 4 * size))
    stage_of, time, code = np.empty(count, np.int64), np.empty(count), np.empty(count, np.int64)
    before, source = np.empty(count, np.int64), np.full(count, count)
    delay, message = np.zeros(count), np.zeros(count, np.int64)
    # The step that makes a result, by code of F, B, W or R; -1 as long as there is none.
    made = np.full(4 * size, -1)
    latest = np.full(len(rows), count)
    next_of = np.zeros(len(rows), np.int64)
    step = 0
    moved = True
    while moved:
        moved = False
        for stage in range(len(rows)):
            row = rows[stage]
            while next_of[stage] < len(row) and row[next_of[stage]] >= 0:
                kind = row[next_of[stage]] // size
                place = row[next_of[stage]] - kind * size
                position = place // microbatches
                needed = _input(kind, place, microbatches, size)
                if needed >= 0 and made[needed] < 0:
                    break
                stage_of[step], before[step] = stage, latest[stage]
                # Where its factor is: those of R come after those of messages.
                time[step] = times[kind, position]
                code[step] = (5 if kind == 3 else kind) * size + place
                if needed >= 0:
                    source[step] = made[needed]
                    if kind != 2 and kind != 3:
                        flow = min(kind, 1)
                        delay[step] = delays[flow, position]
                        message[step] = (3 + flow) * size + place
                if kind == 4:
                    whole = times[1, position] + times[2, position]
                    share = times[1, position] / whole if whole > 0 else 1.0
                    stage_of[step + 1], before[step + 1] = stage, step
                    time[step + 1], code[step + 1] = (1.0 - share) * time[step], 2 * size + place
                    time[step], code[step] = share * time[step], size + place
                    step += 1
                    made[size + place] = step
                else:
                    made[kind * size + place] = step
                latest[stage] = step
                next_of[stage] += 1
                step += 1
                moved = True
    done = count if step == count else 0
    return _Steps(
        stage_of[:done],
        before[:done],
        source[:done],
        delay[:done],
        message[:done],
        time[:done],
        code[:done],
    )


@compiled
def _replay(steps: _Steps, stages: int, factors: Floats) -> tuple[float, float]:
    """Cost, and what the busiest stage computes."""
    count = len(steps.code)
    end = np.zeros(count + 1)
    first, last, busy = np.zeros(stages), np.zeros(stages), np.zeros(stages)
    for step in range(count):
        stage = steps.stage[step]
        arrival = end[steps.source[step]] + steps.delay[step] * factors[steps.message[step]]
        begin = max(end[steps.before[step]], arrival)
        duration = steps.time[step] * factors[steps.code[step]]
        if steps.before[step] == count:
            first[stage] = begin
        end[step] = last[stage] = begin + duration
        busy[stage] += duration
    return (last - first).max(), busy.max()
