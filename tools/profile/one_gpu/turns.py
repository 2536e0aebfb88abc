"""What a rank does: trains turn by turn, and writes what each brought.

Rank r appends a line to DIRECTORY/rank{r}.jsonl for every turn, and writes its trace of turn t to
DIRECTORY/turn{t}/ if the schedule is one of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

# isort: split
import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.pipeline_parallel import schedules
from megatron.training import get_args, training

import pretrain_gpt
from megatron.zero_bubble.arguments import schedule_for
from megatron.zero_bubble.patches.optimizer import tell_of_steps
from megatron.zero_bubble.patches.schedule import current_session
from megatron.zero_bubble.profile.messages import Messages, messages_of
from megatron.zero_bubble.profile.monitor import MeasuredBatch, Monitor, Wish
from megatron.zero_bubble.runtime.batch import BatchRequest
from megatron.zero_bubble.runtime.recording import Clock, clock_for
from megatron.zero_bubble.runtime.session import Session
from tools.profile.one_gpu.measured import search
from tools.profile.one_gpu.plan import (
    FUSED,
    ITERATIONS,
    MEGATRON,
    MEGATRON_INTERLEAVED,
    Plan,
    Turn,
)
from tools.profile.one_gpu.start import Data, Start, digests
from zero_bubble.export.json_io import save_schedule
from zero_bubble.trace.rank_file import RankTrace, TracedIteration, save_rank

__all__ = ["run"]

MEGATRONS: dict[str, Callable[..., Any]] = {
    MEGATRON: schedules.forward_backward_pipelining_without_interleaving,
    MEGATRON_INTERLEAVED: schedules.forward_backward_pipelining_with_interleaving,
}


class Recorded:
    """A party of the monitor: all batches of ours, with memory in the first of each turn."""

    def __init__(self) -> None:
        self.batches: list[MeasuredBatch] = []
        self.request: BatchRequest | None = None

    def wants(self, iteration: int) -> Wish:
        return Wish(times=True, memory=begins_turn(iteration))

    def lets_run_ahead(self, iteration: int) -> bool:
        return not begins_turn(iteration)

    def before(self, iteration: int, request: BatchRequest) -> None:
        self.request = request

    def take(self, measured: MeasuredBatch) -> None:
        self.batches.append(measured)


def begins_turn(iteration: int) -> bool:
    """``iteration`` counts from 1."""
    return (iteration - 1) % ITERATIONS == 0


class MegatronsPasses:
    """When the forwards and backwards of Megatron's own schedule ran, on the device's clock."""

    def __init__(self, clock: Clock, device: torch.device) -> None:
        self._clock, self._device = clock, device
        self._iterations: list[list[tuple[Any, Any]]] = []
        self._before = self._held = 0

    def begin_iteration(self) -> None:
        self._iterations.append([])
        if self._counts:
            self._before = torch.cuda.memory_allocated(self._device)

    @property
    def _counts(self) -> bool:
        # The second: the first one of all also allocates what libraries keep.
        return self._device.type == "cuda" and len(self._iterations) == 2

    def noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, noted."""

        def noted(*given: Any, **options: Any) -> Any:
            begin = self._clock.mark()
            result = function(*given, **options)
            self._iterations[-1].append((begin, self._clock.mark()))
            if self._counts:
                held = torch.cuda.memory_allocated(self._device) - self._before
                self._held = max(self._held, held)
            return result

        return noted

    def report(self) -> dict[str, Any]:
        """(begin, end) in ms of every pass by iteration, and bytes held at most after one."""
        ms = self._clock.ms
        return {
            "passes": [
                [(ms(begin), ms(end)) for begin, end in passes] for passes in self._iterations
            ],
            "held": self._held or None,
        }


class Turns:
    """Takes the place of train_step: every `ITERATIONS` calls are a turn of the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.rank = plan, int(os.environ["RANK"])
        self.directory = Path(plan.directory)
        self.train_step = training.train_step
        self.recorded = Recorded()
        self._calls = 0
        self._turn: Turn | None = None
        self._messages: Messages | None = None
        self._originals = schedules.forward_step, schedules.backward_step

    def __call__(self, *given: Any, **options: Any) -> Any:
        number, position = divmod(self._calls, ITERATIONS)
        if self._calls == 0:
            self._prepare(given)
        if position == 0:
            self._begin(self.plan.turns[number])
        if self._passes is not None:
            self._passes.begin_iteration()
        given = (given[0], self._iterators, *given[2:6], self._function, *given[7:])
        result = self.train_step(*given, **options)
        self._marks.append(self._clock.mark())
        self._losses.append(result[0])
        self._calls += 1
        if position == ITERATIONS - 1:
            self._end(number)
        return result

    def _prepare(self, given: tuple[Any, ...]) -> None:
        self._models = given[2]
        self._data = Data(given[1], ITERATIONS * get_num_microbatches())
        self._start = Start(given[2], given[3])
        self._device = torch.empty(0, device="cuda").device
        self._monitor = Monitor(self._session, lambda: int(get_args().curr_iteration) + 1)
        self._monitor.parties.append(self.recorded)
        tell_of_steps(self._monitor)

    @property
    def _session(self) -> Session:
        session = current_session()
        if session is None:
            raise RuntimeError("the job trains by Megatron's own schedule: there is no session")
        return session

    def _begin(self, turn: Turn) -> None:
        self._turn, self._marks, self._losses = turn, list[Any](), list[Any]()
        self._passes: MegatronsPasses | None = None
        schedules.forward_step, schedules.backward_step = self._originals
        self._start.restore()
        self._iterators = self._data.again()
        if turn.limit is not None and not Path(turn.schedule).exists():
            self._search(turn)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._clock = clock_for(self._device)
        if turn.schedule in MEGATRONS:
            self._function = MEGATRONS[turn.schedule]
            self._passes = passes = MegatronsPasses(self._clock, self._device)
            forward, backward = map(passes.noting, self._originals)
            schedules.forward_step, schedules.backward_step = forward, backward
        else:
            self._session.reschedule(partial(schedule_for, turn.schedule))
            # Now, and not within the first iteration.
            stages = get_args().pipeline_model_parallel_size
            self._session.program(get_num_microbatches(), stages, forward_only=False)
            self._function = self._session.forward_backward
        torch.cuda.synchronize()
        dist.barrier()
        self._marks.append(self._clock.mark())

    def _search(self, turn: Turn) -> None:
        """Rank 0 searches with what has been measured, and the others wait."""
        dist.barrier()  # all traces are there
        if self.rank == 0:
            assert turn.limit is not None
            found = search(self.directory, turn.limit, FUSED)
            save_schedule(found, turn.schedule)
        dist.barrier()

    def _end(self, number: int) -> None:
        torch.cuda.synchronize()
        self._monitor.hand_on(wait=True)
        report: dict[str, Any] = {
            "label": self.plan.turns[number].label,
            "marks": [self._clock.ms(one) for one in self._marks],
            "losses": [float(one["lm loss"]) for one in self._losses if one],
            "digests": digests(self._models),
            "allocated": torch.cuda.max_memory_allocated(),
            "multiprocessors": self._multiprocessors(),
        }
        if self._passes is not None:
            report |= self._passes.report()
        else:
            if self._messages is None:
                assert self.recorded.request is not None
                found = messages_of(self._session, self.recorded.request, self._device)
                self._messages = found or Messages((), 0.0)
            self._save_trace(number)
        self.recorded.batches.clear()
        with (self.directory / f"rank{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(report) + "\n")
        dist.barrier()

    def _multiprocessors(self) -> int:
        """That this rank may use; under MPS its share."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.get_device_properties(self._device).multi_processor_count)

    def _save_trace(self, number: int) -> None:
        """With iterations counted from 1 in the turn. All ranks share a host, and its clock."""
        stage, ranks = self._session.pipeline()
        first = number * ITERATIONS
        batches = self.recorded.batches
        edges = () if self._messages is None else self._messages.edges
        trace = RankTrace(
            self.rank,
            stage,
            ranks,
            batches[0].program.placement,
            0.0,
            edges,
            tuple(
                TracedIteration(
                    one.iteration - first,
                    one.program.name,
                    one.program.num_microbatches,
                    one.passes,
                    one.phases,
                )
                for one in batches
            ),
        )
        save_rank(trace, self.directory / f"turn{number:03d}")


def run(plan: Plan) -> NoReturn:
    """Train by Megatron's command line; ends the process."""
    training.train_step = Turns(plan)
    pretrain_gpt.main()
    dist.barrier()
    sys.stdout.flush()
    # All is written. Taking down dozens of communicators one by one gains nothing.
    os._exit(0)
