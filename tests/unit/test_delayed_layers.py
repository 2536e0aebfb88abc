"""Layers of Transformer Engine, which split B and W by themselves, driven by ours.

Transformer Engine needs a GPU. What is tested here is our side of its interface, with a stand-in
(stand_in_te.py) under Megatron's own wrappers. `tools/test_transformer_engine.py` runs the same
tests over its real Python.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.delayed_layer_checks", engine=True)
check_gpt = checks_of("tests.unit.delayed_gpt_checks", engine=True)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
@pytest.mark.parametrize("bias", ["none", "inside", "outside"])
@pytest.mark.parametrize("kind", ["linear", "norm and linear", "grouped"])
def test_gradients_are_those_of_the_undelayed_layer_and_weights_wait_for_w(
    kind: str, bias: str, fused: bool
) -> None:
    check("compare", kind=kind, dtype="bf16", bias=bias, fused=fused)


def test_a_layer_used_twice_in_a_microbatch_is_summed_as_by_autograd() -> None:
    check("compare", kind="linear", dtype="bf16", bias="inside", fused=False, uses=2)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap_grad_reduce"])
def test_a_whole_gpt(overlap: bool, fused: bool) -> None:
    check_gpt("whole_gpt", dtype="bf16", overlap=overlap, fused=fused)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
def test_without_w_passes_weights_are_computed_within_b(fused: bool) -> None:
    check_gpt("whole_gpt", dtype="fp32", overlap=True, fused=fused, split=False)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
@pytest.mark.parametrize("kind", ["experts", "recomputed"])
def test_other_models(kind: str, fused: bool) -> None:
    check_gpt("whole_gpt", dtype="bf16", overlap=True, fused=fused, kind=kind)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("bias", ["inside", "outside"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_what_does_not_train(kind: str, bias: str, what: str, fused: bool) -> None:
    check("frozen", kind=kind, bias=bias, fused=fused, what=what)


@pytest.mark.parametrize(
    "what",
    [
        "shares",
        "left_over_work_is_forgotten",
        "the_rest_is_named",
    ],
)
def test_besides(what: str) -> None:
    check(what)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused accumulation"])
@pytest.mark.parametrize("kind", ["linear", "norm and linear", "grouped"])
def test_what_is_held_until_w(kind: str, fused: bool) -> None:
    check("what_is_held", kind=kind, fused=fused)


@pytest.mark.parametrize("what", ["the_config", "the_arguments", "out_of_order"])
def test_of_the_whole(what: str) -> None:
    check_gpt(what)
