"""The harness notices what it is there to notice."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.configs import Config
from tests.distributed.gathering import TRAINED, Piece, assemble
from tests.distributed.harness import (
    Result,
    TrainingFailed,
    Zygote,
    differences,
    model_differences,
)

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


NAMES = ("embedding.weight", "decoder.layers.0.weight", "decoder.layers.1.weight")


def _pieces(name: str, value: torch.Tensor, start: int = 0, size: int = 3) -> list[Piece]:
    """A parameter of `size` elements on a rank that holds those from `start` on."""
    state = [Piece(f"{name}/{key}", (size,), start, value) for key in TRAINED if key != "step"]
    return [
        Piece(f"{name}/value", (size,), 0, torch.ones(size)),
        *state,
        Piece(f"{name}/step", (), 0, torch.tensor([12])),
    ]


def _model(
    ranks: tuple[tuple[str, ...], ...],
    *,
    clip_grad: float = 0.0,
    norm: float = 2.0,
    loss: torch.Tensor | None = None,
    changed: str = "",
) -> Result:
    """A run whose ranks hold these parameters; the loss is known on the last of them."""
    records = []
    for rank, names in enumerate(ranks):
        iteration: dict[str, Any] = {"grad_norm": norm}
        if rank == len(ranks) - 1:
            iteration["loss/lm loss"] = torch.tensor(4.5) if loss is None else loss
        held = []
        for name in names:
            value = torch.ones(3)
            if name == changed:
                value[1] = torch.nextafter(value[1], torch.tensor(0.0))
            held += _pieces(name, value)
        records.append({"iterations": [iteration], "evaluations": [], "pieces": held})
    return Result(replace(CONFIG, clip_grad=clip_grad), Path(), 0.0, records)


HERE = (NAMES[:2], NAMES[2:])
THERE = (NAMES[1:], NAMES[:1])


def test_the_same_model_on_other_ranks_has_no_differences() -> None:
    assert not list(model_differences(_model(HERE), _model(THERE, norm=2.0 + 1e-6)))


@pytest.mark.parametrize(
    ("actual", "says"),
    [
        (_model(THERE, norm=2.0 + 1e-5), "iteration 0: grad_norm is 2.00001, not 2.0 within"),
        (
            _model(THERE, loss=torch.nextafter(torch.tensor(4.5), torch.tensor(0.0))),
            "iteration 0: loss/lm loss differs in 1 of 1",
        ),
        (_model(THERE, changed=NAMES[2]), "decoder.layers.1.weight/exp_avg differs in 1 of 3"),
        (_model((NAMES[:1], NAMES[1:2])), "decoder.layers.1.weight/step is only in the expected"),
    ],
)
def test_the_smallest_difference_between_models_is_named(actual: Result, says: str) -> None:
    found = list(model_differences(_model(HERE), actual))
    assert any(says in one for one in found), found


def test_what_clipping_scales_is_compared_up_to_rounding() -> None:
    expected = _model(HERE, clip_grad=1.0)
    near, far = torch.tensor(4.5 * (1 + 5e-7)), torch.tensor(4.5 * (1 + 5e-6))
    same = _model(THERE, clip_grad=1.0, loss=near, changed=NAMES[0])
    assert not list(model_differences(expected, same))
    (found,) = model_differences(expected, _model(THERE, clip_grad=1.0, loss=far))
    assert "loss/lm loss" in found


def test_ranks_that_know_different_losses() -> None:
    run = _model(HERE)
    run.ranks[0]["iterations"][0]["loss/lm loss"] = torch.tensor(4.0)
    with pytest.raises(AssertionError, match="ranks disagree"):
        list(model_differences(run, run))


def test_a_parameter_in_parts_on_two_ranks() -> None:
    halves = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    whole = assemble([_pieces("a", halves[0]), _pieces("a", halves[1], start=2)])
    assert whole["a/exp_avg"].tolist() == [1.0, 2.0, 3.0]
    assert whole["a/step"].item() == 12


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([_pieces("a", torch.ones(2))], "a/main has 2 elements of 3"),
        ([_pieces("a", torch.ones(1), start=2)], "a/main has elements up to 0, then from 2"),
        ([_pieces("a", torch.ones(3)), _pieces("a", torch.zeros(3))], "replicas of a/main differ"),
        ([_pieces("a", torch.ones(3))[:-1]], "a has no step"),
    ],
)
def test_what_does_not_make_a_whole_parameter(ranks: list[list[Piece]], says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        assemble(ranks)


def test_a_failed_rank_is_reported_with_its_log(reference_zygote: Zygote, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match="AssertionError: Number of layers"):
        reference_zygote.train(Config(layers=3), tmp_path)


def test_a_run_past_its_limit_is_ended_and_says_where_it_was(
    reference_zygote: Zygote, tmp_path: Path
) -> None:
    config = Config(iterations=100_000)
    with pytest.raises(TrainingFailed, match=re.compile("did not finish in 8.*Current", re.S)):
        reference_zygote.train(config, tmp_path, limit_s=8)


def test_a_run_that_was_to_fail_and_did_not(reference_zygote: Zygote, tmp_path: Path) -> None:
    with pytest.raises(TrainingFailed, match=r"rank 0 of .* did not fail by itself"):
        reference_zygote.fail(Config(pp=1, iterations=4), tmp_path)
