"""F, B and W of Megatron's model chunks, in Megatron's own forward and backward steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.zero_bubble.runtime.across_stages import AcrossStages
from megatron.zero_bubble.runtime.recomputation import Recomputations
from megatron.zero_bubble.runtime.weight_grad import WeightGradStore
from zero_bubble.program import Flow, Instruction, Run
from zero_bubble.schedule import Kind

__all__ = ["BatchOptions", "MegatronCompute"]


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What Megatron's training loop asks of one call of the forward_backward function."""

    forward_step_func: Callable[..., Any]
    num_microbatches: int
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    force_all_reduce: bool | None = False


class MegatronCompute:
    """Computes the passes of one stage for one batch; see `runtime.interpreter.Compute`.

    Args:
        models: the rank's model chunks, as the training loop holds them (wrapped).
        virtual: of each chunk of the stage, its number in ``models``.
        data_iterators: one a model chunk.
        config: the model's config, shared by the chunks.
        groups: process groups of this rank.
        message_shape: shape of activations and gradients between stages.
        device: where they live.
        instructions: what the stage will run; tells which pass of a chunk is its last.
        last_chunk: the chunk that computes the loss, if it is on this stage.
        first_stage: whether this stage holds the model's beginning.
        across_stages: takes the place of Megatron's collectives over stages.
    """

    def __init__(
        self,
        *,
        models: Sequence[torch.nn.Module],
        virtual: Sequence[int],
        data_iterators: Sequence[Any],
        config: Any,
        groups: ProcessGroupCollection,
        message_shape: Sequence[int],
        device: torch.device,
        instructions: Sequence[Instruction],
        last_chunk: int | None,
        first_stage: bool,
        store: WeightGradStore,
        recomputations: Recomputations,
        options: BatchOptions,
        across_stages: AcrossStages | None = None,
    ) -> None:
        self._models, self._virtual, self._data_iterators = models, virtual, data_iterators
        self._config, self._groups, self._shape = config, groups, tuple(message_shape)
        self._last_chunk, self._options, self._store = last_chunk, options, store
        self._device = device
        runs = [one.what for one in instructions if isinstance(one, Run)]
        self.split_chunks = frozenset(one.chunk for one in runs if one.kind is Kind.W)
        self._recomputations = recomputations
        self._recomputed = frozenset(one.chunk for one in runs if one.kind is Kind.R)
        lends = store.lends and config.tensor_model_parallel_size > 1
        self._lender = _lenders(instructions) if lends else {}
        self._across = across_stages
        self._complete: list[int] = []  # chunks whose last B other stages are not told of yet
        self._last_forward = {one.chunk: one.microbatch for one in runs if one.kind is Kind.F}
        self._first_forward = {one.chunk: one for one in reversed(runs) if one.kind is Kind.F}
        # Parameters get their last gradient in the last B (norms, biases) or the last W (split
        # weights); only those two may report them as ready for reduction.
        self._last_backward = {
            one.chunk: one.microbatch for one in runs if one.kind in (Kind.B, Kind.BW)
        }
        self._last_weight = {
            one.chunk: one.microbatch for one in runs if one.kind in (Kind.W, Kind.BW)
        }
        # Megatron lets stages but the first reduce after their last pass (--no-align-grad-reduce
        # switches that off). The W's at the tail are what reductions can overlap with.
        self._sync_in_backward = (
            config.grad_sync_func is None or first_stage or bool(self.split_chunks)
        )
        self._no_sync: list[AbstractContextManager[Any] | None] = [None] * len(models)
        self.losses: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device=self._device)

    def open(self) -> None:
        """Before the first backward pass, and after the gradients are zeroed: hold reductions."""
        for number in range(len(self._models)):
            self._hold_sync(number)

    def forward(
        self, chunk: int, microbatch: int, input: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        options, last = self._options, chunk == self._last_chunk
        number = self._virtual[chunk]
        collecting: AbstractContextManager[None] = nullcontext()
        if chunk in self._recomputed:
            collecting = self._recomputations.collecting(chunk, microbatch)
        with self._store.deferred(chunk in self.split_chunks), collecting:
            output, num_tokens = schedules.forward_step(
                options.forward_step_func,
                self._data_iterators[number],
                self._models[number],
                options.num_microbatches,
                input,
                self.losses,
                self._config,
                self._groups.cp.size(),
                collect_non_loss_data=options.collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(
                    options.first_val_step,
                    options.forward_only,
                    self._first_forward[chunk].microbatch == microbatch,
                ),
                current_microbatch=microbatch,
                vp_stage=number if len(self._models) > 1 else None,
                is_last_stage=last,
            )
        self.num_tokens += num_tokens.to(self._device)
        across = None if options.forward_only else self._across
        if across is not None and last and self._last_forward[chunk] == microbatch:
            across.forward_done(self.num_tokens)
        message = None if last else output.detach()
        if not options.forward_only:
            # The message keeps the data until it has left; B needs the graph behind it only.
            schedules.deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        return output, message

    def backward(
        self,
        chunk: int,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        split = chunk in self.split_chunks
        collecting = self._store.collecting(chunk, microbatch) if split else nullcontext()
        lender = self._lender.get((chunk, microbatch))
        with (
            self._store.deferred(split),
            collecting,
            self._store.lending(*lender) if lender else nullcontext(),
            self._synchronized(chunk, microbatch, self._last_backward),
        ):
            gradient: torch.Tensor | None = schedules.backward_step(
                input, output, output_grad, self._config
            )
        if self._across is not None and self._last_backward[chunk] == microbatch:
            self._complete.append(chunk)
        return gradient

    def recompute(self, chunk: int, microbatch: int) -> None:
        with self._store.deferred(chunk in self.split_chunks):
            self._recomputations.run(chunk, microbatch)

    def weight(self, chunk: int, microbatch: int, part: int = 0, parts: int = 1) -> None:
        self._tell_of_complete_chunks()
        with self._synchronized(chunk, microbatch, self._last_weight):
            self._store.run(chunk, microbatch, part, parts)

    def buffer(self, flow: Flow) -> torch.Tensor:
        return torch.empty(self._shape, dtype=self._config.pipeline_dtype, device=self._device)

    def finalize(self) -> None:
        self._tell_of_complete_chunks()
        config, across = self._config, self._across
        groups, num_tokens = self._groups, self.num_tokens
        if across is not None:
            groups, num_tokens = across.groups(groups), across.num_tokens(num_tokens)
        for number in range(len(self._models)):
            self._release_sync(number)
        if not self._sync_in_backward:
            for function, model in zip(_as_list(config.grad_sync_func), self._models, strict=True):
                function(model.parameters())
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func(
                list(self._models),
                num_tokens if config.calculate_per_token_loss else None,
                pg_collection=groups,
                force_all_reduce=self._options.force_all_reduce,
            )

    def _tell_of_complete_chunks(self) -> None:
        # Not within the last B itself: its result, which goes first, is what others wait for.
        while self._across is not None and self._complete:
            self._across.backward_done(self._complete.pop(0))

    def close(self) -> None:
        """Leave all contexts, whatever happened."""
        for number in range(len(self._models)):
            self._release_sync(number)

    @contextmanager
    def _synchronized(self, chunk: int, microbatch: int, last: dict[int, int]) -> Iterator[None]:
        """Gradients may be reduced as they get ready, if this is the pass that completes them."""
        if not (self._sync_in_backward and last[chunk] == microbatch):
            yield
            return
        number = self._virtual[chunk]
        self._release_sync(number)
        try:
            yield
        finally:
            self._hold_sync(number)

    def _hold_sync(self, number: int) -> None:
        no_sync = self._config.no_sync_func
        if no_sync is not None and self._no_sync[number] is None:
            context = _as_list(no_sync)[number]()
            context.__enter__()
            self._no_sync[number] = context

    def _release_sync(self, number: int) -> None:
        context, self._no_sync[number] = self._no_sync[number], None
        if context is not None:
            context.__exit__(None, None, None)


def _lenders(instructions: Sequence[Instruction]) -> dict[tuple[int, int], tuple[int, int]]:
    """For a B, the W that follows it, some of whose gradients hide the B's own reductions.

    (chunk, microbatch) of both. Megatron hides them behind the same layer's weight gradient. Only
    while the stage still has F's to run: later, others wait for the B, which takes longer so. A
    chunk's last W, which completes gradients, comes later still.
    """
    runs = [one for one in instructions if isinstance(one, Run)]
    forwards = [index for index, one in enumerate(runs) if one.what.kind is Kind.F]
    steady = runs[: forwards[-1] if forwards else 0]
    return {
        (one.what.chunk, one.what.microbatch): (after.what.chunk, after.what.microbatch)
        for one, after in pairwise(steady)
        if (one.what.kind, after.what.kind, after.parts) == (Kind.B, Kind.W, 1)
    }


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
