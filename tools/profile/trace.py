"""Merge what the ranks of a traced job wrote: a Chrome trace, a page to look at, and a table.

    .venv/bin/python tools/profile/trace.py DIR

Needs neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zero_bubble.amount import in_bytes
from zero_bubble.cli.common import Parser
from zero_bubble.cli.output import require_writable
from zero_bubble.cli.table import table
from zero_bubble.schedule import Kind
from zero_bubble.simulate import Span
from zero_bubble.trace.chrome import save_trace
from zero_bubble.trace.idle import Cause, Gap, idle_by_cause, measured_gaps, predicted_gaps
from zero_bubble.trace.measured import Measured
from zero_bubble.trace.merge import load_traces
from zero_bubble.trace.page import save_page
from zero_bubble.trace.rank_file import TracedPass

_WINDOW = re.compile(r"(\d+)(?::(\d+))?")
_HEADINGS = {
    Cause.ACTIVATION: "activation",
    Cause.GRADIENT: "gradient",
    Cause.BETWEEN: "between",
    Cause.NO_WORK: "no work",
    Cause.FINALIZE: "finalize",
    Cause.OPTIMIZER: "optimizer",
}
_DEFINITIONS = (
    "bubble rate: (cost - work) / cost, with what the passes really took as work\n"
    "predicted: the same order with the median times measured in that iteration"
)
_EXAMPLES = """
  tools/profile/trace.py traces
  tools/profile/trace.py traces --iterations 10:12 --output trace.json --page page.html
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 for a user's error."""
    try:
        return run(parser().parse_args(argv))
    except OSError as error:
        print(f"trace.py: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
    except ValueError as error:
        print(f"trace.py: {error}", file=sys.stderr)
    return 2


def parser() -> argparse.ArgumentParser:
    found = Parser(
        prog="trace.py",
        description="Merge the trace files of a job's ranks: one Chrome trace, for\n"
        "https://ui.perfetto.dev, one HTML page with the predicted timeline above the measured\n"
        "one, and a table of bubble rates and idle times. docs/tracing.md says what they mean.",
        epilog=f"examples:{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("directory", metavar="DIR", help="what --zero-bubble-trace named")
    found.add_argument("--output", metavar="FILE", help="the Chrome trace (DIR/trace.json)")
    found.add_argument("--page", metavar="FILE", help="the HTML page (DIR/page.html)")
    found.add_argument(
        "--iterations", type=_window, metavar="FIRST[:LAST]", help="only these, both included"
    )
    return found


def run(arguments: argparse.Namespace) -> int:
    directory = Path(arguments.directory)
    traces = load_traces(directory, arguments.iterations)
    output = arguments.output or str(directory / "trace.json")
    page = arguments.page or str(directory / "page.html")
    require_writable("--output", output)
    require_writable("--page", page)
    for sentence in traces.missing:
        print(f"trace.py: {sentence}", file=sys.stderr)
    for one in traces.measured:
        print(f"{_title(one)}\n\n{_table(one)}\n")
    print(f"{_DEFINITIONS}\n")
    save_trace(traces.measured, output)
    save_page(traces.measured, page)
    print(f"{output}: for https://ui.perfetto.dev\n{page}: for a browser")
    return 0


def _window(text: str) -> range:
    match = _WINDOW.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no window: expected the first and last iteration, such as 10:12, or one"
        )
    return range(first, last + 1)


def _title(measured: Measured) -> str:
    ranks = "-".join(map(str, measured.pipeline))
    return (
        f"iteration {measured.iteration}, {measured.schedule.name}, "
        f"{measured.schedule.num_microbatches} microbatches, pipeline of ranks {ranks}: times in ms"
    )


def _table(measured: Measured) -> str:
    """A row a stage, and two for the pipeline: idle times there are means of the stages."""
    predicted = measured.predict()
    gaps, expected = measured_gaps(measured), predicted_gaps(predicted)
    peaks = measured.peak_memory
    counted = [peak for peak in peaks if peak is not None]
    works = _works(measured.work, measured.rows)
    foreseen = _works(predicted.work, predicted.spans)
    rows = [
        _row(f"stage {stage}", work, [gaps[stage]], row[-1].end - row[0].ready, rate, peak)
        for stage, (row, work, rate, peak) in enumerate(
            zip(measured.rows, works, measured.stage_bubble_rates, peaks, strict=True)
        )
    ]
    rows.append(
        _row(
            "measured",
            max(works),
            gaps,
            measured.cost,
            measured.bubble_rate,
            max(counted, default=None),
        )
    )
    rows.append(
        _row(
            "predicted",
            max(foreseen),
            expected,
            predicted.cost,
            predicted.bubble_rate,
            max(predicted.peak_memory) if counted else None,
        )
    )
    works_again = [] if works[0].again is None else ["of it R"]
    header = ["", "work", *works_again, *_HEADINGS.values(), "cost", "bubble rate", "peak memory"]
    return table(header, rows)


class Work(NamedTuple):
    """Of one stage, in ms."""

    total: float
    again: float | None
    """What its R's took of it; None if no stage has any. Recomputation in B is not apart."""


def _works(
    totals: Sequence[float], rows: Sequence[Sequence[TracedPass] | Sequence[Span]]
) -> list[Work]:
    again = [[one for one in row if one.what.kind is Kind.R] for row in rows]
    if not any(again):
        return [Work(total, None) for total in totals]
    return [
        Work(total, sum(one.end - _start(one) for one in row))
        for total, row in zip(totals, again, strict=True)
    ]


def _start(one: TracedPass | Span) -> float:
    return one.start if isinstance(one, Span) else one.ready


def _row(
    name: str,
    work: Work,
    gaps: Sequence[Sequence[Gap]],
    cost: float,
    rate: float,
    peak: float | None,
) -> list[str]:
    idle = [idle_by_cause(one) for one in gaps]
    means = (statistics.fmean(one[cause] for one in idle) for cause in _HEADINGS)
    return [
        name,
        f"{work.total:.2f}",
        *([] if work.again is None else [f"{work.again:.2f}"]),
        *(f"{mean:.2f}" for mean in means),
        f"{cost:.2f}",
        f"{100 * rate:.2f} %",
        "-" if peak is None else in_bytes(peak),
    ]


if __name__ == "__main__":
    sys.exit(main())
