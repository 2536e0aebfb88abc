"""The default tier covers what it claims to; no processes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.distributed.configs import (
    AXES,
    PLACED,
    PLACED_AXES,
    SCHEDULES,
    VALIDATED_AXES,
    Config,
    cases,
    covering,
    placed_cases,
    validated_cases,
)


@pytest.mark.parametrize(
    "axes", [AXES, PLACED_AXES, VALIDATED_AXES], ids=["linear", "placed", "validated"]
)
def test_each_pair_of_axis_values_is_in_a_covering_row(
    axes: Mapping[str, Sequence[Any]],
) -> None:
    rows = covering(axes)
    for (name, values), (other, others) in itertools.combinations(axes.items(), 2):
        for pair in itertools.product(values, others):
            assert any((row[name], row[other]) == pair for row in rows), (name, other, pair)


def test_a_covering_is_small_and_the_same_every_time() -> None:
    assert covering(AXES) == covering(AXES)
    # No fewer rows than the two longest axes have pairs, and not many more.
    lengths = sorted(map(len, AXES.values()))
    assert lengths[-1] * lengths[-2] <= len(covering(AXES)) <= 2 * lengths[-1] * lengths[-2]


def test_cases_are_distinct_and_hold_every_covering_row() -> None:
    names = [str(case) for case, _ in cases()]
    assert len(names) == len(set(names))
    assert sum(default for _, default in cases()) >= len(covering(AXES))


def test_every_configuration_runs_under_every_schedule() -> None:
    schedules: dict[Config, set[str]] = {}
    for case, _ in cases():
        anyhow = replace(case.config, clip_grad=0.0)
        schedules.setdefault(anyhow, set()).add(case.schedule)
    assert set(map(frozenset, schedules.values())) == {frozenset(SCHEDULES)}


def test_placed_cases_are_the_whole_product_with_a_layer_for_each_chunk() -> None:
    every = [case for case, _ in placed_cases()]
    assert len(every) == len(set(every)) == math.prod(map(len, PLACED_AXES.values()))
    for case in every:
        assert case.config.layers == 2 * case.config.pp
        assert not case.config.clips
    default = [case for case, default in placed_cases() if default]
    assert {case.schedule for case in default} == set(PLACED)
    assert len(default) == len(covering(PLACED_AXES)) < len(every) / 5
    # References cost as much as the runs themselves: rows share some.
    assert len({case.config for case in default}) < len(default)


def test_validated_cases_are_the_whole_product_and_its_covering_comes_first() -> None:
    every = [case for case, _ in validated_cases()]
    assert len(every) == len(set(map(str, every))) == math.prod(map(len, VALIDATED_AXES.values()))
    default = [case for case, default in validated_cases() if default]
    assert every[: len(default)] == default
    assert len(default) == len(covering(VALIDATED_AXES))
    assert {case.schedule for case in default} == set(VALIDATED_AXES["schedule"])
