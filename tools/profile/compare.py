"""What each schedule would give for a profile; with several, which microbatch size is best.

    .venv/bin/python tools/profile/compare.py profile.json

Needs neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import Parser, UsageError, require_size
from zero_bubble.cli.compiling import announce_compiling
from zero_bubble.cli.interrupt import stop_on_interrupt
from zero_bubble.cli.memory_limit import add_memory_limit, limit_line, memory_limits
from zero_bubble.cli.output import require_writable
from zero_bubble.cli.table import table
from zero_bubble.profile.batch import Batch
from zero_bubble.profile.profile import Profile, load_profile

if TYPE_CHECKING:
    from zero_bubble.profile.microbatch_size import Choice, Trade
    from zero_bubble.profile.whatif import Limit, Outcome, WhatIf

# The search is imported where it is used: --help and errors should not wait for a compiler.

_EFFORTS = ("quick", "normal")
_LONGEST_NAME = 16
"""A longer limit does not go into a schedule's name."""
_EXAMPLES = """
  tools/profile/compare.py profile.json
  tools/profile/compare.py profile.json --memory-limit 1.5p --effort normal
  tools/profile/compare.py profile.json --microbatches 16 --json compared.json
  tools/profile/compare.py size-1.json size-2.json --global-batch-size 64
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a user's error."""
    try:
        return run(parser().parse_args(argv))
    except OSError as error:
        print(f"compare.py: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except ValueError as error:
        print(f"compare.py: {error}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    found = Parser(
        prog="compare.py",
        description="What each schedule would give for a profile: time, bubble, memory, and the\n"
        "least that any schedule with that memory can take. Other placements than the\n"
        "profile's are estimated: their chunks are its stages cut or joined. With several\n"
        "profiles, at different microbatch sizes, the trade of microbatch size against\n"
        "bubble at one global batch size. Times are of the pipeline alone, without the\n"
        "optimizer and what else an iteration holds.",
        epilog=f"examples:{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("profiles", nargs="+", metavar="PROFILE.json", help="measured on a job")
    size = found.add_mutually_exclusive_group()
    size.add_argument(
        "--microbatches", type=int, metavar="M", help="of a batch on one replica (as the job's)"
    )
    size.add_argument(
        "--global-batch-size", type=int, metavar="N", help="samples of a batch (as the job's)"
    )
    add_memory_limit(found)
    found.add_argument(
        "--effort", choices=_EFFORTS, default="quick", help="how long the searches try (quick)"
    )
    found.add_argument("--json", metavar="FILE", help="also write the table to this file")
    return found


def run(arguments: argparse.Namespace) -> int:
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    profiles = [(path, load_profile(path)) for path in arguments.profiles]
    several = len(profiles) > 1
    data = _several(profiles, arguments) if several else _one(*profiles[0], arguments)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return 0


def _one(path: str, profile: Profile, arguments: argparse.Namespace) -> dict[str, Any]:
    batch = _batch(path, profile, arguments)
    from zero_bubble.profile.whatif import room_limit, what_if

    room = room_limit(profile)
    hint = "the profile's room" if room else None
    limit = _limit(profile, arguments.memory_limit, hint) or room
    announce_compiling()
    found = what_if(profile, batch.microbatches, limit, effort=arguments.effort)
    print(
        f"{path}: {profile.placement.name}, {profile.placement.num_stages} stages, "
        f"{batch.microbatches} microbatches"
    )
    if limit is not None:
        memory = limit.of(profile.placement, profile.costs)
        print(limit_line(limit.name, memory, profile.costs))
    print()
    header = ["schedule", "costs", "pipeline ms", "bubble rate", "bound ms", "peak memory"]
    header += ["fits"] if limit else []
    header += [batch.unit] if batch.unit else []
    print(table(header, [_cells(one, batch) for one in found.outcomes]))
    print(f"\n{_best_line(found)}")
    for name, reason in found.left_out:
        print(f"compare.py: left out: {name} ({reason})", file=sys.stderr)
    return {
        "profile": path,
        "microbatches": batch.microbatches,
        "schedules": [_record(one, batch) for one in found.outcomes],
        "left_out": dict(found.left_out),
    }


def _several(
    profiles: Sequence[tuple[str, Profile]], arguments: argparse.Namespace
) -> dict[str, Any]:
    if arguments.microbatches is not None:
        raise UsageError(
            f"--microbatches {arguments.microbatches} is for one profile: each microbatch size has "
            "its own number of microbatches; give --global-batch-size"
        )
    from zero_bubble.profile.microbatch_size import largest_of, trade
    from zero_bubble.profile.whatif import room_limit

    largest = largest_of(profiles, batch_given=arguments.global_batch_size is not None)
    for path, profile in profiles:
        _batch(path, profile, arguments)
    hint = "the room of the profiles" if any(room_limit(one) for _, one in profiles) else None
    limit = _limit(largest, arguments.memory_limit, hint)
    announce_compiling()
    found = trade(
        profiles,
        global_batch_size=arguments.global_batch_size,
        limit=limit,
        effort=arguments.effort,
    )
    print(
        f"{largest.placement.name}, {largest.placement.num_stages} stages, "
        f"global batch size {found.global_batch_size}"
    )
    print(f"{limit_line(found.memory_origin, found.memory, largest.costs)}\n")
    unit = found.choices[0].batch.unit
    header = ["micro-batch size", "m", "family", "schedule", "costs", "work ms", "pipeline ms"]
    header += ["bubble rate", "peak memory", *([unit] if unit else [])]
    print(table(header, map(_choice_cells, found.choices)))
    for size, family in found.left_out:
        print(f"does not fit: {family} with size {size}")
    print(f"\n{found.conclusion()}")
    return _trade_record(found)


def _limit(profile: Profile, text: str | None, room: str | None) -> Limit | None:
    """What ``--memory-limit`` asks for; ``room`` is what counts where the flag is left out."""
    from zero_bubble.profile.whatif import Limit

    if text is None:
        return None
    try:
        memory_limits(text, profile.placement, profile.costs)
    except ValueError as error:
        hint = f"; leave the flag out for {room}" if room else ""
        raise ValueError(f"{error}{hint}") from error
    name = text.replace(" ", "")
    return Limit(
        name if len(name) <= _LONGEST_NAME else "own-limits",
        lambda placement, costs: memory_limits(text, placement, costs),
        f"--memory-limit {text}",
    )


def _batch(path: str, profile: Profile, arguments: argparse.Namespace) -> Batch:
    """ValueError if the batch cannot be had, or is more than any search could handle."""
    try:
        batch = Batch.of(
            profile,
            microbatches=arguments.microbatches,
            global_batch_size=arguments.global_batch_size,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    stages, chunks = profile.placement.num_stages, max(2, profile.placement.num_chunks(0))
    require_size(argparse.Namespace(stages=stages, microbatches=batch.microbatches, chunks=chunks))
    return batch


def _cells(one: Outcome, batch: Batch) -> list[str]:
    cells = [
        one.name,
        _origin(one),
        f"{one.cost:.2f}",
        f"{one.timeline.bubble_rate:.2%}",
        f"{one.bound:.2f}",
        amount(one.peak),
    ]
    if one.fits is not None:
        cells.append("yes" if one.fits else "no")
    return cells + _rate(one, batch)


def _choice_cells(one: Choice) -> list[str]:
    outcome = one.outcome
    return [
        str(one.size),
        str(one.batch.microbatches),
        one.family,
        outcome.name,
        _origin(outcome),
        f"{max(outcome.timeline.work):.2f}",
        f"{outcome.cost:.2f}",
        f"{outcome.timeline.bubble_rate:.2%}",
        amount(outcome.peak),
        *_rate(outcome, one.batch),
    ]


def _rate(one: Outcome, batch: Batch) -> list[str]:
    if batch.unit is None:
        return []
    rate = batch.rate(one.cost)
    return ["-" if rate is None else f"{rate:.5g}" if rate < 1e5 else f"{rate:.0f}"]


def _origin(one: Outcome) -> str:
    return "estimated" if one.estimated else "measured"


def _best_line(found: WhatIf) -> str:
    """The best schedule, and the best that needs no estimate."""
    from zero_bubble.profile.whatif import cheapest

    best = found.best
    if best is None:
        return "best: nothing fits"
    text = f"best{'' if best.fits is None else ' that fits'}: {best.name}, {best.cost:.2f} ms"
    if not best.estimated:
        return text
    measured = cheapest(
        one for one in found.outcomes if one.fits is not False and not one.estimated
    )
    text += ", estimated"
    return (
        text if measured is None else f"{text}; measured: {measured.name}, {measured.cost:.2f} ms"
    )


def _record(one: Outcome, batch: Batch) -> dict[str, Any]:
    return {
        "schedule": one.name,
        "placement": [*map(list, one.timeline.schedule.placement.positions)],
        "costs": _origin(one),
        "pipeline_ms": one.cost,
        "bubble_rate": one.timeline.bubble_rate,
        "bound_ms": one.bound,
        "peak_memory": list(one.timeline.peak_memory),
        "fits": one.fits,
        **({batch.unit: batch.rate(one.cost)} if batch.unit else {}),
    }


def _trade_record(found: Trade) -> dict[str, Any]:
    return {
        "global_batch_size": found.global_batch_size,
        "memory": [one if math.isfinite(one) else None for one in found.memory],
        "choices": [
            {
                "micro_batch_size": one.size,
                "microbatches": one.batch.microbatches,
                "family": one.family,
                **_record(one.outcome, one.batch),
            }
            for one in found.choices
        ],
        "left_out": [{"micro_batch_size": size, "family": one} for size, one in found.left_out],
        "conclusion": found.conclusion(),
    }


if __name__ == "__main__":
    stop_on_interrupt()
    sys.exit(main())
