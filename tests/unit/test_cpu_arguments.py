"""What CPU mode refuses, said while arguments are parsed."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron.zero_bubble.patches import cpu


@pytest.fixture(autouse=True)
def in_cpu_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that it is on; pytest's own process stays as it is."""
    monkeypatch.setattr(cpu, "installed", lambda: True)


@pytest.mark.parametrize("name", cpu.ALLOWED)
def test_what_only_a_gpu_can_honour(name: str) -> None:
    with pytest.raises(ValueError, match="needs a GPU and this run is in CPU mode: drop the flag"):
        cpu.apply_argument_defaults(Namespace(**{name: "something"}))


def test_a_window_over_parts_of_a_sequence() -> None:
    """The stand-in for attention would look at the wrong tokens, and nobody would notice."""
    with pytest.raises(ValueError, match=r"--window-size \(8, 0\) does not work with --context-pa"):
        cpu.apply_argument_defaults(Namespace(context_parallel_size=2, window_size=(8, 0)))
    cpu.apply_argument_defaults(Namespace(context_parallel_size=1, window_size=(8, 0)))
    cpu.apply_argument_defaults(Namespace(context_parallel_size=2, window_size=None))
