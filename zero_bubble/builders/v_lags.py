"""The pattern that the V schedules share: whole lags between stages, squeezed under a limit."""

from __future__ import annotations

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import v_shape
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

    F's and B's of different microbatches then take different sub-periods, and each chunk is in
    flight for as many as every other stage's two together: about 2 turn / period chunks a stage.

    The squeeze then runs the template against the clock of the costs (equal times if None), lets
    passes run ahead where memory allows, and fills gaps with W's. Memory counts chunks here,
    whatever their M_B: one each from F to B, and M_W/M_B until W (one without costs). A few
    settings of the squeeze are tried; the cheapest order is the result.

    The squeeze is compiled: a first use on a machine takes some seconds, the first of a process
    about half a second, later ones milliseconds. ValueError for less than one stage or microbatch,
    or costs of another placement.
    """
    if stages < 1:
        raise ValueError(f"at least 1 stage, not {stages}")
    # Who builds other schedules should not wait until a compiler is loaded.
    import numpy as np

    from zero_bubble.search.orders import decode
    from zero_bubble.search.problem import Problem
    from zero_bubble.search.squeeze import Knobs, squeeze, template

    placement = v_shape(stages)
    if costs is None:
        costs = Costs.uniform(placement, 1, 1, 1)
    costs.require(placement)
    problem = Problem.of(placement, _counting_chunks(costs), microbatches, 2 * in_flight)
    arrays = problem.arrays()
    ahead = lag * (stages - 1 - np.arange(stages, dtype=np.float64))
    turn = lag * (stages - 1) + 1
    turn += turn % period == 0
    zero = np.zeros(stages)
    lags = np.stack([zero, ahead + 0.5, turn + ahead + 0.5, zero + turn], axis=1)
    order = template(arrays, lags[:, :, None] + period * np.arange(microbatches))
    if order is None:
        raise ValueError(f"{name}: the template does not fit {in_flight} microbatches a stage")
    best = np.inf
    kept = rows = np.empty((stages, 6 * microbatches), np.int64)
    for patience, gap, lead, spare, hold in _KNOBS:
        rows = np.empty_like(rows)
        knobs = Knobs(patience, gap, lead, spare, hold, patience, gap, lead)
        cost = squeeze(arrays, microbatches, order, knobs, rows)
        # By more than rounding, so that the result is the same on any machine.
        if 0 <= cost < best * (1 - 1e-9):
            best, kept = cost, rows
    if best == np.inf:
        raise ValueError(f"{name}: no order fits {in_flight} microbatches a stage")
    return decode(problem, kept, name)


def _counting_chunks(costs: Costs) -> Costs:
    """The same times, with memory in chunks."""

    def share(stage: int, chunk: int) -> float:
        whole = costs.m_b[stage][chunk]
        return costs.m_w[stage][chunk] / whole if whole else 1.0

    kept: Table = tuple(
        tuple(share(stage, chunk) for chunk in range(count))
        for stage, count in enumerate(costs.shape)
    )
    return Costs(
        t_f=costs.t_f,
        t_b=costs.t_b,
        t_w=costs.t_w,
        m_b=tuple((1.0,) * count for count in costs.shape),
        m_w=kept,
        t_comm=costs.t_comm,
        t_edges=costs.t_edges,
    )
