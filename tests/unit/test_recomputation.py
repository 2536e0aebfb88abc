"""R passes against Megatron's own recomputation: the same bits, whenever they run.

The checks themselves are in recomputation_checks.py, which runs in a process in CPU mode.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.recomputation_checks")


@pytest.mark.parametrize(
    "order",
    [
        "F0 R0 B0 F1 R1 B1 F2 R2 B2",
        "F0 F1 F2 R0 B0 R1 B1 R2 B2",
        "F0 F1 F2 R2 R1 R0 B0 B1 B2",
        "F0 F1 R1 F2 R0 B0 B1 R2 B2",
        "F0 F1 F2 R1 B0 B1 B2",
    ],
)
def test_bits_are_those_of_recomputation_in_the_backward(order: str) -> None:
    check("compare", order=order.split())


def test_recomputed_outputs_are_not_kept() -> None:
    check("keeps_no_outputs")


def test_what_no_r_will_compute_is_left_to_megatron() -> None:
    check("left_to_megatron")
