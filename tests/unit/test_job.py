"""What a profile says of its job: enough to tell it from any other whose costs differ.

The checks are in scalars_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.scalars_checks")


def test_the_same_job_is_equal() -> None:
    assert check("differences", changes={}) == []
    assert check("differences", changes={"lr": 0.5, "train_iters": 7, "save": None}) == []
    check("it_survives_a_file")


@pytest.mark.parametrize(
    ("argument", "before", "value"),
    [
        ("hidden_size", 64, 128),
        ("seq_length", 32, 64),
        ("micro_batch_size", 2, 1),
        ("tensor_model_parallel_size", 1, 2),
        ("attention_dropout", 0.1, 0.0),
        ("recompute_granularity", None, "full"),
        ("recompute_modules", ["core_attn"], ["mlp"]),
        # The names of arguments, which are not those of a model's config.
        ("num_experts", None, 8),
        ("swiglu", False, True),
        ("squared_relu", False, True),
        ("quick_geglu", False, True),
        ("bias_gelu_fusion", True, False),
        ("bias_swiglu_fusion", True, False),
        ("no_persist_layer_norm", False, True),
        ("fp16_lm_cross_entropy", False, True),
        ("create_attention_mask_in_dataloader", True, False),
        ("decoder_first_pipeline_num_layers", None, 1),
        ("decoder_last_pipeline_num_layers", None, 1),
    ],
)
def test_what_differs_is_named(argument: str, before: Any, value: Any) -> None:
    differences = check("differences", changes={argument: value}, before={argument: before})
    assert len(differences) == 1
    for word in (argument, "not given" if before is None else str(before), str(value)):
        assert word in differences[0]
    assert check("differences", changes={argument: value}, before={argument: value}) == []


@pytest.mark.parametrize(
    ("one", "other"), [("Et|tttL", "Ettt|tL"), ([["t"], ["t", "t"]], [["t", "t"], ["t"]])]
)
def test_another_layout_is_another_job(one: Any, other: Any) -> None:
    layout = "pipeline_model_parallel_layout"
    assert check("differences", changes={layout: one}, before={layout: one}) == []
    (difference,) = check("differences", changes={layout: other}, before={layout: one})
    for word in (layout, str(one), str(other)):
        assert word in difference


def test_software_and_hardware_are_told() -> None:
    told = check("job")
    assert {"device", "torch", "megatron"} <= told.keys()
    assert told["device"].startswith("cpu ")
