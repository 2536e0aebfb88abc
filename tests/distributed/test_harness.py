"""The harness notices what it is there to notice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.configs import Config
from tests.distributed.harness import Result, TrainingFailed, Zygote, differences

CONFIG = Config(pp=1, iterations=1)


def _result(**changes: Any) -> Result:
    iteration = {"loss/lm loss": torch.tensor(1.0), "grad_norm": 2.0, "skipped": 0}
    state = {"weight": torch.ones(3), "step": 1} | changes
    record = {"iterations": [iteration], "evaluations": [], "state": state}
    return Result(CONFIG, Path(), 0.0, [record])


def test_equal_records_have_no_differences() -> None:
    assert not list(differences(_result(), _result()))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"weight": torch.nextafter(torch.ones(3), torch.zeros(3))}, "weight differs in 3 of 3"),
        ({"weight": torch.ones(3, dtype=torch.float64)}, "weight is torch.float64"),
        ({"step": 2}, "step is 2, not 1"),
        ({"other": torch.ones(1)}, "other is only in the actual run"),
    ],
)
def test_the_smallest_difference_is_named(changed: dict[str, Any], says: str) -> None:
    (found,) = differences(_result(), _result(**changed))
    assert says in found


def test_a_failed_rank_is_reported_with_its_log(reference_zygote: Zygote, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="AssertionError: Number of layers"):
        reference_zygote.train(Config(layers=3), tmp_path)


def test_a_run_past_its_limit_is_ended_and_says_where_it_was(
    reference_zygote: Zygote, tmp_path: Path
) -> None:
    config = Config(iterations=100_000)
    with pytest.raises(TrainingFailed, match=re.compile("did not finish in 8.*Current", re.S)):
        reference_zygote.train(config, tmp_path, limit_s=8)
