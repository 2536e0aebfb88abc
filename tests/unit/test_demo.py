"""The demo's own logic: what it passes on, and that it notices a difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.demo import Run, identical, megatron_flags


def run(losses: list[float], norms: list[float], validation: list[float]) -> Run:
    hexadecimal = {
        name: [value.hex() for value in values]
        for name, values in zip(
            ("losses", "grad_norms", "validation"), (losses, norms, validation), strict=True
        )
    }
    return Run(({}, hexadecimal))


def test_a_path_with_spaces_stays_one_word() -> None:
    flags = megatron_flags("zb-h1", 80, Path("/my data/text"), Path("/my runs/zb-h1"))
    assert flags[flags.index("--data-path") + 1] == "/my data/text"
    assert flags[flags.index("--save") + 1] == "/my runs/zb-h1/checkpoints"


def test_equal_runs_whose_loss_falls() -> None:
    same = [run([5.0, 2.0], [1.0, 0.5], [2.5]) for _ in range(3)]
    assert identical(dict(zip(("megatron", "zb-h1", "zb-h2"), same, strict=True))) == 0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (run([5.0, 2.0000000000000004], [1.0, 0.5], [2.5]), "DIFFERENT: loss 2 of ZB-H2"),
        (run([5.0, 2.0], [1.0, 0.25], [2.5]), "DIFFERENT: gradient norm 2 of ZB-H2"),
        (run([5.0, 2.0], [1.0, 0.5], [2.25]), "DIFFERENT: validation loss 1 of ZB-H2"),
        (run([5.0], [1.0, 0.5], [2.5]), "DIFFERENT: loss 2 of ZB-H2"),
    ],
)
def test_a_difference_is_found(other: Run, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    reference = run([5.0, 2.0], [1.0, 0.5], [2.5])
    assert identical({"megatron": reference, "zb-h1": reference, "zb-h2": other}) == 1
    assert said in capsys.readouterr().out


def test_a_loss_that_does_not_fall_is_a_failure() -> None:
    flat = run([5.0, 4.5], [1.0, 0.5], [4.5])
    assert identical({"megatron": flat, "zb-h1": flat, "zb-h2": flat}) == 1
