"""Costs of other placements than the one that was profiled."""

from __future__ import annotations

import pytest

from zero_bubble.costs import Costs, Table, paper_v_profiles
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.profile.rearrange import rearranged

UNEVEN = Costs(
    t_f=((2.0,), (4.0,)),
    t_b=((3.0,), (6.0,)),
    t_w=((1.0,), (5.0,)),
    m_b=((8.0,), (10.0,)),
    m_w=((4.0,), (10.0,)),
    t_bw=((3.5,), (9.0,)),
    t_edges=((0, 1, 0.5), (1, 0, 0.25)),
)


def test_a_linear_stage_becomes_two_neighbours_of_a_v() -> None:
    """Positions 0 and 1 are stage 0's halves, and a V of two stages holds 0, 3 and 1, 2."""
    found = rearranged(UNEVEN, linear(2), v_shape(2))
    assert found.t_f == ((1.0, 2.0), (1.0, 2.0))
    assert found.t_b == ((1.5, 3.0), (1.5, 3.0))
    assert found.t_w == ((0.5, 2.5), (0.5, 2.5))
    assert found.m_b == ((4.0, 5.0), (4.0, 5.0))
    assert found.m_w == ((2.0, 5.0), (2.0, 5.0))
    assert found.t_bw == ((1.75, 4.5), (1.75, 4.5))
    assert (found.comm(0, 1), found.comm(1, 0)) == (0.5, 0.25)


def test_two_neighbours_of_a_v_become_a_stage() -> None:
    """Back from the V; so from an interleaved placement, which holds 0, 2 and 1, 3."""
    for other in (v_shape(2), interleaved(2, 2)):
        back = rearranged(rearranged(UNEVEN, linear(2), other), other, linear(2))
        for name in ("t_f", "t_b", "t_w", "m_b", "m_w", "t_bw", "t_edges"):
            assert getattr(back, name) == getattr(UNEVEN, name), name


def test_three_chunks_become_two() -> None:
    """Six positions of 1 to 6 ms to four of 1 + 2/2, 2/2 + 3, 4 + 5/2 and 5/2 + 6."""
    table: Table = ((1.0, 3.0, 5.0), (2.0, 4.0, 6.0))
    costs = Costs(t_f=table, t_b=table, t_w=table, m_b=table, m_w=table)
    found = rearranged(costs, interleaved(2, 3), v_shape(2))
    assert found.t_f == ((2.0, 8.5), (4.0, 6.5))


def test_the_halves_of_equal_stages_are_the_paper_s_v() -> None:
    """Table 8's times are those of a chunk: the profile of a whole stage has twice as much."""
    profile = paper_v_profiles()[0]
    chunk = profile.costs
    t_f, t_b, t_w, m_w = (2 * table[0][0] for table in (chunk.t_f, chunk.t_b, chunk.t_w, chunk.m_w))
    whole = Costs.uniform(linear(profile.stages), t_f, t_b, t_w, chunk.t_comm, m_b=1.0, m_w=m_w)
    assert rearranged(whole, linear(profile.stages), v_shape(profile.stages)) == chunk


def test_a_message_that_nobody_has_sent_takes_what_the_others_do() -> None:
    """From the last stage to the first: linear stages have no such edge."""
    edges = ((0, 1, 1.0), (1, 0, 2.0), (1, 2, 3.0), (2, 1, 4.0))
    costs = Costs.uniform(linear(3), 1, 1, 1)
    costs = Costs.from_dict({**costs.to_dict(), "t_edges": [*map(list, edges)]})
    found = rearranged(costs, linear(3), interleaved(3, 2))
    assert found.comm(2, 0) == found.comm(0, 2) == 2.5
    assert found.comm(1, 2) == 3.0
    known = Costs.from_dict({**costs.to_dict(), "t_comm": 7.0})
    assert rearranged(known, linear(3), interleaved(3, 2)).comm(2, 0) == 7.0


def test_unequal_numbers_of_chunks_are_not_taken_over() -> None:
    custom = Placement(((0, 1), (2,)))
    with pytest.raises(ValueError, match=r"stages of \[1, 2\] chunks"):
        rearranged(Costs.uniform(custom, 1, 1, 1), custom, linear(2))
