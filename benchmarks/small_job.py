"""What the benchmarks that train share: Megatron's flags, and costs from what ranks report."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

from zero_bubble.costs import Costs, Table
from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind

__all__ = ["Report", "measured_costs", "megatron_flags"]

type Report = dict[str, Any]
"""What a rank says of a turn, as its worker writes it. ``stage`` is the scheduler's, and ``ms``
lists (kind, chunk, times of its passes in ms); reports of Megatron's own schedule lack both."""


def megatron_flags(
    schedule: str,
    *,
    stages: int,
    microbatches: int,
    iterations: int,
    hidden: int,
    sequence: int = 256,
    tied: bool = False,
) -> list[str]:
    """Megatron's command line: a GPT of 8 layers on random data, the same in every iteration."""
    return f"""--pipeline-model-parallel-size {stages} --num-layers 8 --hidden-size {hidden}
        --num-attention-heads 8 --seq-length {sequence} --max-position-embeddings {sequence}
        --micro-batch-size 2 --global-batch-size {2 * microbatches} --train-iters {iterations}
        --lr 1e-4 --mock-data --tokenizer-type NullTokenizer --vocab-size 127
        --split 100,0,0 --eval-interval 1000 --eval-iters 0 --log-interval 1000
        --hidden-dropout 0 --attention-dropout 0
        {"" if tied else "--untie-embeddings-and-output-weights"}
        --rerun-mode disabled --pipeline-schedule {schedule}""".split()


def measured_costs(placement: Placement, reports: Iterable[Report], message_ms: float) -> Costs:
    """Medians of the passes' times in ms, 0 for a kind that did not run; and a message's."""
    times: dict[tuple[str, int, int], list[float]] = {}
    for one in reports:
        for kind, chunk, each in one.get("ms", ()):
            times.setdefault((kind, one["stage"], chunk), []).extend(each)

    def table(kind: Kind) -> Table:
        return tuple(
            tuple(
                statistics.median(times.get((kind, stage, chunk), [0.0]))
                for chunk in range(len(row))
            )
            for stage, row in enumerate(placement.positions)
        )

    unit = tuple((1.0,) * len(row) for row in placement.positions)
    return Costs(
        t_f=table(Kind.F),
        t_b=table(Kind.B),
        t_w=table(Kind.W),
        t_bw=table(Kind.BW),
        m_b=unit,
        m_w=unit,
        t_comm=message_ms,
    )
