"""Which device a job trains on, and what is said where it cannot."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble import launch
from megatron.zero_bubble.patches import cpu


@pytest.mark.parametrize(
    ("choice", "has_device", "says"),
    [
        (
            "cuda",
            False,
            "torch finds no CUDA device on this machine: `zero-bubble doctor` says why",
        ),
        ("tpu", True, "'tpu' is not a device"),
        ("tpu", False, "'tpu' is not a device"),
    ],
)
def test_a_device_that_is_not_there_ends_the_job_with_one_message(
    choice: str,
    has_device: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(cpu.DEVICE_VARIABLE, choice)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    with pytest.raises(SystemExit, match="2"):
        launch.install()
    printed = capsys.readouterr().err
    assert printed.startswith("zero-bubble: error: ")
    assert says in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("choice", "has_device", "reason"),
    [
        ("cuda", True, None),
        ("cpu", True, "ZERO_BUBBLE_DEVICE=cpu"),
        (None, True, None),
        (None, False, "no CUDA device found"),
    ],
)
def test_the_variable_decides_and_otherwise_what_is_there(
    choice: str | None, has_device: bool, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cpu.DEVICE_VARIABLE, raising=False)
    if choice is not None:
        monkeypatch.setenv(cpu.DEVICE_VARIABLE, choice)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    assert cpu.wanted() == reason
