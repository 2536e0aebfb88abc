"""The inverse of AdamW's step: close after ordinary gradients, never silently wrong after spikes.

The checks are in rollback_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.rollback_checks")


@pytest.mark.parametrize("inner", ["adam", "torch", "foreach", "fused"])
def test_an_ordinary_step_is_undone_but_for_rounding(inner: str) -> None:
    off = check("after_a_spike", spike=1.0, inner=inner)
    assert 0 < off["main"] < 1e-4  # learning rates
    assert 0 < off["moments"] < 1e-6


def test_moments_are_lost_as_a_spike_grows() -> None:
    """Rounding takes 2^-24 of a second moment that has grown by the spike's square."""
    off = [check("after_a_spike", spike=spike)["moments"] for spike in (1.0, 1e2, 1e3)]
    assert off[1] > 100 * off[0]
    assert off[2] > 10 * off[1]


@pytest.mark.parametrize("spike", [1e4, 1e8, float("inf")])
def test_a_spike_that_cannot_be_undone_is_an_error(spike: float) -> None:
    said = check("spike_is_refused", spike=spike)
    assert "parameter 0 of group 0, shape (131, 67)" in said
    assert "--rollback deferred" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"decoupled": False}, "adds weight decay to the gradient"),
        ({"decoupled": False, "inner": "torch", "sharding": "plain"}, "adds weight decay"),
        ({"sharding": "plain", "inner": "momentum"}, "the optimizer is SGD"),
        ({"groups": {"betas": (0.0, 0.95)}}, "--adam-beta1"),
        ({"groups": {"amsgrad": True}, "inner": "torch"}, "amsgrad"),
    ],
)
def test_what_has_no_inverse_is_refused(changed: dict[str, object], said: str) -> None:
    assert said in check("refusal", kind="inplace", **changed)
