"""What a rank reports of a round: times, and memory from what was held after each pass.

The checks of rounds are in sampler_checks.py, in a process in CPU mode.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron.zero_bubble.profile.memory import peak, room
from tests.unit.cpu_mode import checks_of
from zero_bubble.schedule import Pass
from zero_bubble.trace.memory import chunk_memory
from zero_bubble.trace.rank_file import TracedPass

check = checks_of("tests.unit.sampler_checks")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "what",
    [
        "rounds",
        "a_report_of_a_round",
        "a_report_of_a_short_round",
        "a_round_is_complete_with_its_own_iterations_only",
        "the_time_of_an_iteration",
    ],
)
def test_sampler(what: str) -> None:
    check(what)


def passes(text: str) -> list[TracedPass]:
    """From ``0F0 100, 0I0 40``: each pass, and the bytes held after it."""
    rows = []
    for one in text.split(", "):
        what, held = one.split()
        rows.append(TracedPass(Pass.parse(what), 0.0, 0.0, 1.0, int(held)))
    return rows


def test_memory_of_a_pass_is_what_changed_since_the_one_before() -> None:
    row = passes("0F0 100, 0F1 200, 0I0 140, 0W0 100, 0I1 40, 0W1 0")
    assert chunk_memory(row, 1)[:2] == ((100.0,), (40.0,))
    assert peak(row) == 200


def test_memory_is_the_median_of_microbatches() -> None:
    """A message on its way counts 5 once, and is gone with the next pass."""
    row = passes("0F0 105, 0F1 200, 0F2 300, 0I0 230, 0W0 200, 0I1 130, 0W1 100, 0I2 30, 0W2 0")
    assert chunk_memory(row, 1)[:2] == ((100.0,), (30.0,))
    assert peak(row) == 300


def test_memory_of_each_chunk() -> None:
    """Chunk 0 keeps 100, of which 40 for W; chunk 1 keeps 10, of which 4."""
    row = passes("0F0 100, 1F0 110, 1I0 104, 1W0 100, 0I0 40, 0W0 0")
    assert chunk_memory(row, 2)[:2] == ((100.0, 10.0), (40.0, 4.0))


def test_memory_of_what_is_not_there() -> None:
    """Without W's, all might be left for them; a chunk without layers keeps nothing."""
    assert chunk_memory(passes("0F0 100, 0B0 0"), 2)[:2] == ((100.0, 0.0), (100.0, 0.0))
    assert chunk_memory([], 1)[:2] == ((0.0,), (0.0,))
    assert peak([]) == 0


def test_memory_is_never_negative() -> None:
    assert chunk_memory(passes("0F0 -10, 0I0 -10, 0W0 5"), 1)[:2] == ((0.0,), (0.0,))
    assert chunk_memory(passes("0F0 10, 0I0 0, 0W0 5"), 1)[:2] == ((10.0,), (0.0,))


def test_a_microbatch_keeps_at_least_what_waits_for_w() -> None:
    """With full recomputation F keeps 10, B makes 40 of it, and W frees these."""
    assert chunk_memory(passes("0F0 10, 0I0 40, 0W0 0"), 1)[:2] == ((40.0,), (40.0,))
    assert chunk_memory(passes("0F0 0, 0I0 70, 0W0 0"), 1)[:2] == ((70.0,), (70.0,))


def test_memory_of_a_chunk_that_recomputes() -> None:
    """F keeps 10, R adds 90, of which B leaves 60; the other chunk 1, 4 and 3 of these 5."""
    row = passes("0F0 10, 1F0 11, 1R0 15, 1I0 13, 1W0 10, 0R0 100, 0I0 60, 0W0 0")
    assert chunk_memory(row, 2) == ((100.0, 5.0), (60.0, 3.0), (10.0, 1.0))
    assert chunk_memory(passes("0F0 100, 0I0 60, 0W0 0"), 1).m_r == ()
    # Chunk 0 has no layers: it keeps its output, and has no R.
    row = passes("0F0 5, 1F0 15, 1R0 105, 1I0 65, 1W0 5, 0I0 0, 0W0 0")
    assert chunk_memory(row, 2).m_r == (5.0, 10.0)


def test_room_on_a_cpu_is_divided_among_the_ranks_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1000))
    monkeypatch.setitem(sys.modules, "psutil", free)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert room(CPU, 60) == 60 + 0.9 * 1000 / 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert room(CPU, 60) == 960.0


def test_room_is_unknown_where_nothing_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert room(CPU, 60) is None


def test_room_on_a_gpu_counts_what_the_allocator_keeps_unused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """300 are free; of 900 reserved, at most 700 were in use."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (300, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 900)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 700)
    assert room(torch.device("cuda"), 60) == 60 + 0.9 * (300 + 200)
