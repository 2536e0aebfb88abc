"""The messages of post-validation: rows of statistics down the pipeline, all of them back up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron.zero_bubble.errors import PipelineError
from megatron.zero_bubble.runtime.transport import Receipt, Transport
from zero_bubble.program import Channel, Flow

__all__ = ["Exchange"]


class Exchange:
    """Rows of all ranks, on one rank of a pipeline.

    A row is gathered over the ranks of its stage first. So each message has the rows of whole
    stages, and every rank of a stage knows the same. The messages go by gloo: they are read by the
    host, which has to decide by them.

    All ranks of the job make theirs together.

    Args:
        stage: this stage, counted as the schedule counts.
        ranks: global rank of every stage of this pipeline.
        width: numbers in a row.
        device: where rows are gathered, that of the default backend.
        wait_limit: seconds that a wait may take.
    """

    def __init__(
        self,
        *,
        stage: int,
        ranks: Sequence[int],
        width: int,
        device: torch.device,
        wait_limit: float,
    ) -> None:
        self.stage, self.last = stage, len(ranks) - 1
        self._width, self._device = width, device
        self._stage_of_rank = _stages_of_all_ranks(stage)
        self._wait_limit = wait_limit
        self._peers = self._make_stage_groups()
        below = [Channel(one, one + 1, Flow.FORWARD) for one in range(self.last)]
        above = [Channel(one + 1, one, Flow.BACKWARD) for one in range(self.last)]
        self._transport = Transport(
            (*below, *above),
            stage=stage,
            ranks=ranks,
            backend="gloo",
            device=torch.device("cpu"),
            wait_limit=wait_limit,
            purpose="zero-bubble validation of the step",
        )
        self.rows = torch.zeros(len(self._stage_of_rank), width, dtype=torch.float64, device="cpu")
        """[ranks, width]; what is not known yet is left from before."""
        self._result: _Relay | None = None

    def known(self, stage: int) -> list[int]:
        """The ranks of all stages up to this one."""
        return [rank for rank, its in enumerate(self._stage_of_rank) if its <= stage]

    def gather(self, row: Sequence[float]) -> None:
        """Learn the rows of this stage's ranks."""
        mine = torch.tensor(row, dtype=torch.float64, device=self._device)
        ranks = self._ranks_of(self.stage)
        of_all = torch.empty(len(ranks), self._width, dtype=torch.float64, device=self._device)
        try:
            dist.all_gather_into_tensor(of_all, mine.view(1, -1), group=self._peers)
        except RuntimeError as error:
            raise PipelineError(
                f"stage {self.stage}, statistics of the optimizer's step: rank {dist.get_rank()} "
                f"lost one of the other ranks of its stage ({ranks}), or waited "
                f"{self._wait_limit:g} s (the limit) for it; look at their output"
            ) from error
        self.rows[ranks] = of_all.cpu()

    def receive_from_before(self) -> None:
        """Learn the rows of all earlier stages."""
        if self.stage > 0:
            ranks = self.known(self.stage - 1)
            self.rows[ranks] = self._transport.wait(
                self._post(self.stage - 1, Flow.FORWARD, len(ranks))
            )

    def send_on(self) -> None:
        """Tell the next stage the rows of all stages up to this one."""
        if self.stage < self.last:
            self._send(self.stage + 1, Flow.FORWARD, self.rows[self.known(self.stage)])

    def expect_result(self) -> None:
        """Let all rows come from the next stage, and pass them on as soon as they are here.

        By a thread of its own, for this stage is busy with its run-ahead, and the stages before it
        need not wait for that.
        """
        if self.stage < self.last:
            receipt = self._post(self.stage + 1, Flow.BACKWARD, len(self.rows))
            self._result = _Relay(lambda: self._take_result(receipt))

    def result(self) -> None:
        """Learn all rows.

        Raises:
            PipelineError: the next stage is gone or stuck.
        """
        if self._result is not None:
            relay, self._result = self._result, None
            relay.finish()
        elif self.stage == self.last:
            self._send_back(self.rows)

    def _take_result(self, receipt: Receipt) -> None:
        rows = self._transport.wait(receipt)
        self._send_back(rows)
        self.rows.copy_(rows)

    def _send_back(self, rows: torch.Tensor) -> None:
        if self.stage > 0:
            self._send(self.stage - 1, Flow.BACKWARD, rows.clone())

    def finish(self) -> None:
        """Wait until all messages of the last step have left."""
        self._transport.drain()

    def _post(self, source: int, flow: Flow, count: int) -> Receipt:
        buffer = torch.empty(count, self._width, dtype=torch.float64, device="cpu")
        return self._transport.receive(Channel(source, self.stage, flow), buffer)

    def _send(self, target: int, flow: Flow, rows: torch.Tensor) -> None:
        self._transport.send(Channel(self.stage, target, flow), rows)

    def _ranks_of(self, stage: int) -> list[int]:
        return [rank for rank, its in enumerate(self._stage_of_rank) if its == stage]

    def _make_stage_groups(self) -> dist.ProcessGroup:
        mine = None
        for stage in range(self.last + 1):
            group = dist.new_group(
                self._ranks_of(stage),
                timeout=timedelta(seconds=self._wait_limit),
                group_desc=f"zero-bubble statistics of stage {stage}",
            )
            if stage == self.stage:
                mine = group
        assert mine is not None
        return mine


class _Relay:
    """Work that goes on beside the caller's until `finish`, which raises what it raised.

    Its thread does not keep a process alive that ends before.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def finish(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise self._error


def _stages_of_all_ranks(stage: int) -> list[int]:
    stages = [0] * dist.get_world_size()
    dist.all_gather_object(stages, stage)
    return stages
