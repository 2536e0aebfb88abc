"""What pipeline stages say to each other in an iteration, without post-validation and with it.

A small GPT trains on 4 CPU stages over gloo, and every call of torch.distributed is written down.
Listed is all that spans stages in one iteration: collectives, and messages by channel.

Then the waits between a stage's last W of that iteration and its last run-ahead forward of the next
one. With post-validation a stage may wait there for a later stage only if that does its part at the
latest with its own last B, and for an earlier one only if that does its part before its own
run-ahead is over. So nothing that a stage does there depends on what a later one does after its
last B. Without post-validation the same check has to fail: it is the barrier.

Exit code 1 if either is not so.

    .venv/bin/python benchmarks/cross_stage_syncs.py
    .venv/bin/python benchmarks/cross_stage_syncs.py --schedules zb-h2 --tied --flags=--bf16
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from common import verdict
from small_job import megatron_flags
from stage_logs import Logs, Sync, Wait

from megatron.zero_bubble.local_job import JobFailed, run_ranks
from zero_bubble.builders import BUILDERS, build
from zero_bubble.lower import lower

FLAG = "--optimizer-post-validation"
STAGES, MICROBATCHES = 4, 8
ITERATIONS, TRACED = 6, 3
"""The first steps and the last are synchronous."""
SECONDS = 300.0


def main() -> int:
    options = parse()
    code = 0
    for name in options.schedules:
        off, on = (trace(name, [*options.flags, *more], tied=options.tied) for more in ([], [FLAG]))
        print(f"{name}, {STAGES} stages, {MICROBATCHES} microbatches, one iteration\n")
        list_syncs(off, on)
        for title, logs in (("without", off), ("with", on)):
            list_waits(f"{title} post-validation", logs.waits())
        code = max(code, verdicts(name, off.waits(), on.waits()))
        print()
    return code


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schedules",
        default="zb-h1,zb-v",
        metavar="NAME,...",
        help=f"known: {', '.join(BUILDERS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--tied", action="store_true", help="one weight for the embedding and the output"
    )
    parser.add_argument(
        "--flags",
        type=shlex.split,
        default=[],
        metavar="FLAGS",
        help="more of Megatron's flags, as one argument",
    )
    options = parser.parse_args()
    options.schedules = options.schedules.split(",")
    for name in options.schedules:
        if name not in BUILDERS:
            parser.error(f"--schedules {name}: no such schedule; known: {', '.join(BUILDERS)}")
    return options


def trace(schedule: str, more_flags: Sequence[str], *, tied: bool) -> Logs:
    """Train, and return what the ranks wrote down."""
    flags = megatron_flags(
        schedule,
        stages=STAGES,
        microbatches=MICROBATCHES,
        iterations=ITERATIONS,
        hidden=64,
        sequence=32,
        tied=tied,
    )
    # No step may have to be undone: Megatron's default clips this model's gradients.
    flags += ["--clip-grad", "1e6", *more_flags]
    script = Path(__file__).with_name("cross_stage_worker.py")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run_ranks(
                [str(script), scratch, *flags],
                STAGES,
                logs=Path(scratch),
                time_limit=SECONDS,
            )
        except JobFailed as error:  # its message quotes the logs, which are still there
            sys.exit(str(error))
        return Logs(Path(scratch), lower(build(schedule, STAGES, MICROBATCHES)), TRACED)


def list_syncs(off: Logs, on: Logs) -> None:
    without, with_flag = off.syncs(), on.syncs()
    print("what spans stages: how often without post-validation and with it")
    width = max(len(one.what) for one in (*without, *with_flag)) + 2
    print(f"  {'what':<{width}}{'stages':<10}{'off':>5}{'on':>5}  where")
    for one in sorted({*without, *with_flag}, key=order):
        between = " -> " if one.what.startswith("message") else " "
        print(
            f"  {one.what:<{width}}{between.join(map(str, one.stages)):<10}"
            f"{without[one] or '-':>5}{with_flag[one] or '-':>5}  {one.where}"
        )
    print()


def order(one: Sync) -> tuple[bool, Sync]:
    """Collectives first."""
    return one.what.startswith("message"), one


def list_waits(title: str, waits: Sequence[Wait]) -> None:
    print(f"{title}: waits between a stage's last W and its last run-ahead forward")
    alike: dict[tuple[int, int, str], list[Wait]] = defaultdict(list)
    for wait in waits:
        alike[wait.stage, wait.other, wait.what].append(wait)
    width = max((len(one.what) for one in waits), default=0) + 2
    print(f"  {'stage':<7}{'for':<5}{'what':<{width}}{'times':>5}{'longest ms':>12}  may it wait?")
    for (stage, other, what), group in sorted(alike.items()):
        longest = max(one.ms for one in group)
        judged = "; ".join(
            sorted({("yes, " if one.allowed else "NO, ") + one.why for one in group})
        )
        print(f"  {stage:<7}{other:<5}{what:<{width}}{len(group):>5}{longest:>12.1f}  {judged}")
    print()


def verdicts(name: str, off: Sequence[Wait], on: Sequence[Wait]) -> int:
    wrong = sum(not one.allowed for one in on)
    figure = (
        f"{name}, with {FLAG}: {wrong} waits for what later stages do after their last B, bar 0"
    )
    code = verdict(not wrong, figure)
    barrier = sum(not one.allowed for one in off)
    figure = f"{name}, without: the same check finds {barrier} such waits, bar at least 1"
    return max(code, verdict(barrier > 0, figure))


if __name__ == "__main__":
    sys.exit(main())
