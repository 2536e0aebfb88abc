"""What is said about more memory: on which stages, how much, and what it can gain."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zero_bubble.cli.summary import advice_text
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.placement import interleaved, linear, v_shape
from zero_bubble.search.advice import Advice, advise, late_stage_limits
from zero_bubble.search.appendix_b import flattening
from zero_bubble.search.bounds import lower_bound, stage_bounds
from zero_bubble.search.problem import Problem

M_W = 32 * 4096 / (34 * 4096 + 5 * 32 * 1024)


def table_8() -> Problem:
    """The first row of the paper's Table 8: V, 16 stages, 48 microbatches, 1F1B's memory."""
    placement = v_shape(16)
    costs = Costs.uniform(placement, 14.407, 14.38, 9.676, 1.61, m_w=M_W)
    return Problem.of(placement, costs, 48, 32.0)


def test_the_last_stages_of_a_v_need_more_the_later_they_are() -> None:
    problem = table_8()
    extra = [round(limit - 32.0) for limit in late_stage_limits(problem, 99)]
    assert extra == sorted(extra)
    assert extra[0] == 0 < extra[-1]
    # By hand: after the last F of stage i come 2i F's, 2p B's, a W on stage 0, and 2(p-1+i)
    # messages. What the stage holds, 2p B's and W's and what it gets more, has to fill that.
    t_f, t_b, t_w, t_comm = 14.407, 14.38, 9.676, 1.61
    for stage, more in enumerate(extra):
        chain = 2 * stage * t_f + 32 * t_b + t_w + 2 * (15 + stage) * t_comm
        wanted = max(0.0, (chain - 32 * (t_b + t_w)) / (t_b + t_w))
        assert wanted - 1 < more <= wanted + 2


def test_the_extra_memory_is_capped() -> None:
    problem = table_8()
    whole = late_stage_limits(problem, 99)
    assert late_stage_limits(problem, 0) == problem.memory_limit
    for chunks in (1, 2, 4):
        capped = late_stage_limits(problem, chunks)
        assert capped == tuple(min(limit, 32.0 + chunks) for limit in whole)


def test_all_the_extra_memory_leaves_no_cool_down() -> None:
    problem = table_8()
    richer = replace(problem, memory_limit=late_stage_limits(problem, 99))
    assert max(one.cool_down for one in stage_bounds(problem)) > 0.02 * problem.ideal
    assert max(one.cool_down for one in stage_bounds(richer)) < 1e-6 * problem.ideal


def test_late_stages_get_chunks_of_their_own_size() -> None:
    problem = table_8()
    doubled = replace(
        problem,
        costs=Costs.uniform(problem.placement, 14.407, 14.38, 9.676, 1.61, m_b=2.0, m_w=2.0 * M_W),
        memory_limit=(64.0,) * 16,
    )
    assert late_stage_limits(doubled, 4) == tuple(2 * one for one in late_stage_limits(problem, 4))


def test_a_negative_number_of_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0, not -1"):
        late_stage_limits(table_8(), -1)


def test_more_memory_for_a_v_goes_to_its_late_stages_first() -> None:
    problem = table_8()
    found = advise(problem)
    assert found[0].extra_memory < 0.06 * sum(problem.memory_limit)
    for one in found[:3]:
        assert max(one.extra) in (1, 2, 4)
        assert one.extra[0] == 0
    for one in found:
        after = lower_bound(replace(problem, memory_limit=one.limits))
        assert one.rate_after == pytest.approx(1 - problem.ideal / after.cost)
        assert one.rate_before == pytest.approx(0.0697, abs=1e-4)
        assert one.gain >= 0.005
        added = zip(one.limits, problem.memory_limit, strict=True)
        assert one.extra_memory == pytest.approx(sum(more - less for more, less in added))


@settings(max_examples=30)
@given(
    stages=st.integers(2, 6),
    v=st.booleans(),
    factor=st.floats(0.5, 2),
    t_w=st.floats(0.2, 1.5),
    t_comm=st.sampled_from((0.0, 0.05, 0.3)),
)
def test_who_needs_more_memory_gets_a_lower_bound(
    stages: int, v: bool, factor: float, t_w: float, t_comm: float
) -> None:
    placement = v_shape(stages) if v else linear(stages)
    costs = Costs.uniform(placement, 1, 1, t_w, t_comm, m_b=0.5 if v else 1.0)
    found = advise(Problem.of(placement, costs, 3 * stages, max(1.0, factor * stages)))
    for less, more in pairwise(found):
        assert less.extra_memory < more.extra_memory
        assert less.rate_after > more.rate_after


def test_a_quarter_more_memory_everywhere_is_always_looked_at() -> None:
    profile = paper_profiles()[6]
    problem = Problem.of(linear(16), profile.costs, 48, 16.0)
    [everywhere] = [one for one in advise(problem) if one.extra == (4.0,) * 16]
    assert everywhere.rate_after == pytest.approx(0.0837, abs=1e-4)
    assert advice_text(everywhere) == (
        "4 more on every stage (+25.0% in total): the bound on the bubble falls from 13.97% to "
        "8.37%"
    )


def test_a_line_names_the_stages() -> None:
    [two] = [one for one in advise(table_8()) if max(one.extra) == 2]
    # Stage 8 gets 1: 15 chunks more, of 16 * 32.
    assert advice_text(two).startswith("up to 2 more on stages 8 to 15 (+2.9% in total): ")


def test_a_line_has_amounts() -> None:
    more = Advice((2.0**31, 2.0**32), (0.0, 2.0**31), 0.1, 0.05)
    assert advice_text(more) == (
        "2 GiB more on stage 1 (+50.0% in total): the bound on the bubble falls from 10.00% to "
        "5.00%"
    )


def test_a_line_has_no_total_where_a_stage_has_no_limit() -> None:
    more = Advice((math.inf, 3.0), (0.0, 1.0), 0.1, 0.05)
    assert advice_text(more).startswith("1 more on stage 1: the bound")


def test_no_advice_where_memory_does_not_bind() -> None:
    problem = table_8()
    assert advise(replace(problem, memory_limit=(math.inf,) * 16)) == []
    assert advise(replace(problem, memory_limit=(96.0,) * 16)) == []


def test_unlimited_stages_count_as_no_extra_memory() -> None:
    problem = table_8()
    mixed = replace(problem, memory_limit=(math.inf,) * 8 + (32.0,) * 8)
    found = advise(mixed)
    assert found
    for one in found:
        assert one.extra[:8] == (0.0,) * 8
        assert 0 < one.extra_memory < math.inf


def test_the_papers_curves_flatten_at_about_two_p() -> None:
    """Section 5.4: 2 p M_B is a good threshold when T_F is about T_B and messages are short."""
    placement = linear(8)
    equal = flattening(placement, Costs.uniform(placement, 3, 3, 2, m_b=4))
    assert equal is not None
    assert equal.knee == pytest.approx((2 * 8 - 1) * 4)
    assert equal.last_bubbles == pytest.approx((3 * 8 - 2) * 4)
    for profile in paper_profiles():
        stages = profile.stages
        found = flattening(linear(stages), profile.costs)
        assert found is not None
        assert 1.8 * stages < found.knee < 2.2 * stages
        assert found.knee < found.last_bubbles < 3.2 * stages


def test_messages_count_twice_a_hop() -> None:
    placement = linear(3)
    costs = Costs.uniform(placement, 2, 3, 1, 0.5)
    found = flattening(placement, costs)
    assert found is not None
    assert found.knee == pytest.approx((2 * (3 + 1) + 3 * 2) / 2)
    assert found.last_bubbles == (2 * (3 + 1) + 5 * 2) // 2
    edges = tuple((i, j, 0.5) for i in range(3) for j in range(3) if i != j)
    assert flattening(placement, replace(costs, t_comm=9.0, t_edges=edges)) == found


def test_the_appendix_is_about_linear_placement() -> None:
    for placement in (v_shape(4), interleaved(4, 2)):
        assert flattening(placement, Costs.uniform(placement, 1, 1, 1)) is None
    assert flattening(linear(2), Costs.uniform(linear(2), 0, 1, 1)) is None
    with pytest.raises(ValueError, match="profile the placement"):
        flattening(linear(3), Costs.uniform(linear(2), 1, 1, 1))
