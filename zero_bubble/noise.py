"""Random factors for the times of passes and messages, the same for the same pass anywhere.

A factor is a function of seed, repeat, kind, stage, chunk and microbatch. So two orders of the same
passes, or 1F1B and a schedule with two chunks a stage, meet the same noise where they have the same
pass, and a longer batch or more repeats only add to what a shorter run has.
"""

from __future__ import annotations

import math

import numpy as np

from zero_bubble.placement import Placement
from zero_bubble.search.compiled import compiled
from zero_bubble.search.problem import Floats, Ints

__all__ = ["Noise"]

_STREAMS = 6
"""Noise for F, B and W, for the activation and the gradient that a chunk receives, and for R."""

# SplitMix64 (Steele, Lea, Flood 2014): the k-th number of a stream is mixed(seed + k * _STEP).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class Noise:
    """Log-normal factors with mean 1 and standard deviation ``sigma``, independent of each other.

    ``drift`` is (stage, factor) for a stage whose passes, but not messages, all take longer: (3,
    1.1) makes stage 3 10 % slower. ValueError for a ``sigma`` or drift that is negative or not
    finite, a drift of no stage, or a seed outside 0..2^63-1.
    """

    def __init__(
        self,
        placement: Placement,
        microbatches: int,
        *,
        sigma: float = 0.05,
        drift: tuple[int, float] | None = None,
        seed: int = 0,
    ) -> None:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ValueError(
                f"jitter (sigma) must be a finite number, at least 0, not {sigma}: 0.05 is 5 %"
            )
        if not 0 <= seed < 2**63:
            raise ValueError(f"the seed must be from 0 to 2^63 - 1, not {seed}")
        owners = [placement.owner(position) for position in range(placement.num_positions)]
        self._stages = np.array([stage for stage, _ in owners], dtype=np.int64)
        self._chunks = np.array([chunk for _, chunk in owners], dtype=np.int64)
        self._drifts = np.ones(placement.num_stages)
        if drift is not None:
            stage, factor = drift
            if not 0 <= stage < placement.num_stages:
                raise ValueError(
                    f"drift {stage}:{factor}: stage {stage} is not one of "
                    f"0..{placement.num_stages - 1}"
                )
            if not (math.isfinite(factor) and factor >= 0):
                raise ValueError(
                    f"drift {stage}:{factor}: expected a finite factor, at least 0, such as 1.1"
                )
            self._drifts[stage] = factor
        self._microbatches = microbatches
        self._sigma = sigma
        self._seed = seed

    def factors(self, repeat: int) -> Floats:
        """The factors of one repeat, shape (6 * positions * microbatches,).

        Those of F, B and W by code, as in `zero_bubble.search.orders`; then, in the same way, those
        of the activation and of the gradient that each (position, microbatch) receives, and of R.
        """
        factors = np.empty(_STREAMS * len(self._stages) * self._microbatches)
        _fill(
            factors,
            self._microbatches,
            self._stages,
            self._chunks,
            self._drifts,
            self._sigma,
            self._seed,
            repeat,
        )
        return factors

    def table(self, repeats: int) -> Floats:
        """The factors of repeats 0 to ``repeats`` - 1, a row each."""
        return np.stack([self.factors(repeat) for repeat in range(repeats)])


@compiled
def _mixed(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> np.uint64(30))) * _FIRST
    word = (word ^ (word >> np.uint64(27))) * _SECOND
    return word ^ (word >> np.uint64(31))


@compiled
def _nested(word: np.uint64, index: int) -> np.uint64:
    """A number of the stream that ``word`` seeds, itself a seed."""
    return _mixed(word + np.uint64(index + 1) * _STEP)


@compiled
def _uniform(word: np.uint64) -> float:
    """Above 0 and below 1, of the upper 53 bits."""
    return (float(word >> np.uint64(11)) + 0.5) * 2.0**-53


@compiled
def _fill(
    factors: Floats,
    microbatches: int,
    stages: Ints,
    chunks: Ints,
    drifts: Floats,
    sigma: float,
    seed: int,
    repeat: int,
) -> None:
    """Fill one repeat's factors; the stages' drifts are for their passes only."""
    spread = math.sqrt(math.log1p(sigma * sigma))
    run = _nested(_mixed(np.uint64(seed)), repeat)
    index = 0
    for stream in range(_STREAMS):
        for position in range(len(stages)):
            stage = stages[position]
            own = _nested(_nested(_nested(run, stream), stage), chunks[position])
            drift = 1.0 if stream in (3, 4) else drifts[stage]
            for microbatch in range(microbatches):
                word = _nested(own, microbatch)
                # Box and Muller: two uniform numbers make a normal one.
                radius = math.sqrt(-2.0 * math.log(_uniform(_nested(word, 0))))
                normal = radius * math.cos(2.0 * math.pi * _uniform(_nested(word, 1)))
                factors[index] = drift * math.exp(spread * normal - spread * spread / 2.0)
                index += 1
