"""Which layers a schedule that splits takes, and what is said of others."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.zero_bubble.arguments import validate
from tests.unit.orders import parse
from tests.unit.test_arguments import STAGES, arguments, complaint, saved
from zero_bubble.builders import build

ENGINE = {"transformer_impl": "transformer_engine"}


def engine_of(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine as far as arguments see it; with None it cannot be imported."""
    package: Any = None
    if version is not None:
        package = ModuleType("transformer_engine")
        package.__version__ = version
    monkeypatch.setitem(sys.modules, "transformer_engine", package)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize(
    ("version", "found"),
    [
        (None, "it is not installed"),
        ("unknown", "the version of the installed one is not known (unknown)"),
        ("2.7.0", "the installed one is 2.7.0"),
        ("1.13.0+cu12", "the installed one is 1.13.0+cu12"),
    ],
)
def test_split_schedules_need_layers_that_can_be_split(
    name: str, version: str | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_of(version, monkeypatch)
    assert complaint(pipeline_schedule=name, **ENGINE) == (
        f"--pipeline-schedule {name} splits the backward pass of Transformer Engine's layers from "
        f"2.8 on, but {found}, and --transformer-impl is transformer_engine: add "
        "--transformer-impl local"
    )
    message = complaint(pipeline_schedule=name, transformer_impl="inference_optimized")
    assert message.startswith(f"--pipeline-schedule {name} splits the backward pass")
    assert message.endswith("is inference_optimized: add --transformer-impl local")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import transformer_engine_torch", "importing it fails (No module named"),
        ("raise OSError('no library')", "importing it fails (OSError: no library)"),
        ("assert False, 'no driver'", "importing it fails (AssertionError: no driver)"),
        ("raise SystemExit(3)", "importing it fails (SystemExit: 3)"),
        ("", "the version of the installed one is not known (it has none)"),
    ],
)
def test_a_broken_transformer_engine_is_named_with_the_reason(
    text: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformer_engine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    message = complaint(pipeline_schedule="zb-h1", **ENGINE)
    assert f"from 2.8 on, but {found}" in message
    assert message.endswith("add --transformer-impl local")
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)


@pytest.mark.parametrize("version", ["2.8.0", "2.8rc1", "v2.9", "2.10.0.dev0+abc", "3.0"])
def test_layers_that_delay_their_weight_gradients_are_told_to(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_of(version, monkeypatch)
    for given, expected in (
        ({"pipeline_schedule": "zb-h1", "fp8": "hybrid"} | ENGINE, True),
        ({"pipeline_schedule": "zb-v", "context_parallel_size": 2, "world_size": 4} | ENGINE, True),
        ({"pipeline_schedule": "1f1b"} | ENGINE, False),
        ({"pipeline_schedule": None} | ENGINE, False),
        ({"pipeline_schedule": "zb-h1"}, False),
    ):
        job = arguments(**given)
        validate(job)
        assert job.zero_bubble_delays is expected, given


@pytest.mark.parametrize(
    "attribute",
    [
        "tp_comm_overlap",
        "use_transformer_engine_op_fuser",
        "use_cpu_initialization",
        "overlap_dispatch_backward_with_experts_wgrad",
    ],
)
def test_what_keeps_transformer_engine_from_delaying_is_refused(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_of("2.20.2", monkeypatch)
    message = complaint(pipeline_schedule="zb-h1", **ENGINE, **{attribute: True})
    flag = "--" + attribute.replace("_", "-")
    assert message.startswith(
        "--pipeline-schedule zb-h1 --transformer-impl transformer_engine does not work with "
        f"{flag}: "
    )
    assert message.endswith("; leave it out")
    validate(arguments(pipeline_schedule="1f1b", **ENGINE, **{attribute: True}))


def test_transformer_engine_needs_microbatches_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine_of("2.20.2", monkeypatch)
    row = "0F0 0F1 0I0 0I1 0W1 0W0"
    path = saved(parse(build("zb-h1", 2, 2).placement, 2, f"{row}\n{row}"), tmp_path)
    message = complaint(pipeline_schedule=path, global_batch_size=4, **ENGINE)
    assert message.startswith(f"--pipeline-schedule {path} is not in the order of microbatches")
    assert "(stage 0, 0W0" in message
    assert message.endswith("use another schedule, or add --transformer-impl local")


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fused_schedules_take_any_layers(name: str) -> None:
    validate(arguments(pipeline_schedule=name, transformer_impl="transformer_engine"))


@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"context_parallel_size": 2, "world_size": 2 * STAGES}, "--context-parallel-size 2"),
        ({"fp8": "hybrid"}, "--fp8-format hybrid"),
        ({"fp4": "e2m1"}, "--fp4-format e2m1"),
    ],
)
def test_what_only_transformer_engine_has_is_not_split(
    name: str, given: dict[str, Any], named: str
) -> None:
    assert complaint(pipeline_schedule=name, **given) == (
        f"--pipeline-schedule {name} splits the backward pass of Megatron's local layers, but "
        f"{named} needs those of Transformer Engine: leave it out, or use --transformer-impl "
        "transformer_engine"
    )
    validate(arguments(pipeline_schedule="1f1b", **given))
