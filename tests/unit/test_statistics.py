"""What ranks tell each other of their gradients, and what follows from it, against Megatron.

The checks are in statistics_checks.py and verdict_checks.py, in a process in CPU mode. `host` and
`device` are the two ways in which Megatron takes the root of a norm and scales by it, without and
with Transformer Engine.
"""

from __future__ import annotations

import pytest

from tests.unit.cpu_mode import checks_of
from tests.versions import since

check = checks_of("tests.unit.statistics_checks")
verdict = checks_of("tests.unit.verdict_checks")

TOO_LARGE = since("0.18", "--grad-norm-skip-threshold")
TAILS = pytest.mark.parametrize("kind", ["host", "device"])


@TAILS
def test_the_norm_of_one_rank_is_megatrons(kind: str) -> None:
    check("norm_of_one_rank", kind=kind)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@TAILS
def test_the_norm_of_many_ranks_is_megatrons_but_for_its_roundings(kind: str, ranks: int) -> None:
    check("norm_of_many_ranks", kind=kind, ranks=ranks)


@TAILS
def test_the_norm_of_chained_optimizers_is_megatrons(kind: str) -> None:
    check("norm_of_megatrons_chains", kind=kind)


def test_the_order_in_which_ranks_come_is_no_matter() -> None:
    check("order_of_ranks")


@TAILS
def test_what_is_clipped_is_what_megatron_clips(kind: str) -> None:
    verdict("what_is_clipped", kind=kind)


@pytest.mark.parametrize(
    ("event", "precision", "sharding", "experts"),
    [
        ("calm", "bf16", "plain", False),
        ("calm", "fp16", "distributed", True),
        ("clip", "fp32", "plain", False),
        ("clip", "fp16", "plain", True),
        ("clip", "bf16", "distributed", True),
        ("overflow", "fp16", "plain", False),
        ("overflow", "fp16", "distributed", True),
        pytest.param("too large", "bf16", "plain", True, marks=TOO_LARGE),
        pytest.param("too large", "fp16", "distributed", False, marks=TOO_LARGE),
        ("inf", "fp16", "plain", False),
        ("inf", "fp16", "plain", True),
        ("not finite", "bf16", "plain", False),
        ("not finite", "fp32", "distributed", True),
    ],
)
def test_each_verdict_and_what_follows_is_megatrons_step(
    event: str, precision: str, sharding: str, experts: bool
) -> None:
    verdict("a_step_in_parts", event=event, precision=precision, sharding=sharding, experts=experts)


def test_ranks_outside_a_group_do_not_count() -> None:
    verdict("ranks_that_count")


@TAILS
def test_what_speaks_against_a_step_is_not_outweighed_by_later_stages(kind: str) -> None:
    seen = verdict("later_rows_never_make_it_a_step", kind=kind)
    assert set(seen) == {"step", "clip", "skip", "too large", "not finite"}
    assert min(seen.values()) >= 20


def test_an_optimizer_outside_the_training_loop_has_megatrons_norm() -> None:
    check("outside_the_training_loop")
