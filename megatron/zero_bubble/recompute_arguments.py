"""The flag that says where activations are recomputed, and what is wrong with it."""

from __future__ import annotations

import argparse
from typing import Any

from megatron.zero_bubble.errors import ConfigurationError
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.schedule import Kind, Schedule

__all__ = ["add_recompute_arguments", "check_recomputation", "with_recomputation_of"]

FLAG = "--zero-bubble-recompute"
PASS, IN_BACKWARD = "pass", "in-backward"
FULL = "--recompute-granularity full"


def add_recompute_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flag to a group of Megatron's parser."""
    group.add_argument(
        FLAG,
        choices=(PASS, IN_BACKWARD),
        default=None,
        help=f"Where {FULL} computes activations again: in a pass of its own (R), which runs while "
        "a stage waits for a gradient and which a schedule may put into a bubble, or at the start "
        "of the backward pass, as Megatron's own schedules do. Bits are the same. Default: pass, "
        "except where Megatron recomputes by other means "
        "(--fp8-format, --fp4-format, --distribute-saved-activations).",
    )


def check_recomputation(args: Any) -> None:
    """Resolve the default, once ``args.pipeline_schedule`` is resolved.

    ``args.zero_bubble_recompute`` is None, "pass" or "in-backward" after.

    Raises:
        ConfigurationError: the flag where nothing is recomputed, or by means it does not know.
    """
    given = getattr(args, "zero_bubble_recompute", None)
    if given is not None and args.pipeline_schedule == "megatron":
        raise ConfigurationError(
            f"{FLAG} {given} needs one of this project's schedules, but --pipeline-schedule is "
            f"megatron: choose another, or leave {FLAG} out"
        )
    granularity = getattr(args, "recompute_granularity", None)
    if granularity != "full":
        if given is not None:
            raise ConfigurationError(
                f"{FLAG} {given} is for {FULL}, but --recompute-granularity is {granularity}: add "
                f"{FULL} --recompute-method uniform --recompute-num-layers 1, or leave {FLAG} out"
            )
        args.zero_bubble_recompute = None
        return
    other = _other_means(args)
    if given == PASS and other is not None:
        raise ConfigurationError(
            f"{FLAG} {PASS} does not work with {other}, with which Megatron recomputes by other "
            f"means: use {FLAG} {IN_BACKWARD}"
        )
    args.zero_bubble_recompute = given or (IN_BACKWARD if other else PASS)


def with_recomputation_of(args: Any, schedule: Schedule, flag: str) -> Schedule:
    """The schedule as these arguments, after `check_recomputation`, have it recompute.

    Raises:
        ConfigurationError: a schedule with R's, in a job that recomputes nothing or in B.
    """
    where = getattr(args, "zero_bubble_recompute", None)
    if where == PASS:
        return with_recomputation(schedule)
    if any(schedule.chunks_with(Kind.R)):
        what = FULL if where is None else f"{FLAG} {PASS}"
        raise ConfigurationError(
            f"{flag} has recomputation passes (R), which this job does not: add {what}, or make "
            "the schedule again without them"
        )
    return schedule


def _other_means(args: Any) -> str | None:
    """The flag under which Megatron's layers do not recompute through its own checkpoint."""
    for attribute, flag in (("fp8", "--fp8-format"), ("fp4", "--fp4-format")):
        if value := getattr(args, attribute, None):
            return f"{flag} {value}"
    if getattr(args, "distribute_saved_activations", False):
        return "--distribute-saved-activations"
    return None
