"""Passes have names in PyTorch's profiler and in Nsight Systems."""

from __future__ import annotations

import pytest
import torch

from megatron.zero_bubble.profile.ranges import Ranges
from zero_bubble.builders import build
from zero_bubble.lower import lower
from zero_bubble.program import Run

ROW = lower(build("zb-v", 2, 2)).instructions[0]
NAMES = [
    f"{one.what.kind} {one.what.microbatch} c{one.what.chunk}"
    for one in ROW
    if isinstance(one, Run)
]


def test_pytorch_s_profiler_shows_each_pass_by_its_name() -> None:
    ranges = Ranges(nvtx=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for one in ROW:
            ranges.before(one)
            torch.zeros(8).sum()
            ranges.after(one)
    events = [one for one in profile.events() if one.name[0] in "FBW"]
    assert [one.name for one in sorted(events, key=lambda one: one.time_range.start)] == NAMES
    assert {"F 0 c0", "B 1 c1", "W 1 c0"} <= set(NAMES)
    inside = [child.name for one in events for child in one.cpu_children]
    assert inside.count("aten::sum") == len(NAMES)


def test_nvtx_ranges_open_and_close_with_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    closed: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", opened.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: closed.append(opened[-1]))
    ranges = Ranges(nvtx=True)
    for one in ROW:
        ranges.before(one)
        ranges.after(one)
    assert opened == closed == NAMES
