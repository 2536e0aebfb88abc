"""The flags, and what is wrong with a combination of them, said before training starts."""

from __future__ import annotations

import argparse
import functools
import logging
from pathlib import Path
from typing import Any

from megatron.zero_bubble.auto_arguments import AUTOMATIC, add_auto_arguments, check_auto
from megatron.zero_bubble.chunk_arguments import chunks_asked_for, set_layers
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.layer_arguments import check_layers
from megatron.zero_bubble.post_validation_arguments import (
    add_post_validation_arguments,
    check_post_validation,
)
from megatron.zero_bubble.recompute_arguments import (
    add_recompute_arguments,
    check_recomputation,
    with_recomputation_of,
)
from megatron.zero_bubble.rules import Rule
from zero_bubble.builders import BUILDERS, build
from zero_bubble.check import bit_identical_order, check
from zero_bubble.export.json_io import load_schedule
from zero_bubble.placement import Placement
from zero_bubble.schedule import Kind, Schedule

__all__ = ["add_arguments", "refuse_yaml", "schedule_for", "schedule_for_job", "validate"]

MEGATRON = "megatron"
LONGEST_WAIT = 1e7  # seconds; torch's timeouts overflow a little further on
logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add this project's flags to Megatron's parser."""
    group = parser.add_argument_group("zero bubble")
    group.add_argument(
        "--pipeline-schedule",
        default=None,
        metavar="{megatron,auto,auto-v," + ",".join(BUILDERS) + ",FILE.json}",
        help="Order of passes on the pipeline's stages. megatron (the default) leaves Megatron's "
        "own schedule untouched; auto measures the job and goes over to the best schedule for it "
        "that fits into memory, auto-v the same with two chunks a stage (V); gpipe, 1f1b and "
        "interleaved fuse the backward pass; the others split it into B (input gradient) and W "
        "(weight gradient): zb-h1 at the activation memory of 1f1b, zb-h2 at about twice of it, "
        "zb-interleaved at that of interleaved, zb-v at that of 1f1b, v-half and v-min at about a "
        "half and a third of it; a file is a schedule saved "
        "by `zero-bubble schedule`.",
    )
    group.add_argument(
        "--enable-zero-bubble",
        action="store_true",
        help="The same as --pipeline-schedule zb-h1.",
    )
    group.add_argument(
        "--zero-bubble-wait-limit",
        type=float,
        default=None,
        metavar="SECONDS",
        help="How long a stage may wait for a message before the job ends with an error that says "
        "stage, pass and channel. Default: --distributed-timeout-minutes.",
    )
    group.add_argument(
        "--zero-bubble-device",
        choices=("cpu", "cuda"),
        default=None,
        help="cpu trains on the CPU over gloo; also by ZERO_BUBBLE_DEVICE=cpu in the environment. "
        "Default: cuda where a CUDA device exists, else cpu.",
    )
    group.add_argument(
        "--no-zero-bubble-tp-overlap",
        action="store_false",
        dest="zero_bubble_tp_overlap",
        help="With tensor parallelism, do not hide a B's reductions behind weight gradients of the "
        "W that follows it.",
    )
    group.add_argument(
        "--zero-bubble-bucket-all-stages",
        action="store_true",
        help="With --overlap-grad-reduce, cut gradients into buckets (--ddp-bucket-size) on all "
        "stages and chunks, so that they can be reduced one by one; Megatron does so for the first "
        "chunk of the first rank alone. Three and more data-parallel ranks then add gradients in "
        "another order, and checkpoints of the distributed optimizer are laid out otherwise.",
    )
    group.add_argument(
        "--no-zero-bubble-reorder-tail",
        action="store_false",
        dest="zero_bubble_reorder_tail",
        help="With --overlap-grad-reduce, leave the last W's of an iteration in the schedule's "
        "order. By default they run by parameter, so that reduction of the first gradients begins "
        "while others are computed.",
    )
    add_recompute_arguments(group)
    add_auto_arguments(parser)
    add_post_validation_arguments(parser)
    return parser


def schedule_for_job(
    args: Any, name: str, stages: int, microbatches: int, chunks: int | None = None
) -> Schedule:
    """`schedule_for`, with recomputation where validated arguments have it.

    Raises:
        ConfigurationError: as `schedule_for`, or a file with R's in a job that has none.
    """
    schedule = schedule_for(name, stages, microbatches, chunks)
    return with_recomputation_of(args, schedule, f"--pipeline-schedule {name}")


def schedule_for(name: str, stages: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """The schedule that ``--pipeline-schedule name`` means for a pipeline and a batch.

    ``chunks`` is the number of chunks a stage where the schedule leaves a choice (interleaved).

    Raises:
        ConfigurationError: a name that cannot run, or a file that cannot be read or is for other
            numbers.
    """
    if name in BUILDERS:
        return _named(name, stages, microbatches, chunks)
    flag = f"--pipeline-schedule {name}"
    names = ", ".join((MEGATRON, *AUTOMATIC, *BUILDERS))
    choice = f"choose {names}, or a file that ends in .json"
    if not name.endswith(".json"):
        raise ConfigurationError(f"{flag}: no such schedule; {choice}")
    if not Path(name).is_file():
        raise ConfigurationError(
            f"{flag}: there is no file {Path(name).resolve()}; `zero-bubble schedule zb-h1 "
            f"--stages {stages} --microbatches {microbatches} --output FILE.json` makes one"
        )
    try:
        schedule = load_schedule(name)
    except (ValueError, OSError, OverflowError, RecursionError) as error:
        raise ConfigurationError(f"{flag}: {error}") from error
    if schedule.num_stages != stages:
        raise ConfigurationError(
            f"{flag} is for {schedule.num_stages} stages, --pipeline-model-parallel-size is "
            f"{stages}: make the two equal"
        )
    if schedule.num_microbatches != microbatches:
        raise ConfigurationError(
            f"{flag} is for {schedule.num_microbatches} microbatches, a batch has {microbatches} "
            "(--global-batch-size / (--micro-batch-size x data parallel size)): make the two equal"
        )
    violations = check(schedule)
    if violations:
        raise ConfigurationError(f"{flag} cannot run: {violations[0]}")
    return schedule


@functools.lru_cache(maxsize=8)  # the V's are searched for, and asked for more than once
def _named(name: str, stages: int, microbatches: int, chunks: int | None) -> Schedule:
    return build(name, stages, microbatches, chunks=chunks if BUILDERS[name].takes_chunks else None)


def refuse_yaml(args: Any) -> None:
    """Megatron validates what a YAML file says by other code, before which `validate` does not run.

    Raises:
        ConfigurationError: a schedule of ours together with such a file.
    """
    schedule = getattr(args, "pipeline_schedule", None)
    asked = getattr(args, "enable_zero_bubble", False) or schedule not in (None, MEGATRON)
    if asked and getattr(args, "yaml_cfg", None) is not None:
        raise ConfigurationError(
            f"--yaml-cfg {args.yaml_cfg} does not work with --pipeline-schedule: give the file's "
            "settings as flags"
        )


def validate(args: Any) -> Placement | None:
    """Resolve the alias, stop with ConfigurationError at a combination that cannot work, and tell
    Megatron which layers each chunk has.

    To be called right before Megatron's own validation, which changes arguments.

    Returns:
        Where the schedule's chunks are; None where Megatron's own schedule runs.
    """
    given = getattr(args, "pipeline_schedule", None)
    if getattr(args, "enable_zero_bubble", False):
        if given not in (None, "zb-h1"):
            raise ConfigurationError(
                f"--enable-zero-bubble means --pipeline-schedule zb-h1, but --pipeline-schedule is "
                f"{given}: give one of the two"
            )
        given = "zb-h1"
    args.pipeline_schedule = given or MEGATRON
    args.zero_bubble_positions = None
    args.zero_bubble_delays = False
    check_recomputation(args)
    _check_buckets(args)
    if args.pipeline_schedule == MEGATRON:
        check_auto(args, None)
        check_post_validation(args, None)
        return None
    limit = getattr(args, "zero_bubble_wait_limit", None)
    if limit is not None and not 0 < limit <= LONGEST_WAIT:
        raise ConfigurationError(
            f"--zero-bubble-wait-limit {limit:g}: must be above 0 seconds and at most "
            f"{LONGEST_WAIT:g}"
        )
    flag = f"--pipeline-schedule {args.pipeline_schedule}"
    stages = args.pipeline_model_parallel_size
    if stages < 2:
        raise ConfigurationError(
            f"{flag} needs a pipeline, but --pipeline-model-parallel-size is {stages}: set it to 2 "
            "or more, or leave --pipeline-schedule out"
        )
    for rule in _RULES:
        if rule.broken(args):
            raise ConfigurationError(rule.complaint(args, flag))
    name = AUTOMATIC.get(args.pipeline_schedule, args.pipeline_schedule)
    schedule = schedule_for_job(args, name, stages, _microbatches(args), _chunks(args))
    for ramp in ("rampup_batch_size", "step_batch_size_schedule"):
        sizes = getattr(args, ramp, None)
        if sizes is not None and name not in BUILDERS:
            raise ConfigurationError(
                f"{flag} is for one number of microbatches, and --{ramp.replace('_', '-')} {sizes} "
                f"changes it: use a schedule by name ({', '.join(BUILDERS)})"
            )
    skipped = getattr(args, "iterations_to_skip", None)
    if skipped and max(map(len, schedule.placement.positions)) > 1:
        raise ConfigurationError(
            f"{flag} has several chunks on a stage, and Megatron can skip iterations "
            f"(--iterations-to-skip {' '.join(map(str, skipped))}) only with one: leave it out, or "
            "choose a schedule with one chunk, such as zb-h1"
        )
    reasons = bit_identical_order(schedule)
    if _splits(schedule):
        disorder = str(reasons[0]) if reasons else None
        args.zero_bubble_delays = check_layers(args, flag, disorder=disorder)
    _check_saving(args)
    check_auto(args, schedule.placement)
    check_post_validation(args, schedule.placement)
    set_layers(args, flag, schedule.placement)
    if reasons and getattr(args, "rank", 0) == 0:
        logger.warning("%s is legal, but not bit-identical to 1F1B: %s", flag, reasons[0])
    return schedule.placement


def _check_buckets(args: Any) -> None:
    flag = "--zero-bubble-bucket-all-stages"
    if not getattr(args, "zero_bubble_bucket_all_stages", False):
        return
    if args.pipeline_schedule == MEGATRON:
        raise ConfigurationError(
            f"{flag} needs one of this project's schedules, but --pipeline-schedule is megatron: "
            f"choose another, or leave {flag} out"
        )
    if not getattr(args, "overlap_grad_reduce", False):
        raise ConfigurationError(
            f"{flag} cuts gradients into buckets that are reduced while others are computed: add "
            f"--overlap-grad-reduce, or leave {flag} out"
        )
    if getattr(args, "overlap_param_gather_with_optimizer_step", False):
        raise ConfigurationError(
            f"{flag} does not work with --overlap-param-gather-with-optimizer-step, which has "
            "buckets of its own: leave one of them out"
        )


def _check_saving(args: Any) -> None:
    tied = not getattr(args, "untie_embeddings_and_output_weights", True)
    if tied and getattr(args, "mtp_num_layers", None) and getattr(args, "save", None) is not None:
        raise ConfigurationError(
            f"--save {args.save}: Megatron cannot save a model with --mtp-num-layers "
            f"{args.mtp_num_layers} and tied embeddings on several stages: add "
            "--untie-embeddings-and-output-weights, or leave --save out"
        )


def _chunks(args: Any) -> int | None:
    """Chunks a stage, where the schedule leaves the choice to Megatron's flags."""
    builder = BUILDERS.get(args.pipeline_schedule)
    return chunks_asked_for(args) if builder is not None and builder.takes_chunks else None


def _splits(schedule: Schedule) -> bool:
    return any(one.kind is Kind.W for row in schedule.passes for one in row)


def _microbatches(args: Any) -> int:
    ranks_a_replica = (
        args.tensor_model_parallel_size
        * args.pipeline_model_parallel_size
        * args.context_parallel_size
    )
    data_parallel: int = max(1, args.world_size // max(1, ranks_a_replica))
    micro: int = args.micro_batch_size or 1
    batch: int = args.global_batch_size or micro * data_parallel
    return max(1, batch // (micro * data_parallel))


_LEAVE_OUT = "leave it out"
_RULES = (
    Rule("--microbatch-group-size-per-virtual-pipeline-stage",
          "microbatch_group_size_per_vp_stage",
         "the schedule has its own order of microbatches; leave it out",
         same_as="pipeline_model_parallel_size"),
    Rule("--defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute",
         "the output layer's weight gradient is deferred already; leave it out"),
    Rule("--delay-wgrad-compute", "delay_wgrad_compute",
         "weight gradients are delayed already; leave it out"),
    Rule("--overlap-moe-expert-parallel-comm", "overlap_moe_expert_parallel_comm", _LEAVE_OUT),
    Rule("--cuda-graph-impl", "cuda_graph_impl",
         "a captured graph has Megatron's order of passes; use --cuda-graph-impl none",
         (None, "none")),
    Rule("--enable-cuda-graph", "enable_cuda_graph", _LEAVE_OUT),
    Rule("--use-megatron-fsdp", "use_megatron_fsdp", "use Megatron's DistributedDataParallel"),
    Rule("--use-torch-fsdp2", "use_torch_fsdp2", "use Megatron's DistributedDataParallel"),
    Rule("--tensor-parallel-num-weight-shards", "tensor_parallel_num_weight_shards",
         _LEAVE_OUT, (None, 1), same_as="tensor_model_parallel_size"),
    Rule("--expert-tensor-parallel-num-weight-shards", "expert_tensor_parallel_num_weight_shards",
         _LEAVE_OUT, (None, 1), same_as="expert_tensor_parallel_size"),
    Rule("--fine-grained-activation-offloading", "fine_grained_activation_offloading", _LEAVE_OUT),
    Rule("--cpu-offloading-num-layers", "cpu_offloading_num_layers", _LEAVE_OUT, (None, 0)),
    Rule("--moe-paged-stash", "moe_paged_stash", _LEAVE_OUT),
    Rule("--moe-expert-rank-capacity-factor", "moe_expert_rank_capacity_factor", _LEAVE_OUT),
    Rule("--hybrid-context-parallel", "hybrid_context_parallel", _LEAVE_OUT),
)  # fmt: skip
