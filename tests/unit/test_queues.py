"""What a job on GPUs is told before it starts: about hardware queues, and what channels take."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron.zero_bubble.runtime.queues import advise, queue_advice
from megatron.zero_bubble.runtime.transport import memory_taken
from zero_bubble.placement import linear
from zero_bubble.program import channels_between


@pytest.mark.parametrize(
    ("given", "channels", "ordered", "remedy"),
    [
        ("1", 4, True, None),
        ("1", 40, True, None),
        (None, 4, True, "=1"),
        ("32", 4, True, "=1"),
        (None, 6, False, None),
        (None, 7, False, "=32"),
        ("1", 2, False, "=32"),
        ("4", 2, False, None),
        ("32", 60, False, None),
        ("many", 2, False, "=32"),
        ("", 2, False, "=32"),
        ("\u00b2", 2, False, "=32"),  # a digit, and no number
    ],
)
def test_queues_are_as_many_as_needed(
    given: str | None, channels: int, ordered: bool, remedy: str | None
) -> None:
    advice = queue_advice(given, channels=channels, ordered=ordered)
    if remedy is None:
        assert advice is None
    else:
        assert advice is not None
        shown = {None: "not set", "": "empty"}.get(given, given)
        assert advice.startswith(f"CUDA_DEVICE_MAX_CONNECTIONS is {shown}: ")
        assert advice.endswith(f"; export CUDA_DEVICE_MAX_CONNECTIONS{remedy}")


@pytest.mark.parametrize(
    ("tensor", "context", "capability", "warned"),
    [
        (2, 1, (9, 0), True),
        (1, 2, (8, 0), True),
        (1, 1, (9, 0), False),
        (2, 2, (10, 0), False),  # where Megatron has no such condition
    ],
)
def test_one_queue_is_asked_for_where_megatron_insists_on_it(
    tensor: int,
    context: int,
    capability: tuple[int, int],
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    config = SimpleNamespace(tensor_model_parallel_size=tensor, context_parallel_size=context)
    with mock.patch("torch.cuda.get_device_capability", return_value=capability):
        advise(1, channels_between(linear(4)), config)
    assert [one.message.startswith("stage 1: CUDA_DEVICE_MAX") for one in caplog.records] == (
        [True] * warned
    )


def test_memory_of_communicators_is_what_the_device_lacks_and_torch_has_not_got() -> None:
    """With figures of a pretended device: 1000 bytes free, then 700, of which torch cached 100."""
    done: list[str] = []
    with (
        mock.patch("torch.cuda.synchronize", side_effect=lambda _: done.append("synchronize")),
        mock.patch("torch.cuda.mem_get_info", side_effect=[(1000, 2000), (700, 2000)]),
        mock.patch("torch.cuda.memory_reserved", side_effect=[50, 150]),
    ):
        taken = memory_taken(torch.device("cuda", 0), lambda: done.append("connect"))
    assert taken == 200
    assert done == ["synchronize", "connect", "synchronize"]


def test_a_cpu_has_no_such_memory() -> None:
    done: list[str] = []
    assert memory_taken(torch.device("cpu"), lambda: done.append("connect")) is None
    assert done == ["connect"]
