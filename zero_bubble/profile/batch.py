"""How a profile's job divides a batch: microbatches, samples, tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from zero_bubble.profile.profile import Profile

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration of a job. None is what the profile does not say."""

    microbatches: int
    """Of each data-parallel replica: the m of a schedule."""
    samples: int | None = None
    """Of all replicas."""
    tokens: int | None = None

    @classmethod
    def of(
        cls,
        profile: Profile,
        *,
        microbatches: int | None = None,
        global_batch_size: int | None = None,
    ) -> Self:
        """The batch with so many microbatches or samples, by default as the job has it.

        ValueError names the flag or the field of ``job`` that is missing or does not fit.
        """
        size, replicas = (
            _count(profile, name) for name in ("micro_batch_size", "data_parallel_size")
        )
        if microbatches is None:
            microbatches = _microbatches(profile, global_batch_size, size, replicas)
        elif global_batch_size is not None:
            raise ValueError(
                f"--microbatches {microbatches} and --global-batch-size {global_batch_size} "
                "exclude each other: give one of them"
            )
        if microbatches < 1:
            raise ValueError(f"--microbatches {microbatches}: at least 1 is needed")
        if size is None or replicas is None:
            return cls(microbatches)
        samples = microbatches * size * replicas
        length = _count(profile, "seq_length")
        return cls(microbatches, samples, None if length is None else samples * length)

    @property
    def unit(self) -> str | None:
        """What `rate` counts: ``tokens/s`` or ``samples/s``; None if neither is known."""
        if self.tokens is not None:
            return "tokens/s"
        return None if self.samples is None else "samples/s"

    def rate(self, milliseconds: float) -> float | None:
        """Tokens, or else samples, a second if a batch takes so long; None where unknown."""
        amount = self.samples if self.tokens is None else self.tokens
        return None if amount is None or not milliseconds else amount * 1e3 / milliseconds


def _microbatches(
    profile: Profile, wanted: int | None, size: int | None, replicas: int | None
) -> int:
    source, whole = "--global-batch-size", wanted
    if whole is None:
        source, whole = "the profile's global_batch_size", _count(profile, "global_batch_size")
    if whole is None or size is None or replicas is None:
        known = {
            "global_batch_size": whole,
            "micro_batch_size": size,
            "data_parallel_size": replicas,
        }
        missing = ", ".join(name for name, value in known.items() if value is None)
        raise ValueError(
            f"the profile's job has no {missing}, so the number of microbatches is not known: "
            "give --microbatches"
        )
    each = size * replicas
    if whole < 1 or whole % each:
        raise ValueError(
            f"{source} {whole}: expected a multiple of {each} (micro_batch_size {size} times "
            f"data_parallel_size {replicas}), such as {each * max(1, round(whole / each))}"
        )
    return whole // each


def _count(profile: Profile, name: str) -> int | None:
    """A whole number of the job; ValueError if the field holds anything else."""
    value = profile.job.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"the profile's {name}: expected a number, at least 1, not {value!r}")
    return value
