"""Flags about chunks and layers: what is set for Megatron, and what contradicts the schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.arguments import schedule_for, validate
from tests.unit.cpu_mode import checks_of
from tests.unit.test_arguments import MICROBATCHES, arguments, complaint, saved
from zero_bubble.builders import build, forwards
from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Pass, Schedule

LAYOUT = "pipeline_model_parallel_layout"
VIRTUAL = "num_virtual_stages_per_pipeline_rank"
LAYERS_EACH = "num_layers_per_virtual_pipeline_stage"
FLAG = "--num-virtual-stages-per-pipeline-rank"


def set_for(name: str, **changes: Any) -> dict[str, Any]:
    """Megatron's arguments as `validate` leaves them."""
    args = arguments(pipeline_schedule=name, **changes)
    validate(args)
    return vars(args)


def asked_of_megatron(name: str, **changes: Any) -> Any:
    """The complaint, or None, where Megatron's own reading of a layout is needed."""
    given = vars(arguments(pipeline_schedule=name, **changes))
    return checks_of("tests.unit.megatron_checks")("complaint", arguments=given)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_one_chunk_a_stage_is_megatrons_own_split_where_layers_divide(name: str) -> None:
    args = set_for(name, num_layers=6)
    assert args.get(LAYOUT) is None
    assert args["zero_bubble_positions"] == [[0], [1]]


def test_one_chunk_a_stage_with_layers_left_over(capsys: pytest.CaptureFixture[str]) -> None:
    assert set_for("zb-h1", num_layers=5)[LAYOUT] == "Ettt|ttL"
    assert capsys.readouterr().out == (
        "zero-bubble: placement linear: rank 0 holds embedding, layers 1-3; rank 1 holds layers "
        "4-5, loss; as --pipeline-model-parallel-layout 'Ettt|ttL' says in the order of the model\n"
    )


def test_what_a_v_holds_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert set_for("zb-v", num_layers=5)[LAYOUT] == "Et|t|tt|tL"
    assert capsys.readouterr().out == (
        "zero-bubble: placement v: rank 0 holds layer 2 | layers 3-4; rank 1 holds embedding, "
        "layer 1 | layer 5, loss; as --pipeline-model-parallel-layout 'Et|t|tt|tL' says in the "
        "order of the model\n"
    )


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("zb-v", [[1, 2], [0, 3]]),
        ("v-half", [[1, 2], [0, 3]]),
        ("v-min", [[1, 2], [0, 3]]),
        ("interleaved", [[0, 2], [1, 3]]),
        ("zb-interleaved", [[0, 2], [1, 3]]),
    ],
)
def test_several_chunks_are_told_by_a_layout(name: str, positions: list[list[int]]) -> None:
    args = set_for(name, num_layers=4, overlap_p2p_comm=False)
    assert args[LAYOUT] == "Et|t|t|tL"
    assert args["zero_bubble_positions"] == positions
    # Megatron would refuse two stages otherwise.
    assert args["overlap_p2p_comm"] is True


@pytest.mark.parametrize(
    ("flags", "chunks"),
    [({VIRTUAL: 3}, 3), ({LAYERS_EACH: 2}, 3), ({VIRTUAL: 1}, 1), ({}, 2)],
)
def test_megatrons_flags_choose_the_chunks_of_interleaved(
    flags: dict[str, int], chunks: int
) -> None:
    args = set_for("interleaved", num_layers=12, **flags)
    assert [len(held) for held in args["zero_bubble_positions"]] == [chunks] * 2
    if chunks > 1:
        assert args[VIRTUAL] is args[LAYERS_EACH] is None
    schedule = schedule_for("interleaved", 2, MICROBATCHES, chunks)
    assert schedule == build("interleaved", 2, MICROBATCHES, chunks=chunks)


def test_account_flags_count_the_ends_as_layers() -> None:
    ends = {
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }
    args = set_for("zb-v", num_layers=6, **ends)
    assert args[LAYOUT] == "Et|tt|tt|tL"
    assert not any(args[name] for name in ends)
    # One chunk a stage: Megatron's own business, if it comes out even.
    args = set_for("zb-h1", num_layers=6, **ends)
    assert args.get(LAYOUT) is None
    assert all(args[name] for name in ends)


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        (
            "zb-h1",
            {VIRTUAL: 2},
            "--pipeline-schedule zb-h1 has 2 chunks in all, but "
            "--num-virtual-stages-per-pipeline-rank 2 makes 4: make it 1, or leave it out",
        ),
        (
            "zb-v",
            {VIRTUAL: 3},
            "--pipeline-schedule zb-v has 4 chunks in all, but "
            "--num-virtual-stages-per-pipeline-rank 3 makes 6: make it 2, or leave it out",
        ),
        (
            "zb-v",
            {LAYERS_EACH: 2, "num_layers": 4},
            "--pipeline-schedule zb-v has 4 chunks in all, but "
            "--num-layers-per-virtual-pipeline-stage 2 makes 2: leave it out",
        ),
        (
            "interleaved",
            {LAYERS_EACH: 3, "num_layers": 8},
            "--num-layers-per-virtual-pipeline-stage 3 does not cut 8 layers into chunks for 2 "
            "stages: use --num-virtual-stages-per-pipeline-rank, which spreads any number of "
            "layers",
        ),
        (
            "zb-v",
            {"num_layers": 3},
            "--num-layers 3 is too few for --pipeline-schedule zb-v on 2 stages, which has 4 "
            "chunks: use at least 4 layers, fewer stages, or a --pipeline-model-parallel-layout "
            "with chunks that have no layer",
        ),
        (
            "zb-h1",
            {"num_layers": 1},
            "--num-layers 1 is too few for --pipeline-schedule zb-h1 on 2 stages, which has 2 "
            "chunks: use at least 2 layers, fewer stages, or a --pipeline-model-parallel-layout "
            "with chunks that have no layer",
        ),
        (
            "zb-v",
            {"decoder_first_pipeline_num_layers": 1},
            "--pipeline-schedule zb-v has the placement v, of which "
            "--decoder-first-pipeline-num-layers 1 does not tell which layers each chunk has: use "
            "--pipeline-model-parallel-layout, in the order of the model",
        ),
        ("zb-v", {"num_layers": None}, "--num-layers is missing"),
        *(("interleaved", {VIRTUAL: bad}, f"{FLAG} {bad}: must be at least 1") for bad in (0, -1)),
        (
            "interleaved",
            {VIRTUAL: 1_000_000, "num_layers": 8},
            f"--num-layers 8 is too few for {FLAG} 1000000 on 2 stages, which has 2000000 chunks: "
            "use at least 2000000 layers, fewer stages, or a --pipeline-model-parallel-layout with "
            "chunks that have no layer",
        ),
        (
            "interleaved",
            {VIRTUAL: 2, LAYERS_EACH: 2, "num_layers": 8},
            f"{FLAG} 2 and --num-layers-per-virtual-pipeline-stage 2 both say which chunks there "
            "are: give one of them",
        ),
        (
            "zb-v",
            {"dataloader_save": "state"},
            "--pipeline-schedule zb-v does not work with --dataloader-save state: Megatron saves "
            "the state of the loader on the first rank, and here the last one reads the data; "
            "leave it out",
        ),
    ],
)
def test_contradictions(name: str, flags: dict[str, Any], message: str) -> None:
    assert complaint(pipeline_schedule=name, **flags) == message


def test_chunks_of_a_checkpoint_do_not_bind_a_run_that_takes_its_arguments() -> None:
    taken = {LAYERS_EACH: 1, "use_mp_args_from_checkpoint_args": True}
    args = set_for("zb-h1", **taken)
    assert args["zero_bubble_positions"] == [[0], [1]]
    assert args[LAYERS_EACH] is None  # or Megatron would build several chunks
    assert set_for("zb-v", **taken)["zero_bubble_positions"] == [[1, 2], [0, 3]]


def test_one_chunk_a_stage_leaves_megatrons_uneven_flags_to_it() -> None:
    args = set_for("zb-h1", num_layers=5, decoder_first_pipeline_num_layers=1)
    assert args.get(LAYOUT) is None
    # A hybrid model's layers are counted by Megatron, later.
    args = set_for("zb-h1", num_layers=None, hybrid_layer_pattern="M*M*|M*M*")
    assert args.get(LAYOUT) is None


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("zb-h1", "Ett|ttL", None),
        ("zb-v", "Et|t|t|tL", None),
        ("zb-v", "Et||tt|tL", None),
        ("interleaved", "Et||t|t||tL", None),
        (
            "zb-v",
            "Ett|ttL",
            "--pipeline-schedule zb-v has 4 chunks in all, but --pipeline-model-parallel-layout "
            "Ett|ttL makes 2: give it 4 parts, or leave it out",
        ),
        (
            "zb-h1",
            "Et|t|t|tL",
            "--pipeline-schedule zb-h1 has 2 chunks in all, but --pipeline-model-parallel-layout "
            "Et|t|t|tL makes 4: give it 2 parts, or leave it out",
        ),
        ("zb-v", "Et|(t|)*2tL", None),
        (
            "zb-v",
            "Et|t|t|ttL",
            "--pipeline-model-parallel-layout Et|t|t|ttL has 5 layers (t), but --num-layers is 4: "
            "make the two equal",
        ),
        *(
            (
                "zb-v",
                bad,
                f"--pipeline-model-parallel-layout {bad}: a model begins with the embedding and "
                "ends with the loss; write one E at the beginning and one L at the end",
            )
            for bad in ("t|t|t|tL", "Et|t|t|t", "tE|t|t|tL", "Et|t|tL|t", "Et|Et|t|tL")
        ),
        (
            "interleaved",
            "Et|tt|tL",
            "--pipeline-model-parallel-layout Et|tt|tL makes 3 chunks, which do not come out even "
            "over --pipeline-model-parallel-size 2",
        ),
    ],
)
def test_a_layout_is_in_the_order_of_the_model(name: str, layout: str, message: str | None) -> None:
    assert asked_of_megatron(name, **{LAYOUT: layout}) == message


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({VIRTUAL: 2}, f"and {FLAG} 2 both say which chunks there are: give one of them"),
        (
            {"decoder_last_pipeline_num_layers": 1},
            "says which layers each chunk has: leave --decoder-last-pipeline-num-layers 1 out",
        ),
        (
            {"account_for_loss_in_pipeline_split": True},
            "says which layers each chunk has: leave --account-for-loss-in-pipeline-split out",
        ),
    ],
)
def test_nothing_is_ignored_beside_a_layout(flags: dict[str, Any], said: str) -> None:
    layout = "Et|t|t|tL"
    message = asked_of_megatron("zb-v", **{LAYOUT: layout}, **flags)
    assert message == f"--pipeline-model-parallel-layout {layout} {said}"


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("zb-v", "Et|t|t|tmL", None),
        ("zb-h1", "Ett|tt|mL", "has 2 chunks in all"),
        ("zb-v", "Et|t|t|tL", "has 0 layers of multi-token prediction (m), but --mtp-num-layers"),
        ("zb-v", "Et|t|t|tmmL", "has 2 layers of multi-token prediction (m), but --mtp-num-layers"),
        ("zb-v", "Et|t|tm|tL", "in the last part only, right before the loss; let the layout end"),
        ("zb-v", "Et|t|t|mtL", "in the last part only, right before the loss; let the layout end"),
    ],
)
def test_multi_token_prediction_in_a_layout(name: str, layout: str, said: str | None) -> None:
    message = asked_of_megatron(name, **{LAYOUT: layout}, mtp_num_layers=1)
    assert message is None if said is None else said in message


def test_multi_token_prediction_goes_before_the_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert set_for("zb-v", mtp_num_layers=2)[LAYOUT] == "Et|t|t|tmmL"
    assert "layer 4, multi-token prediction, loss" in capsys.readouterr().out


def test_a_layout_with_a_wrong_letter() -> None:
    message = asked_of_megatron("zb-v", **{LAYOUT: "Et|x|t|tL"})
    assert message.startswith("--pipeline-model-parallel-layout Et|x|t|tL: Invalid layer character")


def test_one_chunk_a_stage_out_of_order_is_told_by_a_layout(tmp_path: Path) -> None:
    """Megatron's own split would number the layers by rank."""
    placement = Placement(((0,), (2,), (1,)))
    file = saved(forwards_then_backwards(placement, MICROBATCHES), tmp_path)
    three = {"num_layers": 6, "pipeline_model_parallel_size": 3, "world_size": 3}
    args = set_for(file, **three)
    assert args["zero_bubble_positions"] == [[1], [0], [2]]
    assert args[LAYOUT] == "Ett|tt|ttL"
    message = complaint(pipeline_schedule=file, decoder_first_pipeline_num_layers=1, **three)
    assert "has the placement custom, of which --decoder-first-pipeline-num-layers 1" in message


def test_a_file_of_any_placement(tmp_path: Path) -> None:
    """Also one whose stages hold different numbers of chunks: the others are empty in Megatron."""
    placement = Placement(((0, 4), (1,), (2, 3)))
    schedule = forwards_then_backwards(placement, MICROBATCHES)
    args = set_for(
        saved(schedule, tmp_path),
        num_layers=6,
        pipeline_model_parallel_size=3,
        world_size=3,
    )
    assert args["zero_bubble_positions"] == [[2, 3], [1, None], [0, 4]]
    assert args[LAYOUT] == "Et|tt|t|t|tL|"


def forwards_then_backwards(placement: Placement, microbatches: int) -> Schedule:
    """All F's, and backwards in the opposite order of the microbatches' F's on every stage."""
    there = forwards(placement, microbatches)
    rows = []
    for stage, row in enumerate(there.passes):
        depth = placement.positions[stage]
        back = sorted(row, key=lambda one: (one.microbatch - depth[one.chunk], one.microbatch))
        rows.append((*row, *(Pass(Kind.BW, one.microbatch, one.chunk) for one in back)))
    return Schedule(placement, microbatches, tuple(rows))
