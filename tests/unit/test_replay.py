"""Data that is read again after what it was read for has been thrown away."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.zero_bubble.runtime.host_random import HostRandomStates
from megatron.zero_bubble.runtime.replay import ReplayableIterator, ReplayableIterators


def taken(iterator: Iterator[int], number: int) -> list[int]:
    return [next(iterator) for _ in range(number)]


def test_what_was_read_since_is_read_again_and_nothing_twice() -> None:
    data = ReplayableIterator(iter(range(9)))
    assert taken(data, 2) == [0, 1]
    data.remember()
    assert taken(data, 3) == [2, 3, 4]
    data.rewind()
    assert list(data) == [2, 3, 4, 5, 6, 7, 8]


def test_what_is_kept_is_not_read_again() -> None:
    data = ReplayableIterator(iter(range(6)))
    data.remember()
    assert taken(data, 2) == [0, 1]
    data.forget()
    data.rewind()  # of nothing
    assert list(data) == [2, 3, 4, 5]


def test_twice_in_a_row_with_more_and_with_less() -> None:
    data = ReplayableIterator(iter(range(6)))
    for number in (2, 4, 1, 0, 3):
        data.remember()
        assert taken(data, number) == list(range(number))
        data.rewind()
    data.remember()
    assert taken(data, 5) == [0, 1, 2, 3, 4]
    data.forget()
    assert list(data) == [5]


def test_the_end_is_the_end_also_the_second_time() -> None:
    data = ReplayableIterator(iter(range(2)))
    data.remember()
    assert list(data) == [0, 1]
    with pytest.raises(StopIteration):
        next(data)
    data.rewind()
    assert list(data) == [0, 1]
    with pytest.raises(StopIteration):
        next(data)


def test_an_error_of_the_source_takes_nothing() -> None:
    class Faulty(Iterator[int]):
        def __init__(self) -> None:
            self.number = 0

        def __next__(self) -> int:
            self.number += 1
            if self.number == 2:
                raise OSError("disk")
            return self.number

    data = ReplayableIterator(Faulty())
    data.remember()
    assert next(data) == 1
    with pytest.raises(OSError, match="disk"):
        next(data)
    data.rewind()
    assert taken(data, 2) == [1, 3]


def test_the_source_is_not_read_before_it_is_needed() -> None:
    source = iter(range(5))
    data = ReplayableIterator(source)
    data.remember()
    taken(data, 2)
    data.rewind()
    taken(data, 2)
    assert next(source) == 2


@given(st.lists(st.tuples(st.sampled_from(["remember", "forget", "rewind"]), st.integers(0, 4))))
def test_any_order_of_calls_reads_as_a_list_with_a_position_does(
    calls: list[tuple[str, int]],
) -> None:
    data = ReplayableIterator(iter(range(200)))
    position = 0
    mark: int | None = None
    for call, number in calls:
        getattr(data, call)()
        match call:
            case "remember":
                mark = position
            case "forget":
                mark = None
            case "rewind":
                position, mark = (position if mark is None else mark), None
        assert taken(data, number) == list(range(position, position + number))
        position += number


def test_each_source_has_one_replayable_form() -> None:
    iterators = ReplayableIterators()
    one, other = iter([1]), iter([1])
    assert iterators.of(None) is None
    data = iterators.of(one)
    assert iterators.of(one) is data
    assert iterators.of(data) is data
    assert iterators.of(other) is not data
    # A third one must not come to the place of a source that nobody else holds.
    del other
    many = [iterators.of(iter([number])) for number in range(50)]
    assert [next(each) for each in many] == list(range(50))


def test_a_batch_that_was_taken_apart_is_whole_again() -> None:
    data = ReplayableIterator(iter([{"tokens": 1, "mask": 2}]))
    data.remember()
    next(data).pop("mask")
    data.rewind()
    assert next(data) == {"tokens": 1, "mask": 2}


def test_what_draws_after_a_read_draws_the_same_again() -> None:
    """Though reading it again draws nothing: the source drew when it made the item."""

    def source() -> Iterator[tuple[float, float, float]]:
        while True:
            yield random.random(), np.random.rand(), torch.rand(1).item()

    def microbatch() -> tuple[Any, ...]:
        return *next(data), random.random(), np.random.rand(), torch.rand(1).item()

    data = ReplayableIterator(source())
    begin = HostRandomStates.capture()
    data.remember()
    expected = [microbatch() for _ in range(3)]
    after = random.random()
    data.rewind()
    begin.restore()
    assert [microbatch() for _ in range(3)] == expected
    assert random.random() == after


def test_other_attributes_are_the_sources() -> None:
    assert ReplayableIterator(iter(range(3))).__length_hint__() == 3
