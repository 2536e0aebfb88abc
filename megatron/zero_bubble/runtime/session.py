"""The run's state: Megatron's forward_backward function, by interpretation of a schedule."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron.zero_bubble.arrangement import Arrangement
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.runtime.across_stages import AcrossStages, Neighbourhood
from megatron.zero_bubble.runtime.announcing import announce, announce_split
from megatron.zero_bubble.runtime.batch import Batch, BatchRequest, groups_of, message_shape
from megatron.zero_bubble.runtime.compute import BatchOptions, MegatronCompute
from megatron.zero_bubble.runtime.delayed_layers import check_order, some_delay
from megatron.zero_bubble.runtime.interpreter import Compute, Interpreter, Observer
from megatron.zero_bubble.runtime.layers import split_linears
from megatron.zero_bubble.runtime.queues import advise
from megatron.zero_bubble.runtime.recomputation import Recomputations
from megatron.zero_bubble.runtime.run_ahead import RunAhead
from megatron.zero_bubble.runtime.tail import Tail
from megatron.zero_bubble.runtime.transport import Transport
from megatron.zero_bubble.runtime.watching import Attendant, BatchRecord
from megatron.zero_bubble.runtime.weight_grad import WeightGradStore
from zero_bubble.builders import forwards
from zero_bubble.lower import lower
from zero_bubble.placement import Placement
from zero_bubble.program import Instruction, Program, Run, channels_between
from zero_bubble.schedule import Kind, Schedule

__all__ = ["Session"]

logger = logging.getLogger(__name__)

BuildSchedule = Callable[[int, int], Schedule]
"""(stages, microbatches) -> the schedule to run; ConfigurationError if there is none."""


class Session:
    """One rank's part of the pipeline, from the first batch to the last.

    `forward_backward` has the signature of Megatron's forward_backward functions and takes their
    place. Programs are made once for each number of microbatches; channels are connected, and
    linear layers split, at the first batch.

    Args:
        build_schedule: makes the schedule for a number of microbatches.
        arrangement: where its chunks are in Megatron's model.
        wait_limit: seconds a stage may wait for a message.
    """

    def __init__(
        self, build_schedule: BuildSchedule, arrangement: Arrangement, *, wait_limit: float
    ) -> None:
        self._build_schedule, self._wait_limit = build_schedule, wait_limit
        self._arrangement = arrangement
        self._programs: dict[tuple[int, bool], Program] = {}
        self.transport: Transport | None = None
        self._prepared: set[int] = set()
        self._split: set[int] = set()
        self._delaying = False
        self._in_order: Sequence[Instruction] | None = None
        """The last row that layers which delay can run."""
        self.store = WeightGradStore()
        self.tail = Tail(self.store)
        """The order of each iteration's last W's."""
        self._recomputations = Recomputations()
        self.listeners: list[Callable[[BatchRecord], None]] = []
        """Called after every batch."""
        self.observer: Observer | None = None
        """Told of every instruction."""
        self.instrument: Callable[[MegatronCompute], Compute] = lambda compute: compute
        """What runs in the place of a batch's computations, such as one that measures them."""
        self.preparations: list[Callable[[Sequence[torch.nn.Module]], None]] = []
        """Called with the model chunks before their first training batch."""
        self.attendant: Attendant | None = None
        """Measures batches."""
        self.across_stages: AcrossStages | None = None
        """What takes the place of Megatron's collectives over stages, if something does."""
        self.ahead = RunAhead()
        """The beginning of the next batch, if it has run already."""
        self._last_request: BatchRequest | None = None

    def reschedule(self, build_schedule: BuildSchedule) -> None:
        """Run other schedules of the same placement from the next batch on, on all ranks alike."""
        self.ahead.discard()
        self._recomputations.clear()
        self._build_schedule = build_schedule
        self._programs.clear()
        self.tail.clear()

    def program(self, num_microbatches: int, stages: int, *, forward_only: bool) -> Program:
        """The program for a batch of this many microbatches, made once."""
        key = num_microbatches, forward_only
        if key not in self._programs:
            placement = self._arrangement.placement
            schedule = (
                forwards(placement, num_microbatches)
                if forward_only
                else self._build_schedule(stages, num_microbatches)
            )
            if schedule.placement != placement:
                raise ConfigurationError(
                    f"the schedule {schedule.name} has the placement {schedule.placement.name}, "
                    f"but the model is built for the placement {placement.name}"
                )
            self._programs[key] = lower(schedule, forward_only=forward_only)
            if not forward_only and dist.get_rank() == 0:
                announce(schedule)
        return self._programs[key]

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: torch.nn.Module | list[torch.nn.Module],
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: ProcessGroupCollection | None = None,
        force_all_reduce: bool | None = False,
    ) -> list[Any]:
        """Run all passes of a batch on this stage.

        Returns the reduced losses, one a microbatch, on the stage that computes the loss; an empty
        list elsewhere.
        """
        if adjust_tensor_shapes_fn is not None or p2p_communicator is not None:
            raise ConfigurationError(
                "--pipeline-schedule runs models whose stages all exchange tensors of one shape; "
                "distillation and multi-module pipelines need --pipeline-schedule megatron"
            )
        request = BatchRequest(
            tuple(model) if isinstance(model, list) else (model,),
            tuple(data_iterator) if isinstance(data_iterator, list) else (data_iterator,),
            seq_length,
            micro_batch_size,
            decoder_seq_length,
            pg_collection,
            BatchOptions(
                forward_step_func,
                num_microbatches,
                forward_only,
                collect_non_loss_data,
                first_val_step,
                force_all_reduce,
            ),
        )
        if self.attendant is not None and not forward_only:
            self.attendant.before(request)
        batch = self.ahead.take(request) or self._begin(request)
        if not forward_only:
            self._last_request = request
        return self._complete(batch)

    def begin_next(self) -> None:
        """Begin a batch like the last one, to be run ahead (see `RunAhead`)."""
        if self._last_request is None:
            raise RuntimeError("there is no batch yet that the next one could be like")
        self.ahead.begin(self._begin(self._last_request, ahead=True))

    def _begin(self, request: BatchRequest, *, ahead: bool = False) -> Batch:
        """Everything that a batch needs, of which nothing has run."""
        models, options = request.models, request.options
        config = get_model_config(models[0])
        if config.variable_seq_lengths:
            raise ConfigurationError(
                "the model's config has variable_seq_lengths, but stages exchange tensors of one "
                "shape: use --pipeline-schedule megatron"
            )
        groups = groups_of(request)
        arrangement, training = self._arrangement, not options.forward_only
        placement, stage = arrangement.placement, arrangement.stage_of(groups.pp.rank())
        program = self.program(
            options.num_microbatches, groups.pp.size(), forward_only=options.forward_only
        )
        if len(models) != arrangement.chunks_a_rank:
            raise ConfigurationError(
                f"the schedule {program.name} has {arrangement.chunks_a_rank} chunks on a stage, "
                f"the model has {len(models)}"
            )
        if training:
            self._prepare_once(models, program.instructions[stage], stage)
            program = self.tail.reordered(program, models, stage)
        instructions = program.instructions[stage]
        last_stage, last_chunk = placement.owner(placement.num_positions - 1)
        # Not that of a parameter: a stage of an uneven layout may have none.
        device = torch.empty(0, device="cuda").device
        compute = MegatronCompute(
            models=models,
            virtual=arrangement.virtual[stage],
            data_iterators=self.ahead.replayable(request.iterators),
            config=config,
            groups=groups,
            message_shape=message_shape(request),
            device=device,
            instructions=instructions,
            last_chunk=last_chunk if stage == last_stage else None,
            first_stage=placement.owner(0)[0] == stage,
            store=self.store,
            recomputations=self._recomputations,
            options=options,
            across_stages=self.across_stages,
        )
        computing: Compute = self.instrument(compute)
        recording = None
        if self.attendant is not None and training:
            computing, recording = self.attendant.attend(
                computing, compute.split_chunks, request, ahead=ahead
            )
        interpreter = Interpreter(
            stage,
            computing,
            self._connected(program, groups.pp, device, config),
            split_chunks=compute.split_chunks,
            keep_for_backward=training,
            observer=self.observer,
            recording=recording,
        )
        return Batch(request, program, stage, compute, interpreter, instructions)

    def _complete(self, batch: Batch) -> list[Any]:
        """Run what is left of a batch."""
        request, compute = batch.request, batch.compute
        config = get_model_config(request.models[0])
        self.store.begin_iteration()
        if self.across_stages is not None:
            self.across_stages.finish()  # not before: others may have been behind
        if config.timers is not None:
            config.timers("forward-backward", log_level=1).start(
                barrier=config.barrier_with_L1_time
            )
        try:
            compute.open()
            batch.interpreter.execute(batch.left)
            batch.interpreter.finish()
        finally:
            compute.close()
        if config.timers is not None:
            config.timers("forward-backward").stop()
        if self.listeners:
            record = BatchRecord(
                batch.program,
                batch.stage,
                request.options.forward_only,
                tuple(batch.interpreter.log),
                self.store.peak,
            )
            for listener in self.listeners:
                listener(record)
        return compute.losses

    def drain(self) -> None:
        """Wait until all messages between stages have left, and those thrown away have come."""
        if self.transport is not None:
            self.transport.drain()

    def pipeline(self) -> tuple[int, tuple[int, ...]]:
        """This stage, and the global rank of every stage of this pipeline."""
        group = groups_of(self._last_request).pp
        return (
            self._arrangement.stage_of(group.rank()),
            self._arrangement.by_stage(dist.get_process_group_ranks(group)),
        )

    @property
    def placement(self) -> Placement:
        """Where the chunks are, whichever schedule runs."""
        return self._arrangement.placement

    @property
    def has_experts(self) -> bool:
        """Whether the model that trains is a mixture of experts."""
        request = self._last_request
        config = None if request is None else get_model_config(request.models[0])
        return getattr(config, "num_moe_experts", None) is not None

    @property
    def forwards_need_others(self) -> bool:
        """Whether a forward waits for other ranks of the same stage, so that one alone cannot
        fail."""
        if self._last_request is None:
            return False
        model = self._last_request.models[0]
        config, ddp_config = get_model_config(model), getattr(model, "ddp_config", None)
        return (
            config.tensor_model_parallel_size > 1
            or config.context_parallel_size > 1
            or config.expert_model_parallel_size > 1
            or bool(getattr(ddp_config, "overlap_param_gather", False))
        )

    def _prepare_once(
        self, models: Sequence[torch.nn.Module], instructions: Sequence[Instruction], stage: int
    ) -> None:
        new = self._not_in(self._prepared, models)
        for prepare in self.preparations if new else ():
            prepare(new)
        # Apart: a schedule without W's may come first, and one with them later.
        splits = any(isinstance(one, Run) and one.what.kind is Kind.W for one in instructions)
        # Layers that delay their W do so whatever the schedule; without W's it runs when it comes.
        self._delaying = self._delaying or some_delay(new)
        if self._delaying and instructions is not self._in_order:
            check_order(instructions)
            self._in_order = instructions
        unsplit = self._not_in(self._split, models) if splits or self._delaying else []
        if unsplit:
            self._split_linears(unsplit, stage)
        if new and self.ahead.enabled:
            self.across_stages = self._across_stages(models)
        if unsplit and self.across_stages is not None:
            whole = self.across_stages.whole_weight
            if whole is not None:  # its W stays in B
                self.store.accumulate.pop(whole, None)

    def _not_in(self, known: set[int], models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
        """Those models that are not known, which are from now on."""
        new = [one for one in models if id(one) not in known]
        known.update(map(id, new))
        return new

    def _across_stages(self, models: Sequence[torch.nn.Module]) -> AcrossStages:
        stage, ranks = self.pipeline()
        here = Neighbourhood(
            self._arrangement.placement,
            stage,
            ranks,
            dist.get_backend(groups_of(self._last_request).pp),
            torch.empty(0, device="cuda").device,
            self._wait_limit,
        )
        config = get_model_config(models[0])
        tied = get_attr_wrapped_model(models[0], "share_embeddings_and_output_weights")
        # Multi-token prediction embeds on the last stage, by a copy of the first stage's weight.
        tied = tied or bool(getattr(config, "mtp_num_layers", None))
        return AcrossStages(here, models, config, tied=tied)

    def _split_linears(self, models: list[torch.nn.Module], stage: int) -> None:
        report = split_linears(models, self.store)
        if report.whole and not report.split:
            raise ConfigurationError(
                "the schedule splits B and W, but no layer of the model can be split (found "
                f"{', '.join(report.whole[:4])}): use Megatron's local "
                "layers (--transformer-impl local), or --pipeline-schedule 1f1b"
            )
        announce_split(stage, report)

    def _connected(
        self, program: Program, group: dist.ProcessGroup, device: torch.device, config: Any
    ) -> Transport:
        if self.transport is None:
            channels = channels_between(program.placement)
            stage = self._arrangement.stage_of(group.rank())
            if device.type == "cuda":
                advise(stage, channels, config)
            self.transport = Transport(
                channels,
                stage=stage,
                ranks=self._arrangement.by_stage(dist.get_process_group_ranks(group)),
                backend=dist.get_backend(group),
                device=device,
                wait_limit=self._wait_limit,
            )
        return self.transport
