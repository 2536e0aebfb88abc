"""Layers and schedule together: no partition by hand is better, and Megatron reads the layout."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cpu_mode import checks_of
from zero_bubble.check import check
from zero_bubble.placement import Placement, interleaved, linear, v_shape
from zero_bubble.search import partition as module
from zero_bubble.search.auto import auto
from zero_bubble.search.partition import (
    EFFORTS,
    Layer,
    Model,
    NoPartitionFits,
    PartitionProgress,
    idle_share,
    partition,
)
from zero_bubble.search.partition_balance import (
    Loads,
    all_partitions,
    balance,
    bottleneck,
    count_partitions,
    neighbours,
    reference_sizes,
    spread,
)
from zero_bubble.search.problem import Problem
from zero_bubble.simulate import simulate


def transformer(time: float = 1.0, weight_memory: float = 0.0) -> Layer:
    return Layer("transformer", time, time, time, 1.0, 0.5, weight_memory)


def model(*times: float, embedding: float = 0.0, loss: float = 0.0, comm: float = 0.0) -> Model:
    """Transformer layers with these times of F, B and W."""
    return Model(
        (
            Layer("embedding", embedding, 0, embedding, 0, 0),
            *map(transformer, times),
            Layer("loss", loss, loss, loss, 0.2, 0.1),
        ),
        comm,
    )


def partitions(layers: int, chunks: int) -> list[tuple[int, ...]]:
    """All sizes, by trying all numbers."""
    every = itertools.product(range(1, layers + 1), repeat=chunks - 1)
    rests = ((*first, layers - sum(first)) for first in every)
    return [sizes for sizes in rests if sizes[-1] >= 1]


def problems(
    model: Model, placement: Placement, microbatches: int, limit: float
) -> dict[tuple[int, ...], Problem]:
    """A problem for each partition that fits."""
    found = {}
    for sizes in partitions(len(model.layers), placement.num_positions):
        weights = model.weight_memory(placement, sizes)
        rest = [limit - one for one in weights]
        try:
            costs = model.costs(placement, sizes)
            found[sizes] = Problem.of(placement, costs, microbatches, rest)
        except ValueError:
            continue
    return found


def busiest(model: Model, placement: Placement, sizes: tuple[int, ...]) -> float:
    ends = [0, *itertools.accumulate(sizes)]
    return max(
        sum(layer.work for at in held for layer in model.layers[ends[at] : ends[at + 1]])
        for held in placement.positions
    )


UNEVEN = model(1, 2, 1, 1, 3, 1, embedding=0.5, loss=1.5, comm=0.1)
ALIKE = model(1, 1, 1, 1, 1, 1, embedding=0.2, loss=2, comm=0.05)
WITH_WEIGHTS = Model(
    tuple(
        replace(layer, weight_memory=weight)
        for layer, weight in zip(ALIKE.layers, (4, 1, 1, 1, 1, 1, 1, 5), strict=True)
    ),
    0.05,
)

SMALL = model(1, 2, 1, embedding=0.5, loss=2, comm=0.1)

CASES = [
    (UNEVEN, linear(2), 4, math.inf),
    (ALIKE, linear(3), 6, 6.0),
    (WITH_WEIGHTS, linear(3), 4, 9.5),
    (SMALL, v_shape(2), 2, 4.5),
    (SMALL, interleaved(2, 2), 2, 6.0),
    pytest.param(UNEVEN, linear(3), 5, 8.0, marks=pytest.mark.slow),
    pytest.param(ALIKE, v_shape(2), 3, 7.0, marks=pytest.mark.slow),
    pytest.param(UNEVEN, interleaved(2, 2), 4, 9.0, marks=pytest.mark.slow),
]


@cache
def least_by_hand(layers: Model, placement: Placement, microbatches: int, limit: float) -> float:
    found = problems(layers, placement, microbatches, limit).values()
    return min(auto(problem, effort="quick").cost for problem in found)


@pytest.mark.parametrize("enumerated", [True, False], ids=["all partitions", "neighbours"])
@pytest.mark.parametrize(("layers", "placement", "microbatches", "limit"), CASES)
def test_no_partition_by_hand_is_better(
    layers: Model,
    placement: Placement,
    microbatches: int,
    limit: float,
    enumerated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not enumerated:
        monkeypatch.setattr(module, "_MOST_ENUMERATED", 0)
    by_hand = problems(layers, placement, microbatches, limit)
    effort = "quick" if len(by_hand) <= EFFORTS["quick"].schedules else "normal"
    found = partition(layers, placement, microbatches, limit, effort=effort)
    best = least_by_hand(layers, placement, microbatches, limit)
    assert found.solution.cost <= best * (1 + 1e-6)
    assert found.bound <= best * (1 + 1e-9)
    assert found.bound <= found.solution.cost
    # The independent checker and simulator agree on what was found.
    problem = by_hand[found.sizes]
    schedule = found.solution.schedule
    assert problem.costs == found.costs
    assert check(schedule, costs=problem.costs, memory_limit=problem.memory_limit) == []
    assert simulate(schedule, problem.costs).cost == pytest.approx(found.solution.cost)
    even = layers.even_sizes(placement.num_positions)
    assert (found.even is None) == (even not in by_hand)
    if found.even is not None:
        assert found.solution.cost <= found.even.cost * (1 + 1e-9)


@pytest.mark.parametrize("placement", [linear(4), v_shape(2), interleaved(2, 2)])
def test_uniform_layers_are_divided_evenly(placement: Placement) -> None:
    found = partition(model(*[1] * 8), placement, 4, 8.5, effort="quick")
    assert found.sizes == (3, 2, 2, 3)
    assert found.even == found.solution


@pytest.mark.parametrize("placement", [linear(4), v_shape(4)])
def test_the_stage_with_a_heavy_head_gets_fewer_layers(placement: Placement) -> None:
    layers = model(*[1] * 16, loss=2)
    found = partition(layers, placement, 12, 20, effort="quick")
    counts = [
        sum(found.sizes[at] for at in held) - (0 in held) - (len(found.sizes) - 1 in held)
        for held in placement.positions
    ]
    head, _ = placement.owner(placement.num_positions - 1)
    assert counts[head] < min(counts[:head] + counts[head + 1 :])
    assert found.even is not None
    # The even partition computes 4 layers and the head on one stage, 18 ms a microbatch.
    assert found.solution.cost < 12 * 18 <= found.even.cost


def test_the_bubble_rate_may_rise_while_the_time_falls() -> None:
    found = partition(model(*[1] * 8, loss=1.5), linear(4), 12, 8.2, effort="quick")
    assert found.even is not None
    assert found.solution.cost < found.even.cost
    even = model(*[1] * 8, loss=1.5).costs(linear(4), (3, 2, 2, 3))
    rate = found.problem.bubble_rate(found.solution.cost)
    assert rate > simulate(found.even.schedule, even).bubble_rate


def test_less_time_is_less_idle_whatever_the_partition() -> None:
    layers = model(*[1] * 8, loss=1.5)
    found = partition(layers, linear(4), 12, 8.2, effort="quick")
    assert found.even is not None
    idle, of_even = (idle_share(layers, 4, 12, one.cost) for one in (found.solution, found.even))
    assert 0 < idle < of_even
    # What the simulator adds up, pass by pass.
    timeline = simulate(found.solution.schedule, found.costs)
    assert idle == pytest.approx(1 - sum(timeline.work) / (4 * timeline.cost))
    # All stages at work all the time: rounding makes no share of less than 0.
    assert idle_share(layers, 4, 12, 12 * layers.work / 4 * (1 - 1e-15)) == 0
    assert idle_share(model(0), 1, 4, 0) == 0


def test_a_limit_is_measured_by_the_even_partition_or_by_one_of_least_bottleneck() -> None:
    assert reference_sizes(model(*[1] * 8, loss=9), linear(4)) == (3, 2, 2, 3)
    assert reference_sizes(model(*[1] * 8, loss=9), v_shape(2)) == (3, 2, 2, 3)
    # 3 layers here, 2 and a loss like one there.
    assert reference_sizes(model(*[1] * 5, loss=1), linear(2)) == (4, 3)
    with pytest.raises(ValueError, match=r"3 layers .* for 4 chunks: each needs at least one"):
        reference_sizes(model(1), linear(4))


def test_no_room_says_so_once_in_amounts() -> None:
    with pytest.raises(NoPartitionFits) as caught:
        partition(ALIKE, linear(2), 4, 3.0, effort="quick")
    assert caught.value.limits == (3, 3)
    assert caught.value.proven
    assert caught.value.described(lambda memory: f"<{memory:g}>") == (
        "no partition fits a memory limit of <3> a stage: "
        "weights and one microbatch take <6.2> on all 2 stages together"
    )


def test_weights_take_memory() -> None:
    heavy = transformer(weight_memory=10)
    layers = Model((ALIKE.layers[0], *[transformer()] * 4, heavy, heavy, ALIKE.layers[-1]))
    # A stage of 16 has no room for two heavy layers.
    found = partition(layers, linear(2), 4, 16, effort="quick")
    assert found.sizes == (6, 2)
    with pytest.raises(
        ValueError, match=r"no partition fits a memory limit of 12 a stage: weights"
    ):
        partition(layers, linear(2), 4, 12, effort="quick")


def test_the_same_again_and_progress() -> None:
    told = list[PartitionProgress]()
    one, other = (
        partition(UNEVEN, linear(3), 5, 8, progress=told.append, effort="quick") for _ in range(2)
    )
    assert one == other
    costs = [now.cost for now in told[: len(told) // 2]]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] == one.solution.cost
    assert all(now.bound <= now.cost * (1 + 1e-9) for now in told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ALIKE, linear(9), 4), r"8 layers \(embedding and loss included\) for 9 chunks"),
        ((ALIKE, linear(2), 0), "at least 1 microbatch is needed, not 0"),
        ((ALIKE, linear(2), 4, (8, 8, 8)), "3 memory limits for 2 stages: give one, or one each"),
        ((ALIKE, linear(2), 4, math.nan), "memory limit nan: expected a number"),
        (
            (ALIKE, linear(2), 4, 3.0),
            "no partition fits a memory limit of 3 a stage: .* take 6.2 on",
        ),
        ((ALIKE, linear(2), 4, (3, 2)), "no partition fits memory limits of 3, 2: weights and one"),
    ],
)
def test_what_cannot_be(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(*arguments)


def test_an_unknown_effort() -> None:
    with pytest.raises(ValueError, match="effort must be one of quick, normal, thorough, not 'a'"):
        partition(ALIKE, linear(2), 4, effort="a")


times = st.sampled_from([0.0, 0.5, 1.0, 1.3, 2.0, 5.0])
placements = st.sampled_from([linear(2), linear(3), v_shape(2), interleaved(2, 2)])
models = st.builds(
    lambda middle, embedding, loss: model(*middle, embedding=embedding, loss=loss),
    st.lists(times, min_size=3, max_size=6),
    times,
    times,
)


@given(models, placements, st.floats(1, 8))
def test_balance_and_bounds_on_the_busiest_stage(
    layers: Model, placement: Placement, limit: float
) -> None:
    count, chunks = len(layers.layers), placement.num_positions
    all_sizes = partitions(count, chunks)
    works = {sizes: busiest(layers, placement, sizes) for sizes in all_sizes}
    assert spread(layers, placement) <= min(works.values()) * (1 + 1e-9)

    loads = Loads.of(layers, placement, (limit,) * placement.num_stages)
    least, cuts = bottleneck(loads)
    fitting = problems(layers, placement, 1, limit)
    if placement == linear(placement.num_stages):
        assert least == pytest.approx(min((works[one] for one in fitting), default=math.inf))
        assert (cuts is None) == (not fitting)
    else:
        assert least <= min(works.values()) * (1 + 1e-9)
    for start in map(np.array, ([0, *itertools.accumulate(sizes)] for sizes in all_sizes[:3])):
        balanced = balance(loads, start)[None, :]
        assert loads.excess(balanced)[0] <= loads.excess(start[None, :])[0] + 1e-9
        if loads.excess(start[None, :])[0] == 0:
            most = loads.stage_work(start[None, :]).max()
            assert loads.stage_work(balanced).max() <= most * (1 + 1e-9)


@given(models, placements, st.floats(1, 8))
def test_many_partitions_at_once(layers: Model, placement: Placement, limit: float) -> None:
    count, chunks = len(layers.layers), placement.num_positions
    cuts = all_partitions(count, chunks)
    sizes = [tuple(row) for row in np.diff(cuts, axis=1).tolist()]
    assert sorted(sizes) == sorted(partitions(count, chunks))
    assert len(sizes) == count_partitions(count, chunks)
    loads = Loads.of(layers, placement, (limit,) * placement.num_stages)
    works = [busiest(layers, placement, one) for one in sizes]
    assert loads.stage_work(cuts).max(axis=1).tolist() == pytest.approx(works)
    fitting = {one for one, excess in zip(sizes, loads.excess(cuts), strict=True) if excess <= 0}
    assert fitting == set(problems(layers, placement, 1, limit))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_neighbours_move_one_layer(sizes: list[int]) -> None:
    found = np.diff(neighbours(np.array([0, *itertools.accumulate(sizes)])), axis=1).tolist()
    expected = [
        [size - (at == giver) + (at == taker) for at, size in enumerate(sizes)]
        for giver, taker in itertools.permutations(range(len(sizes)), 2)
        if sizes[giver] > 1
    ]
    assert sorted(found) == sorted(expected)


LAYOUTS = [
    (linear(2), (5, 5), "Et*4|t*4L"),
    (linear(4), (1, 4, 4, 1), "E|t*4|t*4|L"),
    (linear(5), (2, 2, 2, 2, 2), "Et|(t*2|)*3tL"),
    (interleaved(2, 2), (4, 3, 1, 2), "Et*3|t*3|t|tL"),
    (interleaved(3, 2), (1, 1, 1, 1, 1, 15), "E|(t|)*4t*14L"),
    (linear(1), (3,), "EtL"),
]


def test_megatron_reads_the_layout() -> None:
    megatron = checks_of("tests.unit.partition_checks")
    for placement, sizes, layout in LAYOUTS:
        layers = model(*[1] * (sum(sizes) - 2))
        assert layers.layout(sizes) == layout
        parts = layers.parts(sizes)
        assert megatron(
            "kinds_by_rank",
            layout=layout,
            stages=placement.num_stages,
            num_layers=layers.num_layers,
        ) == [[[layer.kind for layer in parts[at]] for at in held] for held in placement.positions]


@settings(max_examples=20)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9).filter(lambda all_: sum(all_) > 2))
def test_the_layout_spells_every_layer(sizes: list[int]) -> None:
    layers = model(*[1] * (sum(sizes) - 2))
    text = layers.layout(sizes)
    # Python's own operators spell it out: (a|)*3 and t*4 are products of strings.
    terms = text.replace("(", "+(''+").replace("|", "+'|'").replace("t", "+'t'")
    terms = terms.replace("E", "+'E'").replace("L", "+'L'")
    spelled = eval("''" + terms)  # built here from letters that are all known
    assert list(map(len, spelled.split("|"))) == sizes
    assert spelled.replace("|", "") == f"E{'t' * layers.num_layers}L"


TRANSFORMER = {"t_f": 1, "t_b": 2, "t_w": 3, "m_b": 4}
GOOD: dict[str, Any] = {
    "embedding": {"t_f": 0.5},
    "layers": [TRANSFORMER, {**TRANSFORMER, "count": 2, "m_w": 1, "weight_memory": 7}],
    "loss": {},
    "t_comm": 0.25,
}


def test_a_model_in_json() -> None:
    last = Layer("transformer", 1, 2, 3, 4, 1, 7)
    wanted = Model(
        (
            Layer("embedding", 0.5, 0, 0, 0, 0),
            Layer("transformer", 1, 2, 3, 4, 4),
            last,
            last,
            Layer("loss", 0, 0, 0, 0, 0),
        ),
        0.25,
    )
    assert Model.from_dict(json.loads(json.dumps(GOOD))) == wanted
    costless = Model.from_dict({"layers": [TRANSFORMER]}).layers
    assert costless[0] == Layer("embedding", 0, 0, 0, 0, 0)
    assert costless[-1] == Layer("loss", 0, 0, 0, 0, 0)
    alike = {**GOOD, "layers": {**TRANSFORMER, "count": 6}}
    assert Model.from_dict(alike).num_layers == 6


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "expected an object with embedding, layers, loss, t_comm, not"),
        ({**GOOD, "head": {}}, "unknown field 'head'; known: embedding, layers"),
        ({"embedding": {}, "loss": {}}, "field 'layers' is missing"),
        ({**GOOD, "layers": 3}, "field 'layers': expected a list of layers, or one with its count"),
        ({**GOOD, "layers": []}, "at least one transformer layer"),
        ({**GOOD, "layers": [3]}, "field 'layers[0]': expected an object with t_f, ..., not 3"),
        ({**GOOD, "layers": [{"t_f": 1}]}, "field 'layers[0].t_b' is missing: expected a number"),
        ({**GOOD, "layers": {**TRANSFORMER, "count": 0}}, "field 'layers.count': expected a whole"),
        ({**GOOD, "loss": {"count": 2}}, "field 'loss': unknown field 'count'; known: t_f, t_b"),
        ({**GOOD, "loss": {"t_f": "1"}}, "field 'loss.t_f': expected a number, not '1'"),
        ({**GOOD, "loss": {"t_f": -1}}, "field 'loss': t_f of the loss layer must be a finite"),
        ({**GOOD, "loss": {"m_w": 1}}, "field 'loss': m_w of the loss layer is 1, more than its"),
        ({**GOOD, "t_comm": None}, "field 't_comm': expected a number, not None"),
        ({**GOOD, "t_comm": -1}, "t_comm must be a finite number, at least 0, not -1"),
    ],
)
def test_what_is_no_model(data: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the message is compared below
        Model.from_dict(data)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_in_another_order_are_no_model() -> None:
    with pytest.raises(ValueError, match="in this order, not loss, embedding"):
        Model((ALIKE.layers[-1], ALIKE.layers[0]))
    with pytest.raises(ValueError, match="expected numbers of layers, at least 1 each, with sum 8"):
        ALIKE.parts((0, 8))
