"""Costs say what they cost, survive JSON, and refuse what can't be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import random_costs
from zero_bubble.costs import Costs, paper_profiles
from zero_bubble.placement import interleaved, linear, v_shape
from zero_bubble.schedule import Kind


def test_durations() -> None:
    costs = Costs.uniform(v_shape(2), 1, 2, 3)
    kept = (Kind.F, Kind.B, Kind.W, Kind.BW)
    assert [costs.duration(kind, 1, 1) for kind in kept] == [1, 2, 3, 5]
    with pytest.raises(ValueError, match=r"recomputes \(R\), but the costs do not say how long"):
        costs.duration(Kind.R, 1, 1)
    assert costs.recomputation(1, 1) == 0.0
    assert Costs.uniform(linear(2), 1, 2, 3, t_bw=4.5).duration(Kind.BW, 0, 0) == 4.5


def test_recomputation() -> None:
    costs = Costs.uniform(v_shape(2), 1, 2, 3, m_b=5, t_r=0.5, m_r=2)
    assert costs.duration(Kind.R, 1, 0) == costs.recomputation(1, 0) == 0.5
    assert costs.duration(Kind.B, 1, 0) == 2
    assert costs.kept(0, 1) == 2
    everything = costs.without_recomputation()
    assert everything == Costs.uniform(v_shape(2), 1, 2, 3, m_b=5)
    assert everything.kept(0, 1) == 5
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


def test_recomputation_is_said_whole_and_keeps_no_more_than_all() -> None:
    with pytest.raises(ValueError, match="both or not at all"):
        Costs.uniform(linear(2), 1, 1, 1, t_r=1)
    with pytest.raises(ValueError, match="m_r of stage 0, chunk 0, is 2, more than its m_b 1"):
        Costs.uniform(linear(2), 1, 1, 1, t_r=1, m_r=2)


def test_weights_keep_all_memory_by_default() -> None:
    assert Costs.uniform(linear(2), 1, 1, 1, m_b=3).m_w == ((3.0,), (3.0,))


def test_an_edge_can_have_its_own_time() -> None:
    one = Costs.uniform(linear(3), 1, 1, 1, t_comm=0.5)
    costs = Costs.from_dict(one.to_dict() | {"t_edges": [[0, 1, 2.0]]})
    assert (costs.comm(0, 1), costs.comm(1, 0), costs.comm(1, 2), costs.comm(1, 1)) == (
        *(2.0, 0.5),
        *(0.5, 0.0),
    )


@given(stages=st.integers(1, 5), chunks=st.integers(1, 3), seed=st.integers(0, 10**6))
def test_json_brings_the_same_costs_back(stages: int, chunks: int, seed: int) -> None:
    costs = random_costs(interleaved(stages, chunks), seed)
    assert Costs.from_dict(json.loads(json.dumps(costs.to_dict()))) == costs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"t_f": [[-1.0], [1.0]]}, "t_f of stage 0, chunk 0, must be a finite number"),
        ({"t_f": []}, "t_f needs a time for every chunk"),
        ({"t_b": [[1.0]]}, r"t_b has \(1,\) chunks on its stages where t_f has \(1, 1\)"),
        ({"t_w": [[1.0], ["x"]]}, "t_w: expected a list of numbers for each stage"),
        ({"m_w": [[1.0], [1.5]]}, "m_w of stage 1, chunk 0, is 1.5, more than its m_b 1"),
        ({"t_bw": 3}, "t_bw: expected a list of numbers"),
        ({"t_comm": "fast"}, "t_comm: expected milliseconds, not 'fast'"),
        ({"t_edges": [[0, 1]]}, r"t_edges: expected \[\[source, target, ms\]"),
        ({"t_edges": [[0, 2, 1.0]]}, "t_edges names the edge 0 -> 2: expected two different"),
        ({"colour": 1}, "unknown field 'colour'"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    data = Costs.uniform(linear(2), 1, 1, 1).to_dict() | change
    with pytest.raises(ValueError, match=message):
        Costs.from_dict(data)


def test_a_missing_field_is_named() -> None:
    data = Costs.uniform(linear(2), 1, 1, 1).to_dict()
    del data["m_w"]
    with pytest.raises(ValueError, match="'m_w' is missing"):
        Costs.from_dict(data)
    with pytest.raises(ValueError, match="expected an object"):
        Costs.from_dict([1])


def test_infinite_times_are_refused() -> None:
    with pytest.raises(ValueError, match="t_comm must be a finite number"):
        Costs.uniform(linear(2), 1, 1, 1, t_comm=float("nan"))


def test_the_paper_s_rows() -> None:
    rows = paper_profiles()
    assert [(row.stages, row.microbatches) for row in rows] == [
        *((8, 24), (8, 32), (8, 64)),
        *((8, 24), (8, 32), (8, 64)),
        *((16, 48), (16, 64), (16, 128)),
        *((32, 96), (32, 128), (32, 256)),
    ]
    # 6.2B: h = 4096, a = 32, s = 1024, so 32h / (34h + 5as) = 131072 / 303104.
    assert rows[3].costs.m_w[7][0] == pytest.approx(131072 / 303104)
    assert rows[3].costs.duration(Kind.BW, 0, 0) == pytest.approx(29.444 + 19.927)
