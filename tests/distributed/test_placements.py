"""Schedules of every placement train to the bits of Megatron's own 1F1B on as many stages.

Megatron draws a rank's weights by the rank's number, so that both sides load one checkpoint. Their
models are then compared by the layers' numbers: the same layer lies on another rank here and there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.distributed.configs import Case, Config, placed_cases
from tests.distributed.gathering import assemble
from tests.distributed.harness import Result, Zygote, assert_identical_model
from tests.distributed.observations import check_runtime
from tests.distributed.test_bit_identity import with_w_at_the_end
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.placement import Placement
from zero_bubble.schedule import Schedule
from zero_bubble.search.auto import auto
from zero_bubble.search.problem import Problem

type Reference = Callable[[Config], Result]
type Start = Callable[[Config], Config]
type Train = Callable[..., Result]


def _id(case: Case) -> str:
    return f"{case.schedule.replace('-', '_')}-{case.config}"


def _schedule(case: Case) -> Schedule:
    return build(case.schedule, case.config.pp, case.config.num_microbatches)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=_id(case), marks=() if default else pytest.mark.slow)
        for case, default in placed_cases()
    ],
)
def test_bit_identity_of_placements(
    case: Case, reference: Reference, from_one_start: Start, train: Train
) -> None:
    config = from_one_start(case.config)
    expected, actual = reference(config), train(config, case.schedule)
    assert_identical_model(expected, actual)
    check_runtime(actual, _schedule(case))


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"], ids=["zb_v", "interleaved"])
def test_bit_identity_but_for_rounding_of_the_norm(
    schedule: str, reference: Reference, from_one_start: Start, train: Train
) -> None:
    """Gradients that are clipped are scaled by the norm, which is summed stage by stage.

    Another placement has other layers on a stage, so that the sum is rounded otherwise: the norm
    and the losses are the same to 1e-6.
    """
    config = from_one_start(Config())
    expected, actual = reference(config), train(config, schedule)
    assert max(expected.iterations("grad_norm")) > config.clip_grad
    assert_identical_model(expected, actual)
    check_runtime(actual, build(schedule, config.pp, config.num_microbatches))


def test_tied_weights_on_one_rank_start_equal_and_stay_so(train: Train) -> None:
    """Without a checkpoint; Megatron has the two copies on two ranks and sends one to the other."""
    config = Config(tied=True, iterations=3)
    run = train(config, "zb-v")
    whole = assemble(rank["pieces"] for rank in run.ranks)
    embedding, output = whole["embedding.word_embeddings.weight/value"], "output_layer.weight/value"
    assert torch.equal(whole[output], embedding)
    assert embedding.std() == pytest.approx(0.02, rel=0.1)  # Megatron's --init-method-std


OVERLAPPED = Config(
    dp=2,
    precision="bf16",
    distributed_optimizer=True,
    clip_grad=0.0,
    extra=("--overlap-grad-reduce", "--overlap-param-gather"),
)
PER_TOKEN = Config(clip_grad=0.0, extra=("--calculate-per-token-loss",))
FEW_MICROBATCHES = Config(pp=4, layers=8, microbatches=3, clip_grad=0.0)
OPTIONS = {
    "overlapped_distributed_optimizer": (OVERLAPPED, ("zb-v", "interleaved")),
    "sequence_parallelism": (
        Config(tp=2, clip_grad=0.0, extra=("--sequence-parallel",)),
        ("zb-v",),
    ),
    "tied_over_data_parallel_ranks": (Config(dp=2, tied=True, clip_grad=0.0), ("zb-v",)),
    "per_token_loss": (PER_TOKEN, ("zb-v", "zb-interleaved")),
    "fewer_microbatches_than_stages": (FEW_MICROBATCHES, ("zb-v", "v-min", "interleaved")),
    "an_odd_number_of_microbatches": (
        Config(microbatches=5, clip_grad=0.0),
        ("zb-v", "v-half", "interleaved"),
    ),
    "layers_that_chunks_do_not_divide": (
        Config(layers=6, clip_grad=0.0),
        ("zb-v", "zb-interleaved"),
    ),
}


@pytest.mark.slow  # the default tier has such options in `test_features`
@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        pytest.param(config, schedule, id=f"{name}-{schedule}")
        for name, (config, schedules) in OPTIONS.items()
        for schedule in schedules
    ],
)
def test_option_of_placements(
    config: Config, schedule: str, reference: Reference, from_one_start: Start, train: Train
) -> None:
    config = from_one_start(config)
    expected, actual = reference(config), train(config, schedule)
    assert_identical_model(expected, actual)
    check_runtime(actual, build(schedule, config.pp, config.num_microbatches))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-v", "zb-interleaved"])
def test_batch_size_ramp_up_of_placements(
    schedule: str, reference: Reference, from_one_start: Start, train: Train
) -> None:
    """Every number of microbatches gets its own program."""
    # Thresholds in tokens, 32 a sample.
    config = from_one_start(Config(batch_sizes="0:2 320:4 800:6", clip_grad=0.0))
    expected, actual = reference(config), train(config, schedule)
    assert_identical_model(expected, actual)
    programs = {len(batch["executed"]) for batch in actual.ranks[0]["runtime"]}
    assert len(programs) == 3


# Positions by stage, and a configuration for as many.
CUSTOM = {
    "both_ends_on_the_last_stage": (((1, 2), (0, 3)), Config(tied=True, clip_grad=0.0)),
    "an_unequal_number_of_chunks": (
        ((0, 4), (1,), (2, 3)),
        Config(pp=3, layers=6, clip_grad=0.0),
    ),
    "one_chunk_a_stage_out_of_order": (
        ((0,), (2,), (1,)),
        Config(pp=3, layers=6, clip_grad=0.0),
    ),
    "both_ends_in_the_middle": (
        ((1, 3), (0, 5), (2, 4)),
        Config(pp=3, layers=6, tied=True, clip_grad=0.0),
    ),
    "ends_apart": (
        ((1, 3), (0, 4), (2, 5)),
        Config(pp=3, layers=6, tied=True, precision="bf16", clip_grad=0.0),
    ),
}
CUSTOM_DEFAULT = ("an_unequal_number_of_chunks", "one_chunk_a_stage_out_of_order")


@pytest.mark.parametrize(
    ("positions", "config"),
    [
        pytest.param(*one, id=name, marks=() if name in CUSTOM_DEFAULT else pytest.mark.slow)
        for name, one in CUSTOM.items()
    ],
)
def test_a_placement_from_a_file(
    positions: tuple[tuple[int, ...], ...],
    config: Config,
    reference: Reference,
    from_one_start: Start,
    train: Train,
    tmp_path: Path,
) -> None:
    """What the search finds for a placement that has no name."""
    placement = Placement(positions)
    costs = Costs.uniform(placement, 1.0, 1.3, 0.7)
    found = auto(Problem.of(placement, costs, config.num_microbatches), effort="quick")
    assert found.schedule.placement.name == "custom"
    config, file = from_one_start(config), tmp_path / "schedule.json"
    save_schedule(found.schedule, file, costs)
    expected, actual = reference(config), train(config, str(file))
    assert_identical_model(expected, actual)
    check_runtime(actual, found.schedule)


@pytest.mark.parametrize("order", ["ascending", "reversed"])
def test_w_in_another_order_is_noticed(
    order: str, reference: Reference, from_one_start: Start, train: Train, tmp_path: Path
) -> None:
    """A V with its W's at the end: Megatron's bits in ascending order, and only then."""
    config = from_one_start(Config(clip_grad=0.0))
    schedule = with_w_at_the_end(
        build("zb-v", config.pp, config.num_microbatches), reverse=order == "reversed"
    )
    file = tmp_path / "schedule.json"
    save_schedule(schedule, file)
    expected, actual = reference(config), train(config, str(file))
    check_runtime(actual, schedule)
    if order == "ascending":
        assert_identical_model(expected, actual)
    else:
        with pytest.raises(AssertionError):
            assert_identical_model(expected, actual)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        Config(pp=4, layers=8, tied=True, clip_grad=0.0),
        Config(pp=4, layers=8, precision="bf16", distributed_optimizer=True, clip_grad=0.0),
    ],
    ids=str,
)
def test_megatrons_own_interleaved_schedule_compares_equal(
    config: Config,
    reference: Reference,
    reference_zygote: Zygote,
    from_one_start: Start,
    tmp_path: Path,
) -> None:
    """What the comparison stands on, without anything of ours in either run."""
    config = from_one_start(config)
    flags = ("--num-virtual-stages-per-pipeline-rank", "2")
    interleaved = reference_zygote.train(config, tmp_path, flags)
    assert_identical_model(reference(config), interleaved)
    assert len(interleaved.ranks[-1]["evaluations"]) > 1
    names = assemble(rank["pieces"] for rank in interleaved.ranks)
    layers = {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
    assert layers == set(map(str, range(config.layers)))
    first = interleaved.ranks[0]["pieces"]
    assert {name.split(".")[2] for name, *_ in first if ".layers." in name} == {"0", "4"}
