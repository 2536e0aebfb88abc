"""What test_scalars.py and test_job.py check, in a process in CPU mode."""

from __future__ import annotations

import argparse
import json
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.distributed import HashStore

from megatron.zero_bubble.profile.board import Board
from megatron.zero_bubble.profile.job import describe_job
from megatron.zero_bubble.profile.monitor import MeasuredBatch, Wish
from megatron.zero_bubble.profile.scalars import Scalars, work_and_cost
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.placement import linear
from zero_bubble.profile.profile import Profile
from zero_bubble.schedule import Pass
from zero_bubble.trace.rank_file import TracedPass

PROGRAM = lower(build("zb-h1", 2, 1))
REQUEST: Any = None


class Job:
    """Two pipelines of two stages, ranks 0 and 2, and 1 and 3; rank 3 writes."""

    def __init__(self, interval: int = 1, counts: dict[str, int] | None = None) -> None:
        self.written: list[tuple[int, dict[str, float]]] = []
        self.store = HashStore()
        pipelines = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
        self.ranks = []
        for rank in range(4):
            session: Any = SimpleNamespace(pipeline=lambda ranks=pipelines[rank]: (0, ranks))
            self.ranks.append(
                Scalars(
                    session,
                    Board(self.store),
                    rank=rank,
                    last_rank=3,
                    interval=interval,
                    write=(lambda *given: self.written.append(given)) if rank == 3 else None,
                    tokens=lambda: 4096,
                    counts=lambda: counts or {},
                )
            )

    def notes(self) -> int:
        """That are left on the board."""
        return int(self.store.num_keys())


def measured(iteration: int, *passes: tuple[float, float, float]) -> MeasuredBatch:
    row = tuple(
        TracedPass(Pass.parse(f"0F{number}"), *times) for number, times in enumerate(passes)
    )
    return MeasuredBatch(iteration, PROGRAM, 0, Wish(times=True), row, ())


def at(seconds: float) -> Any:
    return mock.patch.object(time, "perf_counter", return_value=seconds)


def the_bubble_rate_is_of_the_busiest_and_the_longest() -> None:
    """Stage 0 works 6 of 7 ms, stage 1 works 4 of 10: 1 - 6/10. A wait at the start is none."""
    job = Job()
    job.ranks[1].take(measured(1, (0.0, 90.0, 93.0), (93.0, 94.0, 97.0)))
    job.ranks[3].take(measured(1, (0.0, 5.0, 7.0), (7.0, 13.0, 15.0)))
    job.ranks[3].before(2, REQUEST)
    ((iteration, values),) = job.written
    assert iteration == 1
    assert abs(values["bubble-rate"] - 0.4) < 1e-12
    assert "rolled-back-steps" not in values


def other_pipelines_say_nothing() -> None:
    job = Job()
    for rank in (0, 2):
        job.ranks[rank].take(measured(1, (0.0, 0.0, 1.0)))
    assert job.notes() == 0


def notes_are_taken_away() -> None:
    job = Job()
    for rank in (1, 3):
        job.ranks[rank].take(measured(1, (0.0, 0.0, 1.0)))
    assert job.notes() == 2
    job.ranks[3].before(2, REQUEST)
    assert job.notes() == 0


def tokens_and_steps() -> None:
    """An iteration that began at 10 s ended when the next began, at 10.5 s."""
    job = Job(counts={"rolled_back": 3, "committed": 9})
    with at(10.0):
        job.ranks[3].before(1, REQUEST)
    for rank in (1, 3):
        job.ranks[rank].take(measured(1, (0.0, 0.0, 1.0)))
    with at(10.5):
        job.ranks[3].before(2, REQUEST)
    ((_, values),) = job.written
    assert values == {"bubble-rate": 0.0, "tokens-per-second": 8192.0, "rolled-back-steps": 3.0}


def only_every_so_many_iterations() -> None:
    job = Job(interval=5)
    wanted = [one for one in range(1, 12) if job.ranks[0].wants(one).times]
    assert wanted == [5, 10]
    assert not any(job.ranks[0].wants(one).memory for one in wanted)


def an_earlier_stage_that_is_late() -> list[int]:
    """It leaves its note when the last stage has begun the next iteration, every time."""
    job = Job()
    for iteration in range(1, 6):
        job.ranks[3].before(iteration, REQUEST)
        if iteration > 1:
            job.ranks[1].take(measured(iteration - 1, (0.0, 0.0, 1.0)))
        job.ranks[3].take(measured(iteration, (0.0, 0.0, 1.0)))
    job.ranks[1].take(measured(5, (0.0, 0.0, 1.0)))
    job.ranks[3].before(6, REQUEST)
    assert job.notes() == 0
    assert all("tokens-per-second" in values for _, values in job.written)
    return [iteration for iteration, _ in job.written]


def work_of_nothing() -> None:
    assert work_and_cost(()) == (0, 0.0)


def job(**changes: Any) -> dict[str, Any]:
    """The description of a small job, with other arguments."""
    given = {
        "hidden_size": 64,
        "num_layers": 4,
        "seq_length": 32,
        "micro_batch_size": 2,
        "tensor_model_parallel_size": 1,
        "params_dtype": torch.float32,
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "attention_dropout": 0.1,
        "pipeline_model_parallel_layout": None,
        # Of no consequence:
        "lr": 0.1,
        "train_iters": 100,
        "timers": object(),
        "save": "somewhere",
    }
    return describe_job(argparse.Namespace(**(given | changes)))


def differences(changes: dict[str, Any], before: dict[str, Any] | None = None) -> list[str]:
    """Between two jobs, as `Profile.differences` names them."""
    place = linear(2)
    costs = Costs.uniform(place, 1, 1, 1)
    return Profile(placement=place, costs=costs, job=job(**(before or {}))).differences(
        job(**changes)
    )


def it_survives_a_file() -> None:
    """What is read again is equal, and was no object of Megatron's."""
    one = job()
    assert json.loads(json.dumps(one)) == one
