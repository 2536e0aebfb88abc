"""What differs between versions of Megatron. That it fits each is what the other tests show."""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of
from tests.versions import since

check = checks_of("tests.unit.compat_checks", alone=True)

MODELS: dict[str, list[str]] = {
    "plain": [],
    "untied": ["--untie-embeddings-and-output-weights"],
    "modern": [
        *("--swiglu", "--ffn-hidden-size", "24", "--normalization", "RMSNorm"),
        *("--position-embedding-type", "rope"),
    ],
    "experts": ["--num-experts", "4", "--moe-router-topk", "2", "--moe-layer-freq", "[0,1]"],
    "several_tokens": ["--mtp-num-layers", "1", "--position-embedding-type", "rope"],
}


@since("0.19", "a builder of GPT models to compare with")
@pytest.mark.parametrize("model", MODELS)
def test_the_model_of_older_versions_is_the_one_of_megatrons_builder(model: str) -> None:
    older, own = check("both_builders", flags=MODELS[model])
    assert older == own


@since("0.19", "a builder of GPT models to compare with")
def test_models_that_differ_are_told_apart() -> None:
    """Else the comparison above would say nothing."""
    found = {check("both_builders", flags=flags)[0] for flags in MODELS.values()}
    assert len(found) == len(MODELS)


def test_statistics_of_experts_as_dictionaries() -> None:
    assert check("statistics_in_dictionaries") == {
        "sums": {"known": [4.0, 4.0], "new": [1.0, 1.0]},
        "groups": {"known": "yours", "new": "mine"},
        "added": [3.0, 3.0],
    }


def test_the_newer_name_of_a_function_is_preferred() -> None:
    older, newer = {"get_main_grads_for_grad_norm": [1.0]}, {"get_grads_for_grad_norm": [2.0]}
    assert check("gradients", **older) == [1.0]
    assert check("gradients", **newer) == [2.0]
    assert check("gradients", **older, **newer) == [2.0]


def test_an_evaluation_has_the_microbatches_of_training_where_no_flag_says_otherwise() -> None:
    assert check("microbatch_sizes") == (5, 2)
