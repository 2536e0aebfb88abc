"""What a run says of its schedule and of its layers, once."""

from __future__ import annotations

import logging

from megatron.zero_bubble.runtime.layers import SplitReport
from zero_bubble.costs import Costs
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.simulate import simulate

__all__ = ["announce", "announce_split"]

logger = logging.getLogger(__name__)

_SEARCHED = "auto-"


def announce(schedule: Schedule) -> None:
    """Log what the schedule is worth where passes take equal time."""
    if schedule.name.startswith(_SEARCHED):  # for times that are known, and told
        logger.info("pipeline schedule %s", schedule.name)
        return
    recomputes = any(schedule.chunks_with(Kind.R))
    again = {"t_r": 1.0, "m_r": 0.0} if recomputes else {}
    timeline = simulate(schedule, Costs.uniform(schedule.placement, 1.0, 1.0, 1.0, **again))
    logger.info(
        "pipeline schedule %s: %d stages, %d microbatches; if %s took equal time: bubble "
        "rate %.1f%%, all activations of at most %g microbatches on a stage",
        schedule.name or "from a file",
        schedule.num_stages,
        schedule.num_microbatches,
        "F, B, W and recomputation" if recomputes else "F, B and W",
        100 * timeline.bubble_rate,
        max(timeline.peak_memory),
    )
    if recomputes:
        logger.info(
            "activations are computed again in passes of their own (R), and stay until W; "
            "--zero-bubble-recompute in-backward leaves that in B, --pipeline-schedule auto with a "
            "memory limit holds less of them"
        )


def announce_split(stage: int, report: SplitReport) -> None:
    """Log how many layers of a stage are split, and warn of those that are not."""
    logger.info("stage %d: %d linear layers give B and W apart", stage, len(report.split))
    if report.whole:
        logger.warning(
            "stage %d: W stays in B for %s%s",
            stage,
            ", ".join(report.whole),
            f" (the weight of {', '.join(report.embedding)} embeds as well; "
            "--untie-embeddings-and-output-weights splits it)"
            if report.embedding
            else "",
        )
