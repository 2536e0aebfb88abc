"""Megatron asks which layers and which end of the model a rank holds, and gets the placement's."""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

megatron = checks_of("tests.unit.placement_checks")
V3 = [[0, 5], [1, 4], [2, 3]]
LINEAR = [[0], [1], [2]]
V2 = [[0, 3], [1, 2]]


@pytest.mark.parametrize(
    ("layout", "stages", "chunks"),
    [("Et|tt|ttt|tL", 2, 2), ("Ett||t|ttt|t|tL", 3, 2), ("Et|t|t|t|t|tL", 2, 3)],
)
def test_where_megatron_knows_the_placement_it_is_megatrons_own(
    layout: str, stages: int, chunks: int
) -> None:
    megatron("interleaved_is_megatrons_own", layout=layout, stages=stages, chunks=chunks)


def test_layers_of_a_v_by_rank() -> None:
    """Model order 1, 2, 3, 1 layers; the turn (parts 1 and 2) is on rank 0."""
    layers = megatron("layers_of_a_v", layout="Et|tt|ttt|tL", stages=2)
    assert layers == [[[1, 2], [3, 4, 5]], [[0], [6]]]


def test_layers_where_ranks_hold_different_numbers_of_chunks() -> None:
    layers = megatron("layers_of", layout="Et|tt|t|t|tL|", positions=[[0, 4], [1], [2, 3]])
    assert layers == [[[3], [4]], [[1, 2], []], [[0], [5]]]


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        (None, ([10, 12], [10])),
        (LINEAR, ([10, 12], [10])),
        (V3, ([12], [12])),
        ([[2], [0], [1]], ([11, 12], [11])),  # reversed: the beginning is in the middle
    ],
)
def test_ranks_of_embeddings(
    positions: list[list[int]] | None, expected: tuple[list[int], list[int]]
) -> None:
    assert megatron("ranks_of_embeddings", positions=positions) == expected


def test_the_beginning_of_a_v_is_the_first_chunk_of_the_last_rank() -> None:
    no = [False, False, False]
    assert megatron("beginnings", positions=V3) == [no, no, [True, True, False]]
    interleaved = [[0, 3], [1, 4], [2, 5]]
    assert megatron("beginnings", positions=interleaved) == [[True, True, False], no, no]


@pytest.mark.parametrize(
    ("first", "last", "size"),
    [(True, True, 1), (True, False, 4), (False, True, 4), (False, False, 4)],
)
def test_a_rank_with_both_ends_gets_the_whole_batch(first: bool, last: bool, size: int) -> None:
    seen = megatron("batch_arguments", first=first, last=last)
    assert seen["pipeline_model_parallel_size"] == size


def test_a_function_that_reads_the_data_gives_both_ends_the_whole_batch() -> None:
    """As Megatron's does before 0.18."""
    assert megatron("reader_is_asked_for_all", positions=V3) == [False, False, True]
    interleaved = [[0, 3], [1, 4], [2, 5]]
    assert megatron("reader_is_asked_for_all", positions=interleaved) == [False, False, False]


def test_tied_weights_of_a_v_start_equal_and_add_their_gradients() -> None:
    assert megatron("tied_weights", positions=V2) == {
        "weights": [2.0, 2.0],
        "gradients": [2.5, 2.5],
    }


def test_elsewhere_tied_weights_are_megatrons_business() -> None:
    assert megatron("tied_weights", positions=[[0, 2], [1, 3]]) == {
        "weights": [2.0, 0.5],
        "gradients": [2.0, 0.5],
    }


def test_a_checkpoint_has_one_copy_and_both_get_a_tensor_of_their_own() -> None:
    assert megatron("tensors_that_a_rank_holds_twice") == {
        "written": {"begin": 0, "end": 1, "other": 0},
        "read": {"begin": [2.0, 2.0], "end": [1.0, 1.0], "other": [1.0, 1.0]},
    }


def test_an_older_megatron_runs_the_placements_it_knows_and_no_others() -> None:
    refusal, *accepted = megatron("on_an_older_megatron")
    assert accepted == ["", ""]
    assert refusal.startswith("the schedule's placement, v, needs megatron.somewhere.something, ")
    assert "install megatron-core 0.19.2, or choose a schedule with linear" in refusal
