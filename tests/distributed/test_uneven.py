"""Any number of layers trains under every placement, to the bits of Megatron's 1F1B.

Megatron itself wants numbers that divide, so that its run is told by a layout of its own which
stage has which layers; ours must find that out, or be told in the order of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.distributed.configs import Config
from tests.distributed.harness import Result, TrainingFailed, assert_identical_model
from tests.distributed.observations import check_runtime
from zero_bubble.builders import BUILDERS, build

type Reference = Callable[[Config], Result]
type Start = Callable[[Config], Config]
type Train = Callable[..., Result]

LAYOUT = "--pipeline-model-parallel-layout"
SCHEDULES = ("zb-h1", "zb-interleaved", "zb-v")
"""One of each placement."""
# Of Megatron's 1F1B, one part a stage; which stage has more does not matter to the bits.
MEGATRONS_LAYOUT = {
    (5, 2): "Ett|tttL",
    (7, 2): "Ettt|ttttL",
    (10, 2): "E" + "t" * 5 + "|" + "t" * 5 + "L",
    (5, 4): "Et|tt|t|tL",
    (7, 4): "Ett|t|tt|ttL",
    (10, 4): "Ettt|tt|tt|tttL",
    (6, 2): "Ettt|tttL",
}
FITS = [
    (layers, pp, schedule)
    for layers in (5, 7, 10)
    for pp in (2, 4)
    for schedule in SCHEDULES
    if BUILDERS[schedule].placement(pp).num_positions <= layers
]
TOO_FEW = [(layers, 4, schedule) for layers in (5, 7) for schedule in ("zb-interleaved", "zb-v")]
DEFAULT = {(5, 2, "zb-v"), (7, 4, "zb-h1"), (7, 2, "zb-interleaved")}


def config_of(layers: int, pp: int) -> Config:
    return Config(layers=layers, pp=pp, clip_grad=0.0, iterations=4)


def compare(
    config: Config,
    schedule: str,
    flags: tuple[str, ...],
    reference: Reference,
    start: Start,
    train: Train,
) -> None:
    """Ours under ``flags``; Megatron's 1F1B under its own layout, from the same weights."""
    config = start(config)
    layout = (LAYOUT, MEGATRONS_LAYOUT[config.layers, config.pp])
    expected = reference(replace(config, extra=(*config.extra, *layout)))
    actual = train(config, schedule, *flags)
    assert_identical_model(expected, actual)
    check_runtime(actual, build(schedule, config.pp, config.num_microbatches))


@pytest.mark.parametrize(
    ("layers", "pp", "schedule"),
    [pytest.param(*one, marks=() if one in DEFAULT else pytest.mark.slow) for one in FITS],
)
def test_uneven_layers(
    layers: int,
    pp: int,
    schedule: str,
    reference: Reference,
    from_one_start: Start,
    train: Train,
) -> None:
    compare(config_of(layers, pp), schedule, (), reference, from_one_start, train)


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("zb-v", "Et|ttt|t|tL"),
        pytest.param("zb-interleaved", "Et||ttt|ttL", marks=pytest.mark.slow),  # an empty chunk
        pytest.param("zb-h2", "Et|" + "t" * 5 + "L", marks=pytest.mark.slow),
    ],
)
def test_uneven_by_a_layout_in_the_order_of_the_model(
    schedule: str, layout: str, reference: Reference, from_one_start: Start, train: Train
) -> None:
    config = config_of(6, 2)
    compare(config, schedule, (LAYOUT, layout), reference, from_one_start, train)


@pytest.mark.parametrize(
    ("layers", "pp", "schedule"),
    [TOO_FEW[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in TOO_FEW[1:])],
)
def test_uneven_with_too_few_layers(layers: int, pp: int, schedule: str, train: Train) -> None:
    with pytest.raises(TrainingFailed) as caught:
        train(config_of(layers, pp), schedule)
    assert "exit code 2" in str(caught.value)
    assert (
        f"zero-bubble: error: --num-layers {layers} is too few for --pipeline-schedule {schedule} "
        "on 4 stages, which has 8 chunks: use at least 8 layers, fewer stages, or a "
        "--pipeline-model-parallel-layout with chunks that have no layer"
    ) in str(caught.value)
