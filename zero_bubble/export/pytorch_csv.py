"""Schedules as the CSV files of ``torch.distributed.pipelining``, in both of its forms.

One row a rank, one action a cell. The number in front is the *global* stage index of PyTorch: the
chunk's position in the model, where `Pass` prints the stage's own chunk. ``compute_only`` files
hold passes (``3F0``, ``3I0`` for B, ``3W0``, ``3B0`` for BW); ``compute_comms`` files also hold the
messages (``3SEND_B0``, ``2RECV_B0``) and ``3REDUCE_GRAD``, which scales and reduces a chunk's
gradients at the end. `_PipelineScheduleRuntime._load_csv(path, format=...)` reads both, as of
PyTorch 2.11; versions without REDUCE_GRAD read ``compute_only``. For FSDP use ``compute_only``
too, since PyTorch then adds the UNSHARD and RESHARD that FSDP needs.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from zero_bubble.check import check
from zero_bubble.export.pytorch_comms import Message, check_messages, with_messages
from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Pass, Schedule

__all__ = ["FORMS", "Form", "has_losses_in_order", "load_csv", "save_csv"]

type Form = Literal["compute_only", "compute_comms"]
"""PyTorch's names of its two forms."""

FORMS: tuple[Form, ...] = ("compute_only", "compute_comms")

_PASS = re.compile(r"([0-9]{1,9})([FIWB][0-9]{1,9})")
_MESSAGE = re.compile(r"([0-9]{1,9})(SEND|RECV)_([FB])([0-9]{1,9})")
_WHOLE_CHUNK = re.compile(r"[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD)")


def save_csv(schedule: Schedule, path: str | Path, form: Form = "compute_only") -> None:
    """Write a legal schedule for PyTorch's runtime.

    ``compute_only`` leaves the messages to PyTorch; ``compute_comms`` writes them too, each right
    after the pass that makes it. ValueError if `zero_bubble.check` refuses the schedule: PyTorch
    would fail or wait for ever; or for R's, which PyTorch has not. See also `has_losses_in_order`.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r}: expected {' or '.join(FORMS)}")
    if any(schedule.chunks_with(Kind.R)):
        raise ValueError(
            f"{path} is not written: the schedule recomputes (R), a pass that PyTorch's schedules "
            "do not have. Without R's, wrap the model's layers in torch.utils.checkpoint: its "
            "backward then recomputes"
        )
    if found := check(schedule):
        raise ValueError(f"{path} is not written, the schedule is illegal: {found[0]}")
    if form == "compute_comms":
        rows = with_messages(schedule)
    else:
        positions = schedule.placement.positions
        rows = [
            [_cell(one, positions[stage]) for one in row]
            for stage, row in enumerate(schedule.passes)
        ]
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def load_csv(path: str | Path) -> Schedule:
    """The schedule of a file in either form, legal or not: `zero_bubble.check` says.

    A row's positions become the stage's chunks 0, 1, ... in ascending order; m is one more than the
    highest microbatch, and each below it needs a forward and a backward somewhere. Empty cells,
    PyTorch's idle time steps, are skipped. Messages, if there are any, must be those the passes
    need, each sent after and received before its pass, and in the same order on both sides; they
    are not kept, since `zero_bubble.lower` makes them anew.
    ValueError names file, row and column (from 1) and cell; OSError if it can't be read.
    """
    cells = _read(path)
    rows = [list(_actions(path, rank, row)) for rank, row in enumerate(cells)]
    placement = _placement(path, rows)
    chunk = {position: chunk for held in placement.positions for chunk, position in enumerate(held)}
    passes = tuple(
        tuple(
            Pass(one.kind, one.microbatch, chunk[one.chunk]) for one in row if isinstance(one, Pass)
        )
        for row in rows
    )
    microbatches = _microbatches(path, cells, passes)
    try:
        check_messages(placement, rows)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Schedule(placement, microbatches, passes, name=Path(path).stem)


def has_losses_in_order(schedule: Schedule) -> bool:
    """Whether the last part of the model runs its F's in ascending order of microbatches.

    PyTorch's runtime (2.11) counts losses as they come: without this, it pairs microbatches with
    each other's losses, or fails.
    """
    stage, chunk = schedule.placement.owner(schedule.placement.num_positions - 1)
    order = [one.microbatch for one in schedule.order(stage, [Kind.F]) if one.chunk == chunk]
    return order == sorted(order)


def _cell(one: Pass, positions: tuple[int, ...]) -> str:
    return str(Pass(one.kind, one.microbatch, positions[one.chunk]))


def _read(path: str | Path) -> list[list[str]]:
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: not a CSV file in UTF-8: {error}") from error
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if not rows:
        raise ValueError(f"{path}: empty: expected a row of cells such as 0F3 for each rank")
    return rows


def _actions(path: str | Path, rank: int, row: list[str]) -> Iterator[Pass | Message]:
    """A row's passes, with the model position as their chunk, and its messages."""
    for column, text in enumerate(row, start=1):
        cell = text.strip()
        if not cell or _WHOLE_CHUNK.fullmatch(cell):
            continue
        if _PASS.fullmatch(cell):
            yield Pass.parse(cell)
        elif match := _MESSAGE.fullmatch(cell):
            yield Message(match[2] == "SEND", match[3], int(match[1]), int(match[4]))
        else:
            raise ValueError(
                f"{path}: row {rank + 1} (rank {rank}), column {column}: unknown cell "
                f"{cell!r:.60}: expected stage, one of F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, "
                "microbatch, such as 0F3"
            )


def _microbatches(
    path: str | Path, cells: list[list[str]], passes: tuple[tuple[Pass, ...], ...]
) -> int:
    """How many there are; a mistyped one is a cell that stands alone, or leaves a gap below."""
    times = Counter(one.microbatch for row in passes for one in row)
    highest = max(times)
    missing = next(one for one in range(len(times) + 1) if one not in times)
    if missing < highest:
        raise ValueError(
            f"{path}: {_where(cells, highest)} is of microbatch {highest}, but no pass is of "
            f"microbatch {missing}: microbatches count from 0 without gaps"
        )
    if alone := sorted(one for one, count in times.items() if count == 1):
        raise ValueError(
            f"{path}: {_where(cells, alone[-1])} is the only pass of microbatch {alone[-1]}: each "
            "has a forward and a backward"
        )
    return highest + 1


def _where(cells: list[list[str]], microbatch: int) -> str:
    """The first cell with a pass of this microbatch."""
    return next(
        f"row {rank + 1} (rank {rank}), column {column}: {cell.strip()}"
        for rank, row in enumerate(cells)
        for column, cell in enumerate(row, start=1)
        if _PASS.fullmatch(cell.strip()) and Pass.parse(cell.strip()).microbatch == microbatch
    )


def _placement(path: str | Path, rows: list[list[Pass | Message]]) -> Placement:
    """Which rank runs which positions of the model."""
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        passes = [one for one in row if isinstance(one, Pass)]
        if not passes:
            raise ValueError(f"{path}: row {rank + 1} (rank {rank}) has no pass such as {rank}F0")
        for one in passes:
            if owner.setdefault(one.chunk, rank) != rank:
                raise ValueError(
                    f"{path}: row {rank + 1} (rank {rank}) has {one}, but stage {one.chunk} "
                    f"also runs in row {owner[one.chunk] + 1}: a stage is on one rank"
                )
    missing = next(position for position in range(len(owner) + 1) if position not in owner)
    if missing < len(owner):
        raise ValueError(
            f"{path}: no row has a pass of stage {missing}, though stage {max(owner)} is there: "
            "stages count from 0 without gaps"
        )
    held = [sorted(one for one, rank in owner.items() if rank == here) for here in range(len(rows))]
    return Placement(tuple(map(tuple, held)))
