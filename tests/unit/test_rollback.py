"""Steps that go ahead and are committed or undone, against twins stepped by Megatron alone.

What is compared: parameters of the model and of the optimizer, moments, counters, gradients and
loss scale, in every bit. The checks are in rollback_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.unit.cpu_mode import checks_of

ROOT = Path(__file__).parents[2]

check = checks_of("tests.unit.rollback_checks")

PLACES = [
    (sharding, inner)
    for sharding in ("plain", "distributed", "overlap")
    for inner in ("adam", "torch", "foreach", "fused", "sgd", "momentum")
    # Megatron has no distributed optimizer with SGD.
    if sharding == "plain" or inner not in ("sgd", "momentum")
]
QUICK = [
    ("deferred", "bf16", "plain", "foreach"),
    ("deferred", "fp16", "distributed", "torch"),
    ("deferred", "fp32", "overlap", "fused"),
    ("sliced", "bf16", "overlap", "adam"),
    ("sliced", "fp16", "plain", "fused"),
    ("sliced", "fp32", "distributed", "foreach"),
    ("sliced", "bf16", "plain", "sgd"),
    ("sliced", "fp32", "plain", "momentum"),
    ("snapshot", "bf16", "distributed", "fused"),
    ("snapshot", "fp16", "overlap", "foreach"),
    ("snapshot", "fp32", "plain", "torch"),
    ("snapshot", "fp16", "plain", "momentum"),
    ("host", "bf16", "overlap", "torch"),
    ("host", "fp32", "plain", "adam"),
]
DISTRIBUTED = pytest.param("distributed", marks=pytest.mark.slow)
BF16 = {"precision": "bf16", "sharding": "plain", "inner": "adam"}


@pytest.mark.parametrize(
    ("kind", "precision", "sharding", "inner"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow)
        for kind, precision, place in itertools.product(
            ("deferred", "sliced", "snapshot", "host"), ("bf16", "fp16", "fp32"), PLACES
        )
        for case in [(kind, precision, *place)]
    ],
)
def test_every_step_is_megatrons_own(kind: str, precision: str, sharding: str, inner: str) -> None:
    check("check_as_a_plain_step", kind=kind, precision=precision, sharding=sharding, inner=inner)


@pytest.mark.parametrize("sharding", ["plain", "overlap", DISTRIBUTED])
@pytest.mark.parametrize("kind", ["sliced", "snapshot"])
def test_two_chained_optimizers(kind: str, sharding: str) -> None:
    settings = {"precision": "fp16", "inner": "adam", "experts": True}
    check("check_as_a_plain_step", kind=kind, sharding=sharding, **settings)


@pytest.mark.parametrize("sharding", ["plain", "overlap", DISTRIBUTED])
@pytest.mark.parametrize("kind", ["sliced", "snapshot"])
def test_some_parameters_in_32_bits(kind: str, sharding: str) -> None:
    settings = {"precision": "bf16", "inner": "torch", "mixed": True}
    check("check_as_a_plain_step", kind=kind, sharding=sharding, **settings)


@pytest.mark.parametrize("elements", [4096, 3 * 4096])
@pytest.mark.parametrize(
    "sizes",
    [
        [[1], [4096], [4097], [3 * 4096]],
        [[5, 4096, 20_000, 3], [7, 7, 100_000]],
        [[4095, 1, 4096, 1], [0, 8192]],
        [[10, -30_000, 10], [-4096, 5000]],
    ],
)
def test_slices_are_whole_vectors(sizes: list[list[int]], elements: int) -> None:
    check("check_batches", elements=elements, sizes=sizes)


@pytest.mark.parametrize("inner", ["writing", "torch"])
@pytest.mark.parametrize("kind", ["sliced", "snapshot"])
def test_weight_decay_in_the_gradient(kind: str, inner: str) -> None:
    """A fused kernel may then leave the sum in the gradient."""
    settings = BF16 | {"inner": inner}
    check("check_as_a_plain_step", kind=kind, decoupled=False, **settings)


@pytest.mark.slow
def test_shards_of_two_ranks(tmp_path: Path) -> None:
    run_ranks(
        [str(Path(__file__).with_name("rollback_rank.py"))],
        2,
        logs=tmp_path,
        time_limit=200,
        environment={"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(
    ("sabotage", "kind", "changed"),
    [
        ("counters are not set back", "snapshot", {}),
        ("counters are shared", "deferred", {"inner": "torch"}),
        ("the model is not written", "deferred", {}),
        ("the model's tensors are stepped", "deferred", {"precision": "fp32"}),
        ("the step is not made", "deferred", {}),
        ("gradients are taken for safe", "sliced", {"inner": "writing", "decoupled": False}),
        ("gradients are taken for safe", "snapshot", {"inner": "writing", "decoupled": False}),
        ("cuts anywhere", "sliced", {"inner": "fused", "precision": "fp32"}),
    ],
)
def test_the_comparison_finds_what_is_broken(
    sabotage: str, kind: str, changed: dict[str, object]
) -> None:
    assert check("found_wrong_with", sabotage=sabotage, kind=kind, **(BF16 | changed))


@pytest.mark.parametrize(
    ("kind", "precision", "kept", "scratch"),
    [
        ("deferred", "bf16", 0, 12),
        ("deferred", "fp32", 4, 12),
        ("snapshot", "bf16", 12, 0),
        ("snapshot", "fp32", 12, 0),
        ("host", "bf16", 12, 0),
        ("inplace", "bf16", 0, 0),
    ],
)
def test_bytes_a_parameter(kind: str, precision: str, kept: int, scratch: int) -> None:
    """Adam's main parameter and moments have 4 bytes each."""
    settings = BF16 | {"precision": precision}
    memory = check("memory_of", kind=kind, **settings)
    assert memory["kept"] == kept * memory["elements"]
    # One slice holds a whole group, and the weights are much larger than the rest.
    assert 0.97 * scratch * memory["elements"] <= memory["scratch"]
    assert memory["scratch"] <= scratch * memory["elements"]


def test_scratch_is_that_of_one_slice() -> None:
    assert check("memory_of", kind="sliced", **BF16)["scratch"] == 12 * 4096


def test_gradients_are_kept_where_a_step_may_write_them() -> None:
    memory = check("memory_of", kind="snapshot", decoupled=False, **BF16)
    assert memory["kept"] == 16 * memory["elements"]


def test_torchs_counters_count_as_kept() -> None:
    memory = check("memory_of", kind="inplace", **(BF16 | {"inner": "torch"}))
    assert memory["kept"] == 4 * memory["tensors"]


@pytest.mark.parametrize("inner", ["adam", "torch", "momentum"])
@pytest.mark.parametrize("kind", ["deferred", "snapshot"])
def test_no_step_without_one_before(kind: str, inner: str) -> None:
    said = check("complaint_without_a_step", kind=kind, **(BF16 | {"inner": inner}))
    assert "an ordinary step before it" in said
    assert "parameter 0 of group 0, shape (131, 67)" in said


def test_sgd_without_momentum_needs_none_before() -> None:
    events = ("ok", "clip", "skip", "ok")
    settings = BF16 | {"inner": "sgd"}
    check("check_as_a_plain_step", kind="deferred", events=events, **settings)


def test_host_memory_is_used_again() -> None:
    assert check("host_buffers_are_used_again", **BF16)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "paper"}, "use one of deferred, snapshot, inplace"),
        ({"on_host": True}, "use --rollback snapshot"),
        ({"config": {"use_precision_aware_optimizer": True}}, "--use-precision-aware-optimizer"),
        ({"config": {"optimizer_cpu_offload": True}}, "--optimizer-cpu-offload"),
        ({"config": {"optimizer_cuda_graph": True}}, "--optimizer-cuda-graph"),
        (
            {"config": {"overlap_param_gather_with_optimizer_step": True}},
            "--overlap-param-gather-with-optimizer-step",
        ),
        ({"ddp": {"use_megatron_fsdp": True}}, "--use-megatron-fsdp"),
        ({"ddp": {"fp8_param_gather": True}}, "--fp8-param-gather"),
        ({"optimizer_class": "member"}, "DistributedOptimizer, not a ChainedOptimizer"),
        ({"optimizer_class": "LayerWise"}, "cannot undo a step of LayerWise"),
        ({"inner_class": "Adagrad"}, "the optimizer is Adagrad"),
    ],
)
def test_what_cannot_be_undone_is_refused(changed: dict[str, object], said: str) -> None:
    assert said in check("refusal", **changed)


@pytest.mark.parametrize("kind", ["deferred", "snapshot", "inplace"])
def test_the_rest_is_not_refused(kind: str) -> None:
    assert check("refusal", kind=kind) is None
