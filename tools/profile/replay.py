"""Run a schedule with pauses in place of compute: its measured cost against the predicted one.

    .venv/bin/python tools/profile/replay.py --stages 8 --microbatches 24 --preset 1.5B \\
        --schedule auto --memory-limit 2p

Interpreter, transport and program are those of training, over gloo on this machine; only the passes
are sleep. Predicted is what the simulator says of the same schedule and of the times asked for.
Cost means the same for both (`Timeline.cost`): the longest time from a stage's first start to its
last end. Measured times come from the interpreter's event log: a pass starts when its message is
there and the pass before it is done, and ends when its instruction ends.
`megatron.zero_bubble.profile.replay` says how pauses and messages are timed. The median of the
repeats decides.

The measured bubble rate is that of a trace (`zero_bubble.trace.measured.Measured`): (cost - work) /
cost with what the passes really took as work. A trace's prediction is another: it takes the times
measured, and so leaves out what made single passes longer than they were asked to be.

Exit code: 0 if measured over predicted is within --bar, 1 if not or if a stage failed, 2 for a
user's error.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.zero_bubble.profile.replay_plan import (
    AUTO,
    DEFAULT_PRESET,
    DEFAULT_STAGES,
    LEAST_PAUSE_MS,
    MOST_STAGES,
    PAUSE_MS_A_SHARE,
    Plan,
    plan_of,
)
from zero_bubble.builders import BUILDERS
from zero_bubble.cli.common import Parser, UsageError
from zero_bubble.cli.inputs import counted
from zero_bubble.cli.interrupt import stop_on_interrupt
from zero_bubble.cli.memory_limit import add_memory_limit
from zero_bubble.cli.output import require_writable
from zero_bubble.cli.table import table
from zero_bubble.costs import paper_profiles
from zero_bubble.program import channels_between
from zero_bubble.simulate import Timeline, simulate

if TYPE_CHECKING:
    from megatron.zero_bubble.profile.replay_job import Replayed

# torch is imported where it is used: errors should not wait for it.

BAR, REPEATS = 1.03, 3
_EXAMPLES = """
  tools/profile/replay.py --stages 8 --microbatches 24 --preset 1.5B --schedule auto \\
      --memory-limit 2p
  tools/profile/replay.py --stages 16 --preset 14.6B
  tools/profile/replay.py --stages 8 --preset 6.2B --placement v
  tools/profile/replay.py --stages 4 --schedule zb-h1 --costs costs.json
  tools/profile/replay.py --schedule schedule.json
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; see the top of the file."""
    try:
        return run(parser().parse_args(argv))
    except OSError as error:
        print(f"replay.py: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except ValueError as error:
        print(f"replay.py: {error}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    models = dict.fromkeys(one.model for one in paper_profiles())
    found = Parser(
        prog="replay.py",
        description="Runs a schedule with pauses in place of compute, a process a stage, and\n"
        "compares what it costs with what the simulator predicts.",
        epilog=f"examples:{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--stages",
        type=int,
        metavar="P",
        help=f"up to {MOST_STAGES} ({DEFAULT_STAGES}, or those of --costs)",
    )
    found.add_argument("--microbatches", type=int, metavar="M", help="(the preset's, or 3 P)")
    found.add_argument(
        "--schedule",
        default=AUTO,
        metavar="WHAT",
        help=f"auto, {', '.join(BUILDERS)}, or FILE.json (%(default)s)",
    )
    found.add_argument(
        "--placement", choices=("linear", "interleaved", "v"), help="for auto (linear)"
    )
    found.add_argument("--chunks", type=int, metavar="V", help="of a stage, where interleaved (2)")
    add_memory_limit(found)
    found.add_argument(
        "--effort", choices=("quick", "normal"), default="quick", help="of the search (%(default)s)"
    )
    times = found.add_mutually_exclusive_group()
    times.add_argument(
        "--preset",
        choices=[*models],
        help="times that the paper profiled for a model of this size; where it has none for this "
        f"number of stages, those of the nearest ({DEFAULT_PRESET})",
    )
    times.add_argument("--costs", metavar="FILE.json", help="times to use instead")
    found.add_argument(
        "--least-pause",
        type=float,
        metavar="MS",
        help="all times are multiplied by what makes the shortest pass last so long, if it is "
        f"shorter ({LEAST_PAUSE_MS:g} ms, and {PAUSE_MS_A_SHARE:g} for each stage to a core)",
    )
    found.add_argument(
        "--repeats", type=int, default=REPEATS, metavar="N", help="after a warm-up (%(default)s)"
    )
    found.add_argument(
        "--bar", type=float, default=BAR, help="most measured over predicted (%(default)s)"
    )
    found.add_argument(
        "--no-real-time",
        action="store_true",
        help="do not ask to be scheduled before the machine's other processes",
    )
    found.add_argument("--json", metavar="FILE", help="also write the figures to this file")
    found.add_argument(
        "--trace", metavar="DIR", help="also write what ran, as a traced job's ranks do"
    )
    return found


def run(arguments: argparse.Namespace) -> int:
    _require_numbers(arguments)
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    plan = plan_of(arguments)
    print("\n".join(plan.lines), flush=True)
    from megatron.zero_bubble.profile.replay_job import ReplayFailed, replay

    try:
        found = replay(
            plan.schedule,
            plan.costs,
            repeats=arguments.repeats,
            real_time=not arguments.no_real_time,
        )
    except ReplayFailed as error:
        print(f"replay.py: {error}", file=sys.stderr)
        return 1
    figures = figures_of(plan, found)
    report(plan, figures)
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    if arguments.trace is not None:
        save_traces(plan, found, arguments.trace)
        print(f"{arguments.trace}: for trace.py, which predicts with the times measured")
    met: bool = figures["ratio"] <= arguments.bar
    verdict = f"measured over predicted {figures['ratio']:.4f}, bar {arguments.bar:g}"
    print(f"{'met' if met else 'MISSED'}: {verdict}")
    return 0 if met else 1


def _require_numbers(arguments: argparse.Namespace) -> None:
    if arguments.repeats < 1:
        raise UsageError(f"--repeats {arguments.repeats}: at least 1 is needed")
    for flag in ("bar", "least_pause"):
        value: float | None = getattr(arguments, flag)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{flag.replace('_', '-')} {value:g}: a number above 0 is needed")


def figures_of(plan: Plan, found: Replayed) -> dict[str, Any]:
    """What `report` prints and ``--json`` writes; times in ms."""
    predicted = simulate(plan.schedule, plan.costs)
    costs = [one.timeline.cost for one in found.iterations]
    median = statistics.median(costs)
    typical = min(found.iterations, key=lambda one: abs(one.timeline.cost - median))
    rates = [_bubble_rate(one.timeline) for one in found.iterations]
    pauses = sorted(excess for one in found.iterations for excess in _excesses(one.timeline))
    latencies = sorted(ms for one in found.iterations for ms in one.latencies)
    return {
        "schedule": plan.schedule.name,
        "placement": [*map(list, plan.schedule.placement.positions)],
        "microbatches": plan.schedule.num_microbatches,
        "scale": plan.scale,
        "bound": plan.bound,
        "predicted": {"cost": predicted.cost, "bubble_rate": predicted.bubble_rate},
        "measured": {
            "costs": costs,
            "cost": median,
            "bubble_rates": rates,
            "bubble_rate": statistics.median(rates),
        },
        "ratio": median / predicted.cost,
        "stages": _stages(predicted, typical.timeline),
        "excess": _quantiles(pauses),
        "latency": _quantiles(latencies),
        "t_comm": plan.costs.t_comm,
        "real_time": found.real_time,
    }


def _bubble_rate(measured: Timeline) -> float:
    """As `zero_bubble.trace.measured.Measured.bubble_rate`: with the work measured."""
    work = max(sum(one.end - one.start for one in row) for row in measured.spans)
    return (measured.cost - work) / measured.cost


def _stages(predicted: Timeline, measured: Timeline) -> list[dict[str, Any]]:
    """Each stage's length, and its pass that is furthest from its predicted time."""
    stages = []
    for ours, theirs in zip(predicted.spans, measured.spans, strict=True):
        late, what = max(
            ((there.end - here.end, here.what) for here, there in zip(ours, theirs, strict=True)),
            key=lambda one: abs(one[0]),
        )
        stages.append(
            {
                "predicted": ours[-1].end - ours[0].start,
                "measured": theirs[-1].end - theirs[0].start,
                "largest_difference": late,
                "of_pass": str(what),
            }
        )
    return stages


def _excesses(timeline: Timeline) -> list[float]:
    """By how much each pass took longer than its time, in ms."""
    return [
        span.end - span.start - timeline.costs.duration(span.what.kind, stage, span.what.chunk)
        for stage, row in enumerate(timeline.spans)
        for span in row
    ]


def _quantiles(ascending: Sequence[float]) -> dict[str, float]:
    """Empty if there are none."""
    if not ascending:
        return {}
    last = len(ascending) - 1
    return {
        "count": len(ascending),
        "median": ascending[last // 2],
        "p95": ascending[round(0.95 * last)],
        "longest": ascending[last],
    }


def report(plan: Plan, figures: dict[str, Any]) -> None:
    """Print the figures."""
    predicted, measured = figures["predicted"], figures["measured"]
    schedule = plan.schedule
    print(
        f"schedule: {schedule.name}, {counted(schedule.num_stages, 'stage')}, "
        f"{counted(schedule.num_microbatches, 'microbatch')}, placement {schedule.placement.name}"
    )
    if plan.bound is not None:
        print(f"bound: {plan.bound:.1f} ms")
    print(
        f"predicted, with the times asked for: cost {predicted['cost']:.1f} ms, "
        f"bubble rate {predicted['bubble_rate']:.2%}"
    )
    print(
        f"measured: cost {', '.join(f'{one:.1f}' for one in measured['costs'])} ms, "
        f"median {measured['cost']:.1f} ms"
    )
    print(
        f"measured, with what passes took as work: bubble rate "
        f"{', '.join(f'{one:.2%}' for one in measured['bubble_rates'])}, "
        f"median {measured['bubble_rate']:.2%}"
    )
    rows = [
        (
            str(stage),
            f"{one['predicted']:.1f}",
            f"{one['measured']:.1f}",
            f"{one['measured'] / one['predicted']:.4f}" if one["predicted"] else "-",
            f"{one['largest_difference']:+.1f}",
            one["of_pass"],
        )
        for stage, one in enumerate(figures["stages"])
    ]
    heads = ("stage", "predicted ms", "measured", "ratio", "largest difference", "of pass")
    print(f"\n{table(heads, rows)}\n")
    print(f"passes, beyond their time: {_quantiles_line(figures['excess'])}")
    print(f"messages that a stage waited for, in all: {_quantiles_line(figures['latency'])}")
    if not figures["real_time"]:
        print("scheduled like any other process: what else runs here lengthens passes")


def _quantiles_line(found: dict[str, float]) -> str:
    if not found:
        return "none"
    return (
        f"{found['count']}, median {found['median']:.2f} ms, 95% within {found['p95']:.2f}, "
        f"longest {found['longest']:.2f}"
    )


def save_traces(plan: Plan, found: Replayed, directory: str) -> None:
    """Write a file for each stage, as the ranks of a traced job do."""
    from zero_bubble.trace.rank_file import RankTrace, TracedIteration, TracedPass, save_rank

    placement, costs = plan.schedule.placement, plan.costs
    channels = channels_between(placement)
    edges = {(one.source, one.target): costs.comm(one.source, one.target) for one in channels}
    for stage in range(placement.num_stages):
        iterations = tuple(
            TracedIteration(
                number,
                plan.schedule.name,
                plan.schedule.num_microbatches,
                tuple(
                    TracedPass(what, begin / 1e6, ready / 1e6, end / 1e6)
                    for what, begin, ready, end in one.logs[stage].runs()
                ),
            )
            for number, one in enumerate(found.iterations, 1)
        )
        save_rank(
            RankTrace(
                stage,
                stage,
                tuple(range(placement.num_stages)),
                placement,
                0.0,
                tuple((source, target, ms) for (source, target), ms in sorted(edges.items())),
                iterations,
            ),
            directory,
        )


if __name__ == "__main__":
    stop_on_interrupt()
    sys.exit(main())
