"""Split linears against Megatron's own: the same bits, W when it is asked for, nothing more held.

The checks themselves are in split_linear_checks.py, which runs in a process in CPU mode.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.unit.cpu_mode import checks_of

ROOT = Path(__file__).parents[2]


check = checks_of("tests.unit.split_linear_checks")


@pytest.mark.parametrize("ddp", [True, False], ids=["main_grad", "grad"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_gradients_are_those_of_the_unsplit_layer_and_weights_wait_for_w(
    kind: str, dtype: str, bias: bool, ddp: bool
) -> None:
    check("compare", kind=kind, dtype=dtype, bias=bias, ddp=ddp)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_transposed_output_gradient_gives_the_bits_of_the_unsplit_layer(dtype: str) -> None:
    """Then it matters over which dimensions, and in which order, the bias's gradient is summed."""
    check("compare", kind="column", dtype=dtype, transposed=True)


def test_bf16_main_gradients_are_those_of_the_unsplit_layer() -> None:
    check("compare", kind="column", dtype="bf16", fp32_main_grad=False)


@pytest.mark.parametrize("ddp", [True, False], ids=["main_grad", "grad"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_weight_used_twice_in_a_microbatch_is_summed_as_by_autograd(
    dtype: str, ddp: bool
) -> None:
    check("compare", kind="column", dtype=dtype, ddp=ddp, uses=2)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap_grad_reduce"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_whole_gpt_with_its_output_layer(dtype: str, overlap: bool) -> None:
    check("whole_gpt", dtype=dtype, overlap=overlap)


@pytest.mark.parametrize("strided", [False, True], ids=["", "strided gradient"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_between_b_and_w_only_input_and_output_gradient_are_held(kind: str, strided: bool) -> None:
    check("what_is_held", kind=kind, strided=strided)


@pytest.mark.parametrize(
    "case",
    ["frozen before", "frozen after", "evaluation", "input without gradient", "not deferring"],
)
def test_what_cannot_be_split_is_megatrons_own(case: str) -> None:
    check("falls_back", case=case)


def test_splitting_again_changes_nothing() -> None:
    check("splitting_again_changes_nothing")


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("dtype", "fp32_main_grad"), [("fp32", True), ("bf16", True), ("bf16", False)]
)
def test_fused_accumulation_adds_what_megatrons_own_adds(
    dtype: str, fp32_main_grad: bool, tied: bool, uses: int
) -> None:
    """With a stand-in for Apex's fused_weight_gradient_mlp_cuda: the same two functions with the
    same arguments, in plain torch. It shows which kernel is called with what, not its rounding.
    Tied embeddings' weight has zero_out_wgrad: what autograd would add besides has to be zero.
    """
    check(
        "compare_fused",
        dtype=dtype,
        fp32_main_grad=fp32_main_grad,
        uses=uses,
        zero_out_wgrad=tied,
    )


@pytest.mark.slow
def test_tensor_parallel_layers_with_and_without_sequence_parallelism(tmp_path: Path) -> None:
    """Two ranks, each comparing with the unsplit layers on the same ranks."""
    run_ranks(
        [str(Path(__file__).with_name("tensor_parallel_rank.py"))],
        2,
        logs=tmp_path,
        time_limit=120,
        environment={"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )
    for rank in range(2):
        log = (tmp_path / f"rank{rank}.log").read_text()
        assert log.count("same: ") == 8  # two kinds of layer, two dtypes, with and without
        assert log.count("filled: ") == 4
