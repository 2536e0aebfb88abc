"""``zero-bubble export``: a schedule in another program's form."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from zero_bubble.builders import BUILDERS
from zero_bubble.cli.amount import amount
from zero_bubble.cli.common import (
    Commands,
    UsageError,
    add_chunks,
    add_command,
    add_costs,
    add_recompute,
    add_size,
)
from zero_bubble.cli.inputs import Input, inputs, say, warn_of_illegal
from zero_bubble.export import svg
from zero_bubble.export.chrome_trace import save_trace
from zero_bubble.export.json_io import save_schedule
from zero_bubble.export.pytorch_csv import Form, has_losses_in_order, save_csv

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        run,
        summary="write a schedule in another form: PyTorch's CSV, a Chrome trace, JSON, SVG",
        description="Write a schedule in another form:\n"
        "  json       this project's files: what check, draw and training read\n"
        "  csv        torch.distributed.pipelining, format compute_only\n"
        "  csv-comms  the same with messages, format compute_comms\n"
        "  trace      a Chrome trace, for https://ui.perfetto.dev\n"
        "  svg        a picture",
        examples="""
            zero-bubble export zb-h1 --stages 4 --microbatches 8 --output zb-h1.csv
            zero-bubble export zb-h1.json --to csv-comms --output zb-h1.csv
            zero-bubble export from-pytorch.csv --t-f 18.5 --t-b 18.1 --output one.trace.json
            zero-bubble export zb-h2 --stages 4 --microbatches 8 --times --output zb-h2.json
        """,
    )
    names = ", ".join(BUILDERS)
    parser.add_argument("what", metavar="NAME|FILE", help=f"{names}, or a .json or .csv file")
    parser.add_argument(
        "--to",
        choices=tuple(_WRITERS),
        help="the form; by default what the output's name ends in says: "
        + ", ".join(f"{ending} ({form})" for ending, form in _ENDINGS.items()),
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument(
        "--times", action="store_true", help="json: also write when each pass starts and ends"
    )
    parser.add_argument("--width", type=int, metavar="PIXELS", help=f"svg: width ({svg.WIDTH})")
    add_size(parser, required=False)
    add_chunks(parser)
    add_costs(parser)
    add_recompute(parser)


def run(arguments: argparse.Namespace) -> int:
    form = arguments.to or _form_of(arguments.output)
    for flag, given, wanted in (
        ("--times", arguments.times, "json"),
        ("--width", arguments.width is not None, "svg"),
    ):
        if given and form != wanted:
            raise UsageError(f"{flag} is for --to {wanted}, not for {form}")
    found = inputs([arguments.what], arguments)
    _WRITERS[form](found[0], arguments)
    if arguments.times or form in _TIMED:
        say(found)
    warn_of_illegal(found)
    if Path(arguments.output).is_file():  # not /dev/stdout
        print(f"wrote {arguments.output}")
    return 0


def _form_of(output: str) -> str:
    for ending, form in _ENDINGS.items():
        if output.lower().endswith(ending):
            return form
    raise UsageError(
        f"--output {output}: its ending is none of {', '.join(_ENDINGS)}: say --to "
        f"{', '.join(_WRITERS)}"
    )


def _json(given: Input, arguments: argparse.Namespace) -> None:
    source = given.source
    save_schedule(
        source.schedule,
        arguments.output,
        None if source.assumed else source.costs,
        memory_limit=source.memory_limit,
        spans=given.timeline().spans if arguments.times else None,
    )


def _csv(given: Input, arguments: argparse.Namespace) -> None:
    _save_csv(given, arguments, "compute_only")


def _csv_comms(given: Input, arguments: argparse.Namespace) -> None:
    _save_csv(given, arguments, "compute_comms")


def _save_csv(given: Input, arguments: argparse.Namespace, form: Form) -> None:
    save_csv(given.source.schedule, arguments.output, form)
    if not has_losses_in_order(given.source.schedule):
        print(
            f"zero-bubble: note: {arguments.output} runs the last part's forwards out of "
            "microbatch order; PyTorch's runtime needs them in order, for their losses",
            file=sys.stderr,
        )


def _trace(given: Input, arguments: argparse.Namespace) -> None:
    save_trace(given.timeline(), arguments.output)


def _svg(given: Input, arguments: argparse.Namespace) -> None:
    width = svg.WIDTH if arguments.width is None else arguments.width
    picture = svg.draw(given.timeline(), width=width, amount=amount)
    Path(arguments.output).write_text(picture, encoding="utf-8")


_WRITERS: dict[str, Callable[[Input, argparse.Namespace], None]] = {
    "json": _json,
    "csv": _csv,
    "csv-comms": _csv_comms,
    "trace": _trace,
    "svg": _svg,
}
_TIMED = ("trace", "svg")
"""Forms that show times, and with them what was assumed of the costs."""
_ENDINGS = {".trace.json": "trace", ".json": "json", ".csv": "csv", ".svg": "svg"}
"""The first that fits counts."""
