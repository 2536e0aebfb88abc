"""The pattern that the V schedules share: whole lags between stages, squeezed under a limit."""

from __future__ import annotations

import math
from dataclasses import replace

from zero_bubble.builders.recomputing import within_backward
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, v_shape
from zero_bubble.schedule import Schedule

__all__ = ["v_lagged"]

_KNOBS = (
    # Patience in T_F, gap in T_W, lead, spare, hold: see `zero_bubble.search.squeeze.Knobs`.
    (0.5, 0.01, 0.0, 1.0, 1e9),  # W's early, few first-chunk F's ahead: for little memory
    (0.5, 0.6, 0.0, 0.0, 0.0),  # no B ahead of the template
    (0.75, 0.6, 1e9, 0.0, 1e9),  # anything ahead that fits
    (1.0, 1.0, 0.0, 0.0, 1e9),  # W's rather than running ahead
)


def v_lagged(
    name: str,
    stages: int,
    microbatches: int,
    costs: Costs | None,
    *,
    lag: int,
    period: int,
    in_flight: int,
) -> Schedule:
    """The V schedule of a lag template, with at most ``in_flight`` microbatches on a stage.

    The template counts in sub-periods, ``period`` of them a microbatch. A microbatch's F's follow
    each other down and up the V, ``lag`` sub-periods a stage; then its B's do the same on the way
    back, a turn later. With h = lag (p-1-s) and turn = lag (p-1) + 1, one more if the period
    divides that, stage s runs for microbatch j

    - F of its first chunk at period j, of its second h + 1/2 later,
    - B of its second chunk turn after the first F, of its first turn + h + 1/2 after it.

    On every stage the two chunks are in flight for 2 turn sub-periods together, so that about
    2 turn / period chunks are at once. For period 2 the first chunk's F's and the second's B's take
    turns, and so do the other two: where F and B take equally long, both tile the time.

    The squeeze then runs the template against the clock, lets passes run ahead where memory
    allows, and fills gaps with W's. Memory counts chunks here, whatever their M_B: one each from F
    to B, and M_W/M_B until W. The result is the cheapest of a few orders, which differ in settings
    of the squeeze and in its clock: that of the costs, or equal times with M_W = M_B. Without costs
    there are only the latter.

    The squeeze is compiled: a first use on a machine takes about ten seconds, that of a process
    about half a second, later ones milliseconds. ValueError for less than one stage or microbatch,
    or costs of another placement.
    """
    if stages < 1:
        raise ValueError(f"at least 1 stage, not {stages}")
    # Who builds other schedules should not wait until a compiler is loaded.
    import numpy as np

    from zero_bubble.search.orders import decode, evaluate
    from zero_bubble.search.problem import Problem
    from zero_bubble.search.squeeze import Knobs, squeeze, template

    placement = v_shape(stages)
    equal = Costs.uniform(placement, 1, 1, 1)
    clocks = [equal]
    if costs is not None:
        clocks.insert(0, _counting_chunks(within_backward(costs), placement))
    problems = [Problem.of(placement, one, microbatches, 2 * in_flight) for one in clocks]
    true_times = problems[0].arrays()
    ahead = lag * (stages - 1 - np.arange(stages, dtype=np.float64))
    turn = lag * (stages - 1) + 1
    turn += turn % period == 0
    zero = np.zeros(stages)
    lags = np.stack([zero, ahead + 0.5, turn + ahead + 0.5, zero + turn], axis=1)
    keys = lags[:, :, None] + period * np.arange(microbatches, dtype=np.float64)
    least, best = math.inf, None
    for problem in problems:
        arrays = problem.arrays()
        order = template(arrays, keys)
        if order is None:
            break
        for patience, gap, lead, spare, hold in _KNOBS:
            rows = np.empty((stages, 6 * microbatches), np.int64)
            knobs = Knobs(patience, gap, lead, spare, hold, patience, gap, lead)
            if squeeze(arrays, microbatches, order, knobs, rows) < 0:
                continue
            cost = evaluate(true_times, microbatches, rows).cost
            # By more than rounding, so that the result is the same on any machine.
            if 0 <= cost < least * (1 - 1e-9):
                least, best = cost, rows
    if best is None:
        raise ValueError(f"{name}: no order fits {in_flight} microbatches a stage")
    return decode(problems[0], best, name)


def _counting_chunks(costs: Costs, placement: Placement) -> Costs:
    """The same times, with memory in chunks."""
    costs.require(placement)

    def share(stage: int, chunk: int) -> float:
        whole = costs.m_b[stage][chunk]
        return costs.m_w[stage][chunk] / whole if whole else 1.0

    counts = enumerate(costs.shape)
    return replace(
        costs,
        m_b=tuple((1.0,) * count for count in costs.shape),
        m_w=tuple(tuple(share(stage, one) for one in range(count)) for stage, count in counts),
    )
