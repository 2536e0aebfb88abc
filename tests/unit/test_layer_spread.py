"""Layers over chunks: Megatron's split where it divides, else fewer at the model's ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.arrangement import Arrangement, arrange
from megatron.zero_bubble.layer_spread import describe, layout_of, padded, spread
from zero_bubble.placement import Placement, interleaved, linear, v_shape

ARRANGEMENTS = st.builds(
    lambda stages, kind: arrange(kind(stages)),
    st.integers(2, 8),
    st.sampled_from([linear, lambda p: interleaved(p, 2), lambda p: interleaved(p, 3), v_shape]),
)


@pytest.mark.parametrize("layers", [22, 30])
def test_the_papers_models_have_one_layer_less_at_the_ends(layers: int) -> None:
    """22 layers on 8 stages, and 30 (two of the sizes of its Table 3)."""
    counts = spread(layers, arrange(linear(8)))
    more = (layers + 2) // 8
    assert counts == (more - 1, *(more,) * 6, more - 1)


@pytest.mark.parametrize(
    ("layers", "placement", "expected"),
    [
        (5, linear(2), (3, 2)),  # the loss counts more than the embedding
        (7, linear(4), (2, 2, 2, 1)),
        (10, linear(4), (2, 3, 3, 2)),
        (5, v_shape(2), (1, 1, 2, 1)),
        (7, v_shape(2), (2, 2, 2, 1)),
        (10, interleaved(2, 2), (2, 3, 3, 2)),
        (10, v_shape(4), (1, 1, 1, 1, 1, 2, 2, 1)),  # on two stages, not both on one
        (10, interleaved(4, 2), (1, 1, 1, 1, 1, 2, 2, 1)),
    ],
)
def test_small_cases(layers: int, placement: Placement, expected: tuple[int, ...]) -> None:
    assert spread(layers, arrange(placement)) == expected


@given(ARRANGEMENTS, st.integers(0, 40), st.booleans(), st.booleans())
def test_as_even_as_can_be_and_never_more_at_the_ends(
    arrangement: Arrangement, extra: int, embedding: bool, loss: bool
) -> None:
    positions = arrangement.placement.num_positions
    layers = positions + extra
    counts = spread(layers, arrangement, embedding=embedding, loss=loss)
    assert sum(counts) == layers
    units = [counts[0] + embedding, *counts[1:-1], counts[-1] + loss]
    assert max(units) - min(units) <= 1
    assert units[-1] == min(units)
    if positions > 2 and units[0] > min(units):
        assert all(one > min(units) for one in units[1:-1])  # nothing else was left


@given(ARRANGEMENTS, st.integers(1, 6))
def test_where_layers_divide_it_is_megatrons_split(arrangement: Arrangement, each: int) -> None:
    positions = arrangement.placement.num_positions
    assert spread(each * positions, arrangement) == (each,) * positions


def test_in_megatrons_words() -> None:
    assert layout_of((1, 0, 2)) == "Et||ttL"
    arrangement = arrange(Placement(((0, 4), (1,), (2, 3))))
    assert padded("Et|t|t|t|tL", arrangement) == "Et|t|t|t|tL|"
    assert describe(["Et", "tt", "", "ttt", "tL"], arrangement) == (
        "rank 0 holds no layer | layers 4-6; rank 1 holds layers 2-3; rank 2 holds embedding, "
        "layer 1 | layer 7, loss"
    )
