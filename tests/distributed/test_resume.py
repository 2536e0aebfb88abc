"""A run saved under one schedule and resumed under another equals the uninterrupted run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.configs import Config
from tests.distributed.harness import Result, Zygote, assert_identical

SAVE_AT = 6
MEGATRON = "megatron"
"""Megatron's own 1F1B, in a process without the adaptor."""

CONFIGS = {
    "fp32": Config(),
    "bf16-distopt": Config(precision="bf16", distributed_optimizer=True),
}
CHANGES = (
    ("1f1b", "zb-h1"),
    ("zb-h1", "zb-h2"),
    ("zb-h2", "1f1b"),
    (MEGATRON, "zb-h2"),
    ("zb-h1", MEGATRON),
)


DEFAULT = {
    ("zb-h1", "zb-h2", "fp32"),
    ("zb-h1", "zb-h2", "bf16-distopt"),
    (MEGATRON, "zb-h2", "bf16-distopt"),
    ("zb-h1", MEGATRON, "bf16-distopt"),
}
"""The default tier; the others are slow."""


def _parameters() -> list[object]:
    return [
        pytest.param(
            config,
            before,
            after,
            id=f"{before}-then-{after}-{name}",
            marks=() if (before, after, name) in DEFAULT else pytest.mark.slow,
        )
        for name, config in CONFIGS.items()
        for before, after in CHANGES
    ]


@pytest.mark.parametrize(("config", "before", "after"), _parameters())
def test_resume(
    config: Config,
    before: str,
    after: str,
    reference: Callable[[Config], Result],
    reference_zygote: Zygote,
    zygote: Zygote,
    tmp_path: Path,
) -> None:
    checkpoint = str(tmp_path / "checkpoint")

    def run(part: str, schedule: str, *flags: str) -> Result:
        directory = tmp_path / f"{part}-{schedule}"
        if schedule == MEGATRON:
            return reference_zygote.train(config, directory, flags)
        return zygote.train(config, directory, ("--pipeline-schedule", schedule, *flags))

    at = str(SAVE_AT)
    saved = run("saved", before, "--save", checkpoint, "--save-interval", at, "--exit-interval", at)
    assert len(saved.iterations("lr")) == SAVE_AT
    resumed = run("resumed", after, "--load", checkpoint)
    assert_identical(reference(config), saved.continued(resumed))
