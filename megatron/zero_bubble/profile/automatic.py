"""Gives a session what the flags ask for: measuring, scheduling, recording."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from megatron.zero_bubble.auto_arguments import AUTOMATIC, cache_directory, limit_factor
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.profile.board import Board
from megatron.zero_bubble.profile.coordinator import Coordinator, limit_text, takes_longer
from megatron.zero_bubble.profile.job import describe_job
from megatron.zero_bubble.profile.monitor import Monitor
from megatron.zero_bubble.profile.ranges import Ranges
from megatron.zero_bubble.profile.rescheduler import Rescheduler, Settings
from megatron.zero_bubble.profile.scalars import Scalars
from megatron.zero_bubble.profile.search import SearchFailed
from megatron.zero_bubble.profile.trace import TraceRecorder
from megatron.zero_bubble.recompute_arguments import with_recomputation_of
from megatron.zero_bubble.runtime.session import Session
from zero_bubble.cli.memory_limit import memory_limits
from zero_bubble.export.json_io import ScheduleFile, load_file, parse_file
from zero_bubble.profile.profile import Profile, Scalar, listed, load_profile
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate

__all__ = ["attend"]

logger = logging.getLogger(__name__)

BuildNamed = Callable[[str, int, int], Schedule]
"""(name, stages, microbatches) -> a known schedule."""


def attend(
    session: Session,
    args: Any,
    *,
    named: BuildNamed,
    microbatches: Callable[[], int],
    counts: Callable[[], dict[str, int]],
) -> Monitor | None:
    """Measure, schedule and record the session's batches as Megatron's arguments ask for.

    To be called on all ranks, before the first batch.

    Args:
        named: builds known schedules.
        microbatches: of the first batch.
        counts: optimizer steps by outcome.

    Returns:
        What is to be told of optimizer steps; None where nothing is measured.

    Raises:
        ConfigurationError: on all ranks alike.
    """
    if getattr(args, "profile", False) and args.rank in (args.profile_ranks or [args.rank]):
        session.observer = Ranges(nvtx=not args.use_pytorch_profiler)
    automatic = args.pipeline_schedule in AUTOMATIC
    if not (automatic or args.zero_bubble_trace or args.log_zero_bubble_to_tensorboard):
        return None
    monitor = Monitor(session, lambda: args.curr_iteration + 1)
    board = Board.of_job(60.0 * args.distributed_timeout_minutes)
    monitor.waits = automatic and args.zero_bubble_wait_for_search
    if automatic:
        monitor.parties.append(
            _rescheduler(session, args, board, named, microbatches(), monitor.device)
        )
    if args.zero_bubble_trace:
        directory, window = Path(args.zero_bubble_trace), args.zero_bubble_trace_iters
        monitor.parties.append(
            TraceRecorder(session, directory, window, rank=args.rank, device=monitor.device)
        )
    if args.log_zero_bubble_to_tensorboard:
        last = args.world_size - 1
        monitor.parties.append(
            Scalars(
                session,
                board,
                rank=args.rank,
                last_rank=last,
                interval=args.tensorboard_log_interval,
                write=_write if args.rank == last else None,
                tokens=lambda: _samples() * args.seq_length,
                counts=counts,
            )
        )
    return monitor


def _rescheduler(
    session: Session,
    args: Any,
    board: Board,
    named: BuildNamed,
    microbatches: int,
    device: Any,
) -> Rescheduler:
    job = describe_job(args)
    stages = session.placement.num_stages
    first = partial(named, AUTOMATIC[args.pipeline_schedule], stages)
    coordinator = None
    if args.rank == 0:
        coordinator = Coordinator(
            board,
            args.world_size,
            session.placement,
            job,
            limit=args.zero_bubble_memory_limit,
            effort=args.zero_bubble_effort,
            cache=cache_directory(args),
            stop=args.zero_bubble_profile_exit,
            barrier=not args.optimizer_post_validation,
            patient=args.zero_bubble_wait_for_search,
        )
        board.post(
            "begin", _beginning(args, session, coordinator, job, microbatches, first(microbatches))
        )
    beginning = json.loads(board.wait("begin"))
    if beginning.get("error"):
        raise ConfigurationError(beginning["error"])
    known = {}
    if beginning.get("schedule"):
        schedule = parse_file(json.loads(beginning["schedule"])).schedule
        known[schedule.num_microbatches] = schedule
    factor = limit_factor(args.zero_bubble_memory_limit)
    low = factor is not None and factor < 1
    begin, last = args.zero_bubble_profile_iters
    rescheduler = Rescheduler(
        session,
        board,
        coordinator,
        Settings(
            begin,
            last,
            args.zero_bubble_drift_interval,
            args.zero_bubble_drift_threshold,
            args.train_iters,
        ),
        start=_searched_start(args, board, coordinator) if low else first,
        rank=args.rank,
        device=device,
        profiled=bool(beginning["profiled"]),
        known=known,
    )
    session.reschedule(rescheduler.schedule)
    return rescheduler


def _searched_start(
    args: Any, board: Board, coordinator: Coordinator | None
) -> Callable[[int], Schedule]:
    """Starting schedules for limits below 1p, which zb-h1 and zb-v do not keep."""

    @lru_cache(maxsize=8)
    def start(microbatches: int) -> Schedule:
        note = f"start/{microbatches}"
        if coordinator is not None:
            try:
                text = coordinator.starting_schedule(microbatches)
            except (SearchFailed, OSError) as error:
                text = json.dumps({"error": str(error)})
            board.post(note, text)
        data = json.loads(board.wait(note))
        if "error" in data:
            raise ConfigurationError(f"--zero-bubble-memory-limit: {data['error']}")
        return with_recomputation_of(args, parse_file(data).schedule, "the searched schedule")

    return start


def _beginning(
    args: Any,
    session: Session,
    coordinator: Coordinator,
    job: dict[str, Scalar],
    microbatches: int,
    first: Schedule,
) -> str:
    """What all ranks begin with: whether there is a profile, and a schedule made for it."""
    given = args.zero_bubble_profile
    if given is not None:
        profile = load_profile(given)
        different = profile.differences(job) if profile.job else []
        if different:
            return json.dumps(
                {
                    "error": f"--zero-bubble-profile {given} is of another job: "
                    f"{listed(different)}; leave the flag out to measure this one"
                }
            )
        coordinator.profile = profile
        logger.info("scheduling by the profile %s", given)
        return json.dumps({"profiled": True})
    directory = cache_directory(args)
    cached = None if args.zero_bubble_profile_exit else _cached_profile(directory, session, job)
    if cached is None or directory is None:
        return json.dumps({"profiled": False})
    coordinator.profile = cached
    found = _cached_schedule(directory, cached, args, microbatches, first)
    logger.info(
        "reusing %s of an earlier start in %s",
        "profile" if found is None else f"profile and schedule {found.schedule.name}",
        directory,
    )
    text = None if found is None else (directory / "schedule.json").read_text(encoding="utf-8")
    return json.dumps({"profiled": True, "schedule": text})


def _cached_profile(
    directory: Path | None, session: Session, job: dict[str, Scalar]
) -> Profile | None:
    path = None if directory is None else directory / "profile.json"
    if path is None or not path.is_file():
        return None
    try:
        profile = load_profile(path)
    except (ValueError, OSError) as error:
        logger.warning("measuring again, the profile of an earlier start cannot be used: %s", error)
        return None
    different = profile.differences(job)
    if profile.placement != session.placement:
        different.insert(0, f"placement {profile.placement.name}, not {session.placement.name}")
    if different:
        logger.warning(
            "measuring again, and replacing %s, which is of another job: %s",
            path,
            listed(different),
        )
        return None
    return profile


def _cached_schedule(
    directory: Path, profile: Profile, args: Any, microbatches: int, first: Schedule
) -> ScheduleFile | None:
    """The schedule found for this profile, limit and batch; None if it is for others."""
    path = directory / "schedule.json"
    if not path.is_file():
        return None
    try:
        found = load_file(path)
        text = limit_text(args.zero_bubble_memory_limit, profile, microbatches)
        limits = memory_limits(text, profile.placement, profile.costs)
    except (ValueError, OSError) as error:
        logger.warning("searching again, %s", error)
        return None
    same = (
        found.schedule.placement == profile.placement
        and found.schedule.num_microbatches == microbatches
        and found.memory_limit == limits
        and (args.optimizer_post_validation or not _is_longer(found, profile, first))
    )
    return found if same else None


def _is_longer(found: ScheduleFile, profile: Profile, first: Schedule) -> bool:
    """Whether an iteration would take longer than with the first schedule, behind a barrier."""
    costs = profile.costs
    return takes_longer(simulate(found.schedule, costs), simulate(first, costs))


def _samples() -> int:
    from megatron.core.num_microbatches_calculator import get_current_running_global_batch_size

    return int(get_current_running_global_batch_size())


def _write(iteration: int, values: dict[str, float]) -> None:
    """To whichever of the two the job writes."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer

    named = {f"zero-bubble/{name}": value for name, value in values.items()}
    if writer := get_tensorboard_writer():
        for name, value in named.items():
            writer.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(named, iteration)
