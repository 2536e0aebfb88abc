"""The flags that measure the job, schedule it by what was measured, and record it."""

from __future__ import annotations

import argparse
import logging
import math
import re
from pathlib import Path
from typing import Any

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.patches import cpu
from zero_bubble.cli.memory_limit import memory_limits
from zero_bubble.cli.searching import EFFORTS
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement
from zero_bubble.profile.profile import Profile, load_profile

__all__ = [
    "AUTOMATIC",
    "SWITCH_AFTER",
    "add_auto_arguments",
    "cache_directory",
    "check_auto",
    "limit_factor",
]

AUTOMATIC = {"auto": "zb-h1", "auto-v": "zb-v"}
"""Values of --pipeline-schedule that search, and the schedule each starts on."""
PROFILE_ITERS, TRACE_ITERS = (5, 10), (16, 18)
DRIFT_INTERVAL, DRIFT_THRESHOLD = 100, 0.02
DRIFT_LEAST = 10
NO_CACHE = "none"
SWITCH_AFTER = 3
"""Iterations from the last one measured to the first that may run another schedule."""
_RANGE = re.compile(r"(\d+):(\d+)")
_FACTOR = re.compile(r"(\d+\.?\d*|\.\d+)p", re.IGNORECASE)
_UNIT = 1e9
"""Stands for bytes where a limit's grammar is all that is looked at."""
logger = logging.getLogger(__name__)


def add_auto_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, in two groups."""
    group = parser.add_argument_group("zero bubble: automatic schedule")
    group.add_argument(
        "--zero-bubble-memory-limit",
        default=None,
        metavar="LIMIT",
        help="With --pipeline-schedule auto or auto-v: the most memory that a stage's activations "
        "may take. auto (the default): what they take under the first schedule and 9/10 of what is "
        "free then; 2p, 0.5p, ...: so many times p microbatches' worth (1p is what 1F1B needs); "
        "12GiB: bytes; several, separated by commas: one a stage.",
    )
    group.add_argument(
        "--zero-bubble-profile-iters",
        default=None,
        metavar="FIRST:LAST",
        help="Iterations that are measured, both included, counted from 1 at the start of the job. "
        "The first measures memory and messages, the others times. Default: "
        f"{PROFILE_ITERS[0]}:{PROFILE_ITERS[1]}.",
    )
    group.add_argument(
        "--zero-bubble-effort",
        choices=EFFORTS,
        default=None,
        help="How long the search tries, in a process of its own beside training: a second or two, "
        "ten seconds, a minute. Default: normal.",
    )
    group.add_argument(
        "--zero-bubble-wait-for-search",
        action="store_true",
        help="Let the job wait while a schedule is searched for, instead of training on meanwhile: "
        "a run then always switches at the same iteration.",
    )
    group.add_argument(
        "--zero-bubble-profile",
        default=None,
        metavar="FILE.json",
        help="Schedule by this profile, instead of measuring first.",
    )
    group.add_argument(
        "--zero-bubble-cache",
        default=None,
        metavar="DIR",
        help="Where profile.json and schedule.json are kept, and found when the job starts again; "
        f"{NO_CACHE}: nowhere. Default: zero-bubble/ in the directory of --save, or of --load.",
    )
    group.add_argument(
        "--zero-bubble-drift-interval",
        type=int,
        default=None,
        metavar="N",
        help="Iterations between two later measurements, of three iterations each; 0: none. "
        f"Default: {DRIFT_INTERVAL}.",
    )
    group.add_argument(
        "--zero-bubble-drift-threshold",
        type=float,
        default=None,
        metavar="F",
        help="Go over to another schedule when it would take less time by this fraction of the "
        f"pipeline's. Default: {DRIFT_THRESHOLD}.",
    )
    group.add_argument(
        "--zero-bubble-profile-exit",
        action="store_true",
        help="End the job once the profile is written (to --zero-bubble-cache); nothing is saved.",
    )
    group = parser.add_argument_group("zero bubble: what really happens")
    group.add_argument(
        "--zero-bubble-trace",
        default=None,
        metavar="DIR",
        help="Record every pass, wait and optimizer phase of some iterations, a file a rank in "
        "this directory; tools/profile/trace.py makes a page and a Perfetto trace of them.",
    )
    group.add_argument(
        "--zero-bubble-trace-iters",
        default=None,
        metavar="FIRST:LAST",
        help="Which iterations, both included, counted from 1 at the start of the job. Default: "
        f"{TRACE_ITERS[0]}:{TRACE_ITERS[1]}.",
    )
    group.add_argument(
        "--log-zero-bubble-to-tensorboard",
        action="store_true",
        help="Write the measured bubble rate, tokens per second and rolled back steps to "
        "TensorBoard and Weights & Biases, every --tensorboard-log-interval iterations.",
    )


def _window(flag: str, given: Any, default: tuple[int, int], *, least: int) -> tuple[int, int]:
    """The iterations that a flag names; understood already, if arguments are checked again."""
    if not isinstance(given, str):
        return default if given is None else given
    text = given.strip()
    match = _RANGE.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"{flag} {text}: expected FIRST:LAST, such as 5:10")
    first, last = int(match[1]), int(match[2])
    if first < least or last < first:
        raise ConfigurationError(
            f"{flag} {text}: FIRST must be at least {least}, and LAST not before it"
        )
    return first, last


def limit_factor(limit: str) -> float | None:
    """X of a limit ``Xp``, the least of several; None if there is another kind among them."""
    matches = [_FACTOR.fullmatch(one.strip()) for one in limit.split(",")]
    factors = [float(one[1]) for one in matches if one is not None]
    return min(factors) if len(factors) == len(matches) else None


def cache_directory(args: Any) -> Path | None:
    """Where profile and schedule are kept; None for nowhere."""
    given = args.zero_bubble_cache
    if given is not None:
        return None if given == NO_CACHE else Path(given)
    beside = getattr(args, "save", None) or getattr(args, "load", None)
    return None if beside is None else Path(beside) / "zero-bubble"


def check_auto(args: Any, placement: Placement | None) -> None:
    """Fill in defaults, and stop at what cannot work.

    ``placement`` is that of the schedule; None where Megatron's own runs. To be called before
    Megatron's validation, as `arguments.validate`.

    Raises:
        ConfigurationError: says which flag, its value, and what would work.
    """
    _check_recording(args, placement)
    automatic = args.pipeline_schedule in AUTOMATIC
    _check_counting(args, automatic=automatic)
    if not automatic:
        for flag in _SEARCHING:
            value = getattr(args, _name(flag), None)
            if value is not None and value is not False:
                raise ConfigurationError(
                    f"{flag}{_shown(value)} is for --pipeline-schedule {' or '.join(AUTOMATIC)}, "
                    f"but that is {args.pipeline_schedule}: change it, or leave {flag} out"
                )
        return
    assert placement is not None
    args.zero_bubble_memory_limit = _limit(args, placement)
    args.zero_bubble_effort = getattr(args, "zero_bubble_effort", None) or "normal"
    _check_window(args)
    interval = getattr(args, "zero_bubble_drift_interval", None)
    args.zero_bubble_drift_interval = DRIFT_INTERVAL if interval is None else interval
    if args.zero_bubble_drift_interval and args.zero_bubble_drift_interval < DRIFT_LEAST:
        raise ConfigurationError(
            f"--zero-bubble-drift-interval {interval}: at least {DRIFT_LEAST} iterations, so that "
            "one measurement has ended before the next begins, or 0 for never"
        )
    threshold = getattr(args, "zero_bubble_drift_threshold", None)
    args.zero_bubble_drift_threshold = DRIFT_THRESHOLD if threshold is None else threshold
    if not 0 <= args.zero_bubble_drift_threshold < 1:
        raise ConfigurationError(
            f"--zero-bubble-drift-threshold {threshold:g}: must be a fraction from 0 to below 1"
        )
    _check_profile(args, placement)


def _check_counting(args: Any, *, automatic: bool) -> None:
    traced = getattr(args, "zero_bubble_trace", None) is not None
    distributes = getattr(args, "distribute_saved_activations", False)
    if distributes and (automatic or traced) and cpu.installed():
        ours = (
            f"--pipeline-schedule {args.pipeline_schedule}" if automatic else "--zero-bubble-trace"
        )
        raise ConfigurationError(
            f"{ours} does not work with --distribute-saved-activations in CPU mode, where bytes "
            "are counted by what autograd saves, which Megatron then exchanges: leave one out"
        )


def _check_recording(args: Any, placement: Placement | None) -> None:
    trace, window = (getattr(args, f"zero_bubble_trace{end}", None) for end in ("", "_iters"))
    if trace is None and window is not None:
        raise ConfigurationError(
            f"--zero-bubble-trace-iters {_text(window)} needs --zero-bubble-trace DIR, the "
            "directory to write to"
        )
    asked = {
        f"--zero-bubble-trace {trace}": trace is not None,
        "--log-zero-bubble-to-tensorboard": getattr(args, "log_zero_bubble_to_tensorboard", False),
    }
    if placement is None and (flag := next((one for one, given in asked.items() if given), None)):
        raise ConfigurationError(
            f"{flag} needs a --pipeline-schedule of ours: Megatron's own is not recorded; "
            "1f1b is the same schedule, run by ours"
        )
    if asked["--log-zero-bubble-to-tensorboard"] and not (
        getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", "")
    ):
        raise ConfigurationError(
            "--log-zero-bubble-to-tensorboard has nowhere to write to: add --tensorboard-dir DIR, "
            "or --wandb-project"
        )
    if trace is not None:
        flag = "--zero-bubble-trace-iters"
        args.zero_bubble_trace_iters = _window(flag, window, TRACE_ITERS, least=1)
        if Path(trace).exists() and not Path(trace).is_dir():
            raise ConfigurationError(
                f"--zero-bubble-trace {trace} is a file: name a directory, which is made if needed"
            )
        first, last = args.zero_bubble_trace_iters
        total = getattr(args, "train_iters", None)
        if total is not None and first > total:
            raise ConfigurationError(
                f"--zero-bubble-trace-iters {first}:{last}: the job has {total} iterations "
                "(--train-iters); choose earlier ones"
            )


def _limit(args: Any, placement: Placement) -> str:
    given: str = getattr(args, "zero_bubble_memory_limit", None) or "auto"
    flag = f"--zero-bubble-memory-limit {given}"
    if given == "auto":
        return given
    try:
        limits = memory_limits(given, placement, Costs.uniform(placement, 1, 1, 1, m_b=_UNIT))
    except ValueError as error:
        raise ConfigurationError(
            f"{flag}: expected auto, 2p, 12GiB or inf, one for all of {placement.num_stages} "
            "stages, or one each, separated by commas"
        ) from error
    chunks = placement.num_chunks(0)
    factors = [limit_factor(one) for one in given.split(",")]
    if any(one is not None and one * placement.num_stages < 1 for one in factors):
        raise ConfigurationError(
            f"{flag} is less than one microbatch with {placement.num_stages} stages: give at least "
            f"{math.ceil(100 / placement.num_stages) / 100:g}p"
        )
    in_bytes = [limit for one, limit in zip(factors, limits, strict=False) if one is None]
    if any(limit <= 4096 * chunks for limit in in_bytes):
        raise ConfigurationError(
            f"{flag} is in bytes, too few for any microbatch: add a unit such as GiB, or p for "
            "microbatches times stages"
        )
    return given


def _check_window(args: Any) -> None:
    flag = "--zero-bubble-profile-iters"
    given = getattr(args, "zero_bubble_profile_iters", None)
    first, last = _window(flag, given, PROFILE_ITERS, least=2)
    args.zero_bubble_profile_iters = first, last
    if given is None and getattr(args, "zero_bubble_profile", None) is not None:
        return  # nothing is measured first
    if first == last:
        raise ConfigurationError(
            f"{flag} {first}:{last}: the first iteration measures memory, those after it times; "
            f"give at least two, such as {first}:{first + 5}"
        )
    total = getattr(args, "train_iters", None)
    if total is not None and last + SWITCH_AFTER > total:
        raise ConfigurationError(
            f"{flag} {first}:{last} is too late: the job has {total} iterations (--train-iters), "
            f"and switches {SWITCH_AFTER} after the last at best; choose earlier ones, or "
            "--pipeline-schedule "
            f"{AUTOMATIC[args.pipeline_schedule]}, which needs none"
        )
    interval = getattr(args, "eval_interval", None)
    if interval and last // interval > (first - 1) // interval and getattr(args, "rank", 0) == 0:
        logger.warning(
            "%s %d:%d: --eval-interval %d falls into it; the iteration times around it count the "
            "evaluation, those of passes do not",
            flag,
            first,
            last,
            interval,
        )


def _check_profile(args: Any, placement: Placement) -> None:
    path = getattr(args, "zero_bubble_profile", None)
    if getattr(args, "zero_bubble_profile_exit", False):
        if path is not None:
            raise ConfigurationError(
                f"--zero-bubble-profile-exit measures, --zero-bubble-profile {path} says not to: "
                "leave one of them out"
            )
        if cache_directory(args) is None:
            raise ConfigurationError(
                "--zero-bubble-profile-exit writes the profile: it needs --zero-bubble-cache DIR, "
                "or --save"
            )
    if path is None:
        return
    profile = _load(path)
    if profile.placement != placement:
        raise ConfigurationError(
            f"--zero-bubble-profile {path} is of {profile.placement.num_stages} stages with "
            f"placement {profile.placement.name}, the job has {placement.num_stages} and "
            f"{placement.name}: give a profile of this placement, or leave the flag out to measure"
        )


def _load(path: str) -> Profile:
    try:
        return load_profile(path)
    except OSError as error:
        raise ConfigurationError(f"--zero-bubble-profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigurationError(f"--zero-bubble-profile {error}") from error


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _text(value: Any) -> str:
    return ":".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _shown(value: Any) -> str:
    return "" if value is True else f" {_text(value)}"


_SEARCHING = (
    "--zero-bubble-memory-limit",
    "--zero-bubble-profile-iters",
    "--zero-bubble-effort",
    "--zero-bubble-wait-for-search",
    "--zero-bubble-profile",
    "--zero-bubble-cache",
    "--zero-bubble-drift-interval",
    "--zero-bubble-drift-threshold",
    "--zero-bubble-profile-exit",
)
