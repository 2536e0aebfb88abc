"""A table of schedules beside each other, with the paper's formulas where they hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_bubble.costs import Costs
from zero_bubble.simulate import Timeline

__all__ = ["comparison", "paper_bubble"]

_HEADER = ("schedule", "cost ms", "bubble rate", "paper", "peak memory", "waiting for W")


def comparison(
    timelines: Sequence[Timeline], *, amount: Callable[[float], str] = "{:.4g}".format
) -> str:
    """A row a timeline: cost, bubble rate, the paper's closed formula, and the worst stage's peaks.

    ``waiting for W`` counts (chunk, microbatch) entries between their B and their W. The formula's
    column holds a dash where the formula does not apply (see `paper_bubble`).
    """
    rows = [_HEADER, *(_row(one, amount) for one in timelines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def paper_bubble(name: str, microbatches: int, costs: Costs) -> float | None:
    """The bubble in ms by the paper's Table 2, (p-1)(T_F + T_B + k T_W).

    k is 1 for GPipe and 1F1B, -1 for ZB-H1, -2 for ZB-H2. The formulas are for equal stages of one
    chunk, free messages, no recomputation, and enough microbatches to fill the pipeline; None where
    that does not hold, where the formula is negative (no schedule can have that), or for another
    schedule.
    """
    stages = len(costs.shape)
    known = {"gpipe": (1, 1), "1f1b": (1, 1), "zb-h1": (-1, stages), "zb-h2": (-2, 2 * stages - 1)}
    if name not in known or costs.t_comm or costs.t_edges or set(costs.shape) != {1}:
        return None
    tables = (costs.t_f, costs.t_b, costs.t_w)
    if costs.t_bw is not None or costs.t_r is not None:
        return None
    if any(len(set(table)) > 1 for table in tables):
        return None
    factor, enough = known[name]
    t_f, t_b, t_w = (table[0][0] for table in tables)
    bubble = (stages - 1) * (t_f + t_b + factor * t_w)
    return bubble if microbatches >= enough and bubble >= 0 else None


def _row(timeline: Timeline, amount: Callable[[float], str]) -> tuple[str, ...]:
    schedule = timeline.schedule
    bubble = paper_bubble(schedule.name, schedule.num_microbatches, timeline.costs)
    ideal = max(timeline.work)
    return (
        schedule.name,
        f"{timeline.cost:.2f}",
        f"{timeline.bubble_rate:.2%}",
        "-" if bubble is None else f"{bubble / (ideal + bubble):.2%}",
        amount(max(timeline.peak_memory)),
        str(max(timeline.peak_weight_store)),
    )
