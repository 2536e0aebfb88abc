"""What layout arguments mean, and which checkpoints are refused under which."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from megatron.zero_bubble.arrangement import arrange
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.patches.checkpoint import (
    layout_of,
    refuse_other_layout,
    unportable_format,
)
from zero_bubble.placement import Placement, interleaved, linear, v_shape


def arguments(pp: int, layers: int, **changes: Any) -> Namespace:
    """Megatron's arguments as a checkpoint without anything of ours has them."""
    plain = {
        "load": "/checkpoints",
        "finetune": False,
        "no_load_optim": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "num_layers": layers,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "hybrid_layer_pattern": None,
        "use_distributed_optimizer": True,
    }
    return Namespace(**(plain | changes))


def ours(placement: Placement, layers: int, layout: str | None = None, **changes: Any) -> Namespace:
    """Arguments of a run, or from a checkpoint, of a schedule of ours with this placement."""
    arrangement = arrange(placement)
    chunks = arrangement.chunks_a_rank
    return arguments(
        placement.num_stages,
        layers,
        zero_bubble_positions=[list(held) for held in arrangement.positions],
        virtual_pipeline_model_parallel_size=None if chunks == 1 else chunks,
        pipeline_model_parallel_layout=layout,
        **changes,
    )


def held(args: Namespace) -> list[list[str]]:
    """What each rank holds, chunk by chunk, in few letters: ``E01`` is embedding and two layers."""
    short = {"embedding": "E", "loss": "L"}
    return [
        ["".join(short.get(part, part) for part in chunk) for chunk in rank]
        for rank in layout_of(args).ranks
    ]


# The expected rows were written by hand from Megatron's documentation of the flags.
@pytest.mark.parametrize(
    ("args", "rows"),
    [
        (arguments(1, 2), [["E01L"]]),
        (arguments(2, 4), [["E01"], ["23L"]]),
        (
            arguments(2, 8, virtual_pipeline_model_parallel_size=2),
            [["E01", "45"], ["23", "67L"]],
        ),
        (
            arguments(2, 6, pipeline_model_parallel_layout="Et|(t)*2|t|ttL"),
            [["E0", "3"], ["12", "45L"]],
        ),
        (arguments(2, 4, decoder_first_pipeline_num_layers=3), [["E012"], ["3L"]]),
        (arguments(3, 7, decoder_last_pipeline_num_layers=1), [["E012"], ["345"], ["6L"]]),
        (
            arguments(
                4, 8, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=1
            ),
            [["E0"], ["123"], ["456"], ["7L"]],
        ),
        (
            arguments(
                2, 4, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=1
            ),
            [["E012"], ["3L"]],
        ),
        (
            arguments(
                2,
                6,
                account_for_embedding_in_pipeline_split=True,
                account_for_loss_in_pipeline_split=True,
                virtual_pipeline_model_parallel_size=2,
            ),
            [["E0", "34"], ["12", "5L"]],
        ),
        (ours(v_shape(2), 4, "Et|t|t|tL"), [["1", "2"], ["E0", "3L"]]),
        (
            ours(Placement(((0, 2), (1,))), 3, "Et|t|tL|"),
            [["1", ""], ["E0", "2L"]],
        ),
    ],
)
def test_what_each_rank_holds(args: Namespace, rows: list[list[str]]) -> None:
    assert held(args) == rows


def test_megatrons_own_arguments_and_ours_can_mean_the_same() -> None:
    assert layout_of(arguments(2, 4)) == layout_of(ours(linear(2), 4))
    assert layout_of(arguments(2, 4)) == layout_of(ours(linear(2), 4, "Ett|ttL"))
    assert layout_of(arguments(2, 4)) != layout_of(ours(linear(2), 4, "Ettt|tL"))
    virtual = arguments(2, 8, virtual_pipeline_model_parallel_size=2)
    assert layout_of(virtual) == layout_of(ours(interleaved(2, 2), 8, "Ett|tt|tt|ttL"))
    assert layout_of(virtual) != layout_of(ours(v_shape(2), 8, "Ett|tt|tt|ttL"))


def test_a_checkpoint_without_what_older_versions_did_not_save() -> None:
    assert held(Namespace(pipeline_model_parallel_size=2, num_layers=2)) == [["E0"], ["1L"]]


def complaint(saved: Namespace, run: Namespace, unportable: str = "dp_reshardable") -> str | None:
    try:
        refuse_other_layout(run, saved, "/checkpoints", unportable)
    except ConfigurationError as error:
        return str(error)
    return None


V2 = ours(v_shape(2), 4, "Et|t|t|tL", pipeline_schedule="zb-v")
LINEAR2 = ours(linear(2), 4, pipeline_schedule="zb-h1")


@pytest.mark.parametrize(
    ("saved", "run", "was", "now"),
    [
        (V2, LINEAR2, "PP 2, placement v", "PP 2, placement linear"),
        (LINEAR2, V2, "PP 2, placement linear", "PP 2, placement v"),
        (V2, arguments(2, 4), "PP 2, placement v", "PP 2, placement linear"),
        (
            V2,
            arguments(2, 4, virtual_pipeline_model_parallel_size=2),
            "PP 2, placement v",
            "PP 2, placement interleaved (2 chunks a stage)",
        ),
        (arguments(4, 4), LINEAR2, "PP 4, placement linear", "PP 2, placement linear"),
        (
            arguments(2, 4, tensor_model_parallel_size=2),
            LINEAR2,
            "TP 2, PP 2, placement linear",
            "TP 1, PP 2, placement linear",
        ),
        (
            V2,
            ours(v_shape(2), 4, "E|tt|tt|L"),
            "PP 2, placement v, layers 1+1 | 1+1 on the ranks",
            "PP 2, placement v, layers 2+2 | 0+0 on the ranks",
        ),
        (
            ours(Placement(((0, 3), (2, 5), (1, 4))), 6, "Et|t|t|t|t|tL"),
            V2,
            "PP 3, placement [[1, 4], [0, 3], [2, 5]]",
            "PP 2, placement v",
        ),
    ],
)
def test_the_message_names_both_layouts(
    saved: Namespace, run: Namespace, was: str, now: str
) -> None:
    message = complaint(saved, run)
    assert message is not None
    assert message.startswith(
        f"--load /checkpoints was saved with {was}, this run has {now}, and its optimizer state is "
        "in the format dp_reshardable, which fits only the layout it was saved with. To convert "
        "it, repeat the command that saved it"
    )
    schedule = getattr(saved, "pipeline_schedule", None)
    assert (f"(--pipeline-schedule {schedule})" in message) == (schedule is not None)
    assert "--no-load-optim or --finetune" in message


def test_the_same_layout_is_not_refused() -> None:
    assert complaint(V2, ours(v_shape(2), 4, "Et|t|t|tL", pipeline_schedule="v-half")) is None
    assert complaint(arguments(2, 4), LINEAR2) is None


def test_megatrons_own_layouts_are_left_to_megatron() -> None:
    assert complaint(arguments(2, 4), arguments(4, 4)) is None
    ours_at_rest = arguments(4, 4, zero_bubble_positions=None, pipeline_schedule="megatron")
    assert complaint(ours_at_rest, arguments(2, 4)) is None


def test_files_of_ranks_have_no_optimizer_state_apart() -> None:
    message = complaint(V2, LINEAR2, "torch")
    assert message is not None
    assert "it consists of files for each rank (--ckpt-format torch)" in message
    assert "--no-load-optim" not in message


def test_a_model_to_start_from_is_called_by_its_flag() -> None:
    run = ours(linear(2), 4)
    run.load = None
    assert (complaint(V2, run, "torch") or "").startswith("--pretrained-checkpoint /checkpoints ")


def content(sharding: str | None) -> dict[str, Any]:
    """What a checkpoint says of its content, outside its tensors."""
    return {
        "content_metadata": {} if sharding is None else {"distrib_optim_sharding_type": sharding}
    }


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (content("dp_reshardable"), "dp_reshardable"),
        (content("dp_zero_gather_scatter"), "dp_zero_gather_scatter"),
        (content("fully_reshardable"), None),
        (content("fully_sharded_model_space"), None),
        (content(None), None),  # no distributed optimizer
        ({}, "dp_zero_gather_scatter"),  # from before the content was described
    ],
)
def test_formats(state: dict[str, Any], expected: str | None) -> None:
    assert unportable_format(LINEAR2, V2, state, "GLOBAL", release=False) == expected


def test_an_old_checkpoint_saved_in_parallel_or_without_a_distributed_optimizer() -> None:
    parallel = arguments(2, 4, ckpt_fully_parallel_save=True)
    assert unportable_format(LINEAR2, parallel, {}, "GLOBAL", release=False) is None
    plain = arguments(2, 4, use_distributed_optimizer=False)
    assert unportable_format(LINEAR2, plain, {}, "GLOBAL", release=False) is None


def test_what_is_not_loaded_does_not_matter() -> None:
    state = content("dp_reshardable")
    for run in (ours(linear(2), 4, finetune=True), ours(linear(2), 4, no_load_optim=True)):
        assert unportable_format(run, V2, state, "GLOBAL", release=False) is None
        # Files of ranks hold the model too.
        assert unportable_format(run, V2, {}, "LEGACY", release=False) == "torch"
    assert unportable_format(LINEAR2, V2, state, "GLOBAL", release=True) is None
    without = arguments(2, 4, no_save_optim=True)
    assert unportable_format(LINEAR2, without, state, "GLOBAL", release=False) is None


@pytest.mark.parametrize(
    ("had", "has", "remedy"),
    [
        (
            True,
            False,
            "was saved with --zero-bubble-bucket-all-stages, ",
        ),
        (False, True, "was saved without --zero-bubble-bucket-all-stages, "),
    ],
)
def test_a_checkpoint_of_other_buckets(had: bool, has: bool, remedy: str) -> None:
    def run(buckets: bool) -> Namespace:
        return ours(linear(2), 4, zero_bubble_bucket_all_stages=buckets)

    message = complaint(run(had), run(has))
    assert message is not None
    assert remedy in message
    assert f": {'add' if had else 'leave out'} --zero-bubble-bucket-all-stages" in message
    assert complaint(run(had), run(had)) is None
    assert complaint(run(had), run(has), "torch") is None
