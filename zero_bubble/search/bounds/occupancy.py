"""Memory times time: what all microbatches occupy must fit under the limit."""

from __future__ import annotations

from zero_bubble.search.bounds.holding import fullest, most_weight_time
from zero_bubble.search.bounds.paths import Paths, StageCosts

__all__ = ["occupancy_bound"]


def occupancy_bound(paths: Paths, stage: StageCosts, microbatches: int, after: float) -> float:
    """Least cost from memory x time alone, in ms; ``after`` is what `beyond` says of the stage.

    A microbatch holds M_B of a chunk from the start of its F to the end of its B, which is at least
    the way there and back, and M_W while its W runs. With recomputation it is M_R for that way, and
    M_B while R and B run. The sum over all, the area, is at most limit x time, less what the limit
    cannot be used for at both ends:

    - At the start, F's follow one another. Sort them by start, the k-th taking r_k of M_B; it
      starts no earlier than R_{k-1} / rate after the first, with R the running sum and rate the
      largest M_B / T_F. The area between limit and what was taken is the sum of r_k (start of k),
      so at least that of r_k R_{k-1} / rate, which is (limit^2 - limit max r) / (2 rate) or more.
      With recomputation F's take M_R, and R's or B's the rest, all in one sequence.
    - At the end the same holds backwards for what is freed.

    Where both overlap, the memory held is what was taken less what was freed, so that they still
    add up, if the limit is not above what all microbatches together take.

    *Until the stage's last pass*, B's and W's free memory: the last k of them contain the W of each
    B among them, so that they free at most M_B a (T_B + T_W) or M_W a T_W.

    *Until the stage's last B*, count M_B until B, and M_W of the W's that run before it. Z ms of
    W's run later, and the cost is greater by max(after, Z) (see `stage_bound`). More Z than
    ``after`` never pays: each ms of it saves M_W <= limit of area. Only B's free what is counted.
    """
    limit = fullest(stage, microbatches)
    if limit <= 0:
        return 0.0
    chunks = range(len(stage.positions))
    area, of_w = 0.0, 0.0
    for one in chunks:
        at = stage.positions[one]
        area += microbatches * stage.m_r[one] * (paths.end_b[at] - paths.start_f[at])
        more = stage.m_b[one] - stage.m_r[one]
        area += microbatches * more * (stage.t_r[one] + stage.t_b[one])
        of_w += microbatches * stage.m_w[one] * stage.t_w[one]
    takes = [(stage.m_r[one], stage.t_f[one]) for one in chunks]
    takes += [(stage.m_b[one] - stage.m_r[one], stage.t_rest[one]) for one in chunks]
    taking = _ramp(limit, takes, max(memory for memory, _ in takes))
    freeing = _ramp(
        limit,
        [(stage.m_b[one], stage.t_b[one] + stage.t_w[one]) for one in chunks]
        + [(stage.m_w[one], stage.t_w[one]) for one in chunks],
        max(max(stage.m_b[one] - stage.m_w[one], stage.m_w[one]) for one in chunks),
    )
    until_last_pass = (area + of_w + taking + freeing) / limit
    freeing = _ramp(limit, [(stage.m_b[one], stage.t_b[one]) for one in chunks], max(stage.m_b))
    later = min(after, most_weight_time(stage, microbatches)) * max(stage.m_w)
    until_last_b = (area + max(0.0, of_w - later) + taking + freeing) / limit + after
    return max(until_last_pass, until_last_b)


def _ramp(limit: float, steps: list[tuple[float, float]], largest: float) -> float:
    """Area that cannot be used at one end, if each (memory, time) of ``steps`` adds memory so fast.

    ``largest`` is the most that is added at once.
    """
    slowness = min((time / memory for memory, time in steps if memory > 0), default=0.0)
    return max(0.0, limit - largest) * limit / 2 * slowness
