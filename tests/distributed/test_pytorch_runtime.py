"""PyTorch's own pipeline runtime trains by our CSV files, and gets the right gradients."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.unit.orders import all_forwards_first, random_order
from zero_bubble.builders import build
from zero_bubble.export.pytorch_csv import FORMS, save_csv
from zero_bubble.placement import interleaved, v_shape
from zero_bubble.schedule import Kind, Pass, Schedule

RANK = Path(__file__).with_name("pytorch_runtime_rank.py")
MICROBATCHES = 4


def ascending(schedule: Schedule) -> Schedule:
    """The same kinds of passes in the same places, with a chunk's microbatches in order.

    PyTorch counts losses in the order of the last part's forwards. What a pass needs stays there:
    before the k-th F of a chunk ran at least k of the chunk before, and so on.
    """
    rows = []
    for row in schedule.passes:
        forwards: Counter[int] = Counter()
        backwards: Counter[int] = Counter()
        waiting: defaultdict[int, deque[int]] = defaultdict(deque)
        renamed = []
        for one in row:
            if one.kind is Kind.W:
                microbatch = waiting[one.chunk].popleft()
            else:
                counter = forwards if one.kind is Kind.F else backwards
                microbatch = counter[one.chunk]
                counter[one.chunk] += 1
            if one.kind is Kind.B:
                waiting[one.chunk].append(microbatch)
            renamed.append(Pass(one.kind, microbatch, one.chunk))
        rows.append(tuple(renamed))
    return Schedule(schedule.placement, schedule.num_microbatches, tuple(rows))


SCHEDULES: dict[str, Schedule] = {
    "1f1b": build("1f1b", 2, MICROBATCHES),
    "zb-h1": build("zb-h1", 2, MICROBATCHES),
    "zb-h2": build("zb-h2", 2, MICROBATCHES),
    "v": all_forwards_first(v_shape(2), MICROBATCHES, split=True),
    "interleaved": all_forwards_first(interleaved(2, 2), MICROBATCHES, split=False),
    **{f"v-{seed}": ascending(random_order(v_shape(2), MICROBATCHES, seed)) for seed in range(3)},
    **{
        f"interleaved-{seed}": ascending(random_order(interleaved(2, 2), MICROBATCHES, seed))
        for seed in range(3)
    },
}


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Both ranks' output, after all files were tried in one job."""
    directory = tmp_path_factory.mktemp("pytorch")
    command = [str(RANK)]
    for name, schedule in SCHEDULES.items():
        for form in FORMS:
            path = directory / f"{name}-{form}.csv"
            save_csv(schedule, path, form)
            command.append(f"{name}-{form}={form}:{path}")
    run_ranks(command, 2, logs=directory, time_limit=60)
    return [(directory / f"rank{rank}.log").read_text() for rank in range(2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_whole_model(name: str, form: str, logs: list[str]) -> None:
    for log in logs:
        assert f"{name}-{form}: equal" in log.splitlines()
