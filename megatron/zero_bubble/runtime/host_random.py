"""The host's random generators, which reading data may draw from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["HostRandomStates"]


@dataclass(frozen=True, slots=True)
class HostRandomStates:
    """Of Python, numpy and torch on the CPU."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @classmethod
    def capture(cls) -> HostRandomStates:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
