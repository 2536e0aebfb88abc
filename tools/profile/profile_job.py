"""Measure a job's passes, messages and memory, without training further.

    tools/profile/profile_job.py --output DIR -- LAUNCH COMMAND

Runs the command with flags added that measure some iterations and then end the job on all ranks;
nothing is saved. DIR/profile.json is for `tools/profile/compare.py`, for `zero-bubble ... --costs`
and for `--zero-bubble-profile`.

    tools/profile/profile_job.py --output /tmp/profile -- examples/gpt3/laptop.sh
    tools/profile/profile_job.py --output /tmp/profile --placement v -- \\
        torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 8 ...

A job that ends without a profile makes this command fail, with the job's exit code or 1.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zero_bubble.amount import BYTES
from zero_bubble.costs import Costs, Table
from zero_bubble.profile.profile import Profile, load_profile

SCHEDULES = {"linear": "auto", "v": "auto-v"}
NEVER = 10**9


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    output = arguments.output / "profile.json"
    output.unlink(missing_ok=True)
    command = [*arguments.command, *flags(arguments)]
    print(f"running: {' '.join(command)}", flush=True)
    try:
        code = subprocess.run(command, check=False, env=environment()).returncode
    except OSError as error:
        print(f"profile_job: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 2
    if code or not output.is_file():
        print(
            f"profile_job: the job ended with code {code} and without a profile; its own output "
            "above says why",
            file=sys.stderr,
        )
        return code or 1
    print("\n".join(lines(load_profile(output))))
    print(f"\nwritten: {output}; next: tools/profile/compare.py {output}")
    return 0


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The command line; leaves the process with code 2 if it cannot be understood."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where profile.json goes"
    )
    parser.add_argument(
        "--iterations",
        default="3:8",
        metavar="FIRST:LAST",
        help="which are measured, counted from 1 at the start of the job (3:8)",
    )
    parser.add_argument(
        "--placement",
        choices=tuple(SCHEDULES),
        default="linear",
        help="one chunk a stage, or two in a V (linear)",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="after --: what runs the job")
    arguments = parser.parse_args(words)
    arguments.output = arguments.output.resolve()  # the job may run elsewhere
    return arguments


def flags(arguments: argparse.Namespace) -> list[str]:
    """What is added to the job's own flags; of two that contradict, Megatron takes the last."""
    return [
        *("--pipeline-schedule", SCHEDULES[arguments.placement]),
        *("--zero-bubble-profile-iters", arguments.iterations),
        *("--zero-bubble-cache", str(arguments.output), "--zero-bubble-profile-exit"),
        *("--save-interval", str(NEVER)),
    ]


def environment() -> dict[str, str]:
    """The launch scripts take their interpreter from PYTHON: this one, if nobody says another."""
    return {**os.environ, "PYTHON": os.environ.get("PYTHON", sys.executable)}


def lines(profile: Profile) -> list[str]:
    """A table of what was measured."""
    costs = profile.costs
    rows: list[tuple[str, ...]] = [
        ("stage", "chunk", "F ms", "B ms", "W ms", "M_B MiB", "M_W MiB", "room MiB")
    ]
    for stage, held in enumerate(profile.placement.positions):
        for chunk in range(len(held)):
            room = profile.room[stage] if profile.room else None
            rows.append(
                (
                    str(stage),
                    str(chunk),
                    *(f"{_of(costs, table)[stage][chunk]:.3f}" for table in ("t_f", "t_b", "t_w")),
                    *(_mebibytes(_of(costs, table)[stage][chunk]) for table in ("m_b", "m_w")),
                    "-" if room is None else _mebibytes(room),
                )
            )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]
    messages = ", ".join(f"{one} -> {other} {ms:.3f} ms" for one, other, ms in costs.t_edges)
    return [*table, f"messages: {messages or 'none'}", f"iteration: {profile.iteration_ms:.1f} ms"]


def _mebibytes(memory: float) -> str:
    return f"{memory / BYTES['MiB']:,.1f}"


def _of(costs: Costs, name: str) -> Table:
    table: Table = getattr(costs, name)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
