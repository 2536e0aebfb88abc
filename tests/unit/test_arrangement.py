"""Placements in Megatron's numbering: the loss on the last rank, chunks in the model's order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.arrangement import arrange
from zero_bubble.placement import Placement, interleaved, linear, v_shape


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any: also of stages with different numbers of chunks, held in any order."""
    counts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=5))
    positions = draw(st.permutations(range(sum(counts))))
    rows, start = [], 0
    for count in counts:
        rows.append(tuple(positions[start : start + count]))
        start += count
    return Placement(tuple(rows))


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_what_megatron_knows_stays_as_it_is(stages: int, chunks: int) -> None:
    arrangement = arrange(interleaved(stages, chunks))
    assert arrangement.is_megatrons
    assert arrangement.ranks == tuple(range(stages))
    assert arrangement.virtual == (tuple(range(chunks)),) * stages
    assert arrangement.first_rank == 0


def test_a_v_is_reversed() -> None:
    """Rank p-1 has both ends; the turn is on rank 0."""
    arrangement = arrange(v_shape(4))
    assert not arrangement.is_megatrons
    assert arrangement.ranks == (3, 2, 1, 0)
    assert arrangement.positions == ((3, 4), (2, 5), (1, 6), (0, 7))
    assert arrangement.first_rank == 3
    assert [arrangement.stage_of(rank) for rank in range(4)] == [3, 2, 1, 0]
    assert arrangement.by_stage([10, 11, 12, 13]) == (13, 12, 11, 10)


def test_a_rank_with_fewer_chunks_has_empty_ones() -> None:
    arrangement = arrange(Placement(((0, 4), (1,), (3, 2))))
    # The loss is on stage 0: reversed. The last stage held its chunks out of order.
    assert arrangement.ranks == (2, 1, 0)
    assert arrangement.positions == ((2, 3), (1, None), (0, 4))
    assert arrangement.virtual == ((0, 1), (0,), (1, 0))


def test_the_end_of_the_model_is_the_last_virtual_chunk_even_if_alone() -> None:
    arrangement = arrange(Placement(((0, 1), (2,))))
    assert arrangement.positions == ((0, 1), (None, 2))


@given(placements())
def test_what_megatron_relies_on(placement: Placement) -> None:
    arrangement = arrange(placement)
    p, last = placement.num_stages, placement.num_positions - 1
    assert sorted(arrangement.ranks) == list(range(p))
    assert arrangement.positions[p - 1][-1] == last
    assert arrangement.positions[arrangement.first_rank][0] == 0
    held = [one for rank in arrangement.positions for one in rank if one is not None]
    assert sorted(held) == list(range(last + 1))
    for rank, row in enumerate(arrangement.positions):
        here = [one for one in row if one is not None]
        assert here == sorted(here)
        stage = arrangement.stage_of(rank)
        for chunk, position in enumerate(placement.positions[stage]):
            assert row[arrangement.virtual[stage][chunk]] == position
    # Neighbours stay neighbours, on a ring.
    steps = {(b - a) % p for a, b in zip(arrangement.ranks, arrangement.ranks[1:], strict=False)}
    assert len(steps) == 1


def test_linear_from_any_order_of_stages() -> None:
    """A line that ends on another stage than the last is turned round the ring."""
    order = list(range(5))
    random.Random(3).shuffle(order)
    arrangement = arrange(Placement(tuple((one,) for one in order)))
    assert arrangement.positions[4] == (4,)
    assert arrange(linear(5)).positions == ((0,), (1,), (2,), (3,), (4,))
