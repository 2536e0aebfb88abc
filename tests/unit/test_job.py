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
    ("argument", "value", "expected"),
    [
        ("hidden_size", 128, "hidden_size 64, not 128"),
        ("seq_length", 64, "seq_length 32, not 64"),
        ("micro_batch_size", 1, "micro_batch_size 2, not 1"),
        ("tensor_model_parallel_size", 2, "tensor_model_parallel_size 1, not 2"),
        ("attention_dropout", 0.0, "attention_dropout 0.1, not 0.0"),
        ("recompute_granularity", "full", "recompute_granularity nothing, not full"),
        ("recompute_modules", ["mlp"], "recompute_modules ['core_attn'], not ['mlp']"),
    ],
)
def test_what_differs_is_named(argument: str, value: Any, expected: str) -> None:
    assert check("differences", changes={argument: value}) == [expected]


@pytest.mark.parametrize(
    ("one", "other"), [("Et|tttL", "Ettt|tL"), ([["t"], ["t", "t"]], [["t", "t"], ["t"]])]
)
def test_another_layout_is_another_job(one: Any, other: Any) -> None:
    layout = "pipeline_model_parallel_layout"
    assert check("differences", changes={layout: one}, before={layout: one}) == []
    assert check("differences", changes={layout: other}, before={layout: one}) == [
        f"{layout} {one}, not {other}"
    ]


def test_software_and_hardware_are_told() -> None:
    told = check("job")
    assert {"device", "torch", "megatron"} <= told.keys()
    assert told["device"].startswith("cpu ")
