"""We read the CSV files that PyTorch itself writes for its own schedules."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from zero_bubble.builders import build
from zero_bubble.check import check
from zero_bubble.export.pytorch_csv import FORMS, load_csv
from zero_bubble.placement import Placement, interleaved, v_shape
from zero_bubble.schedule import Kind

STAGES, MICROBATCHES = 3, 6


def pytorch_schedule(name: str) -> Any:
    """One of PyTorch's schedules, for stages that are there in name only."""
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=2 * STAGES,
            group_size=STAGES,
            group_rank=0,
            group=None,
            submod=None,
            is_last=False,
        )
        for stage in (0, STAGES)
    ]
    return getattr(schedules, name)(stages, MICROBATCHES, loss_fn=lambda *_: None)


@pytest.mark.parametrize(
    ("name", "placement", "is_split"),
    [
        ("ScheduleInterleaved1F1B", interleaved(STAGES, 2), False),
        ("ScheduleLoopedBFS", interleaved(STAGES, 2), False),
        ("ScheduleInterleavedZeroBubble", interleaved(STAGES, 2), True),
        ("ScheduleZBVZeroBubble", v_shape(STAGES), True),
    ],
)
def test_pytorch_s_own_schedules(
    name: str, placement: Placement, is_split: bool, tmp_path: Path
) -> None:
    theirs = pytorch_schedule(name)
    found = []
    for form in FORMS:
        path = tmp_path / f"{form}.csv"
        theirs._dump_csv(str(path), format=form)
        found.append(load_csv(path))
    assert found[0] == found[1]
    schedule = found[0]
    assert (schedule.placement, schedule.num_microbatches) == (placement, MICROBATCHES)
    assert check(schedule) == []
    assert any(one.kind is Kind.B for row in schedule.passes for one in row) == is_split


def test_interleaved_1f1b_is_the_same_there_and_here(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    pytorch_schedule("ScheduleInterleaved1F1B")._dump_csv(str(path), format="compute_only")
    assert load_csv(path) == build("interleaved", STAGES, MICROBATCHES)


def test_overlapped_passes_are_no_order(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    pytorch_schedule("ScheduleDualPipeV")._dump_csv(str(path), format="compute_only")
    with pytest.raises(ValueError, match=r"unknown cell '\(.*OVERLAP"):
        load_csv(path)
