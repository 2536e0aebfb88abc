"""``zero-bubble partition``: how many layers each stage gets, together with the schedule."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from zero_bubble.cli.common import (
    Commands,
    ProgressBar,
    UsageError,
    add_command,
    add_memory_limit,
    add_placement,
    add_size,
    memory_limits,
    placement_of,
)
from zero_bubble.cli.searching import add_effort
from zero_bubble.cli.table import table
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.placement import Placement, interleaved
from zero_bubble.search.partition_model import Layer, LayerKind, Model
from zero_bubble.simulate import simulate

if TYPE_CHECKING:
    from zero_bubble.search.partition import Partition, PartitionProgress

__all__ = ["add", "run"]

_LIMIT = "1p"
_LEAST_BYTES = 1024
"""No layer takes less, if its memory is in bytes."""
_FLAGS: dict[str, tuple[LayerKind, str]] = {
    "layer": ("transformer", "one transformer layer"),
    "embedding": ("embedding", "the embedding"),
    "loss": ("loss", "last norm, LM head and loss; a head takes about vocabulary / (12 hidden)"),
}
_HELP = {
    "t_f": ("MS", "time of F"),
    "t_b": ("MS", "time of B"),
    "t_w": ("MS", "time of W"),
    "m_b": ("X", "memory from F to B"),
    "m_w": ("X", "its part that stays to W"),
    "weight_memory": ("X", "weights, gradients, states of the optimizer"),
}
_DEFAULTS = {
    "layer": {"t_f": "1", "t_b": "as F", "t_w": "as B", "m_b": "1"},
    "embedding": {"t_f": "0", "t_b": "0", "t_w": "as F", "m_b": "0"},
    "loss": {"t_f": "0", "t_b": "as F", "t_w": "as B", "m_b": "0"},
}
_ALWAYS = {"m_w": "as M_B", "weight_memory": "0"}


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "partition",
        run,
        summary="how many layers each stage gets, together with the schedule",
        description="The partition of the layers and the schedule of least time, chosen together,\n"
        "and Megatron's flag for it. Stages with embedding or LM head get fewer layers.\n"
        "A memory limit left out is 1p: p stages times the M_B of an average stage.",
        examples="""
        zero-bubble partition --layers 16 --loss-t-f 1.5 --stages 4 --microbatches 12
        zero-bubble partition --layers 6 --loss-t-f 2 --stages 2 --microbatches 6 --placement v
        zero-bubble partition --model model.json --stages 4 --microbatches 12 --memory-limit 20
        """,
    )
    add_size(parser)
    add_placement(parser)
    add_memory_limit(parser)
    add_effort(parser, "normal")
    parser.add_argument("--output", metavar="FILE.json", help="save the schedule and its costs")
    parser.add_argument(
        "--model",
        metavar="FILE.json",
        help='layers of any kind, instead of the flags below: {"embedding": {"t_f": 0.1, ...}, '
        '"layers": [{"count": 8, "t_f": 1, "t_b": 1, "t_w": 1, "m_b": 1}, ...], '
        '"loss": {...}, "t_comm": 0.1}',
    )
    group = parser.add_argument_group("a model with equal layers")
    group.add_argument("--layers", type=int, metavar="N", help="transformer layers")
    group.add_argument("--t-comm", type=float, metavar="MS", help="time of a message (0)")
    for part, (_, name) in _FLAGS.items():
        group = parser.add_argument_group(name)
        for field, (metavar, what) in _HELP.items():
            default = (_DEFAULTS[part] | _ALWAYS)[field]
            flag = _flag(f"{part}_{field}")
            group.add_argument(flag, type=float, metavar=metavar, help=f"{what} ({default})")


def run(arguments: argparse.Namespace) -> int:
    placement = placement_of(arguments)
    if arguments.microbatches < 1:
        raise UsageError(f"--microbatches {arguments.microbatches}: at least 1 is needed")
    model = _model(arguments)
    limits = _limits(model, placement, arguments.memory_limit)
    # Imported here: other commands should not wait until a compiler is loaded.
    from zero_bubble.search.partition import partition

    with ProgressBar() as bar:

        def show(now: PartitionProgress) -> None:
            gap = max(0.0, (now.cost - now.bound) / now.cost) if now.cost else 0.0
            bar.update(now.bubble_rate, gap=gap)

        found = partition(
            model,
            placement,
            arguments.microbatches,
            limits,
            effort=arguments.effort or "normal",
            progress=show,
        )
    if arguments.output is not None:
        save_schedule(
            found.solution.schedule,
            arguments.output,
            found.costs,
            memory_limit=found.problem.memory_limit,
        )
    print(_report(found))
    return 0


def _model(arguments: argparse.Namespace) -> Model:
    """The model of ``--model`` or of the flags; ValueError names file and field, or the flag."""
    path: str | None = arguments.model
    if path is None:
        return _model_of_flags(arguments)
    single = ["layers", "t_comm", *(f"{part}_{field}" for part in _FLAGS for field in _HELP)]
    if given := [name for name in single if getattr(arguments, name) is not None]:
        raise UsageError(f"{_flag(given[0])} and --model exclude each other: give one of them")
    try:
        return Model.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"--model {path}: not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"--model {path}: {error}") from error


def _model_of_flags(arguments: argparse.Namespace) -> Model:
    count: int | None = arguments.layers
    if count is None:
        raise UsageError("--layers N or --model FILE.json is needed")
    if count < 1:
        raise UsageError(f"--layers {count}: at least 1 transformer layer is needed")

    def layer(part: str) -> Layer:
        values: dict[str, float] = {}
        before = 0.0
        for field in _HELP:
            given: float | None = getattr(arguments, f"{part}_{field}")
            default = (_DEFAULTS[part] | _ALWAYS)[field]
            # "as F" and the like: what is named stands right before in the table.
            before = given if given is not None else _constant(default, before)
            values[field] = before
        try:
            return Layer(_FLAGS[part][0], **values)
        except ValueError as error:
            raise UsageError(f"--{part}-...: {error}") from error

    middle = (layer("layer"),) * count
    comm: float = 0.0 if arguments.t_comm is None else arguments.t_comm
    return Model((layer("embedding"), *middle, layer("loss")), comm)


def _constant(default: str, before: float) -> float:
    return before if default.startswith("as") else float(default)


def _limits(model: Model, placement: Placement, text: str | None) -> tuple[float, ...]:
    """The limit of each stage; ``Xp`` is X times what a microbatch takes on the whole model."""
    flag = text or _LIMIT
    if any(layer.weight_memory > 0 for layer in model.layers) and "p" in flag.lower():
        raise UsageError(
            f"--memory-limit {flag} says nothing about the weights, and the model has weight "
            "memory: give a limit for both in the model's unit, such as 80GiB"
        )
    largest = max(layer.m_b + layer.weight_memory for layer in model.layers)
    if "b" in flag.lower() and largest < _LEAST_BYTES:
        raise UsageError(
            f"--memory-limit {flag} is in bytes, but the model is not: its largest layer takes "
            f"{largest:.6g}; give its memory in bytes (--layer-m-b, --model), or a limit such as 1p"
        )
    # What `memory_limits` asks of the costs: M_B of a stage, here of an average one.
    average = sum(layer.m_b for layer in model.layers) / placement.num_stages
    tables = {
        name: tuple((value / len(held),) * len(held) for held in placement.positions)
        for name, value in (("t", 0.0), ("m", average))
    }
    times, memory = tables["t"], tables["m"]
    costs = Costs(t_f=times, t_b=times, t_w=times, m_b=memory, m_w=memory)
    return memory_limits(flag, placement, costs)


def _report(found: Partition) -> str:
    placement, costs = found.problem.placement, found.costs
    rows = []
    for position, part in enumerate(found.model.parts(found.sizes)):
        stage, chunk = placement.owner(position)
        times = (costs.t_f[stage][chunk], costs.t_b[stage][chunk], costs.t_w[stage][chunk])
        on_stage = sum(sum(table[stage]) for table in (costs.t_f, costs.t_b, costs.t_w))
        rows.append(
            (
                f"{position}",
                f"{stage}",
                _named(part),
                *(f"{time:.4g}" for time in times),
                f"{sum(times):.4g}",
                f"{on_stage:.4g}",
            )
        )
    header = ("position", "stage", "layers", "T_F", "T_B", "T_W", "work", "work of its stage")
    return "\n".join([table(header, rows), "", *_comparison(found), "", *_flag_lines(found)])


def _comparison(found: Partition) -> list[str]:
    """Times of an iteration: of this partition, of Megatron's own, and the least of any."""
    cost, even, placement = found.solution.cost, found.even, found.problem.placement
    even_sizes = found.model.even_sizes(placement.num_positions)
    rows = [("this partition", f"{cost:.6g}", f"{found.problem.bubble_rate(cost):.2%}")]
    if even is not None and even_sizes is not None:
        # Its busiest stage is another one, so that its ideal is, too.
        rate = simulate(even.schedule, found.model.costs(placement, even_sizes)).bubble_rate
        rows.append(("even partition", f"{even.cost:.6g}", f"{rate:.2%}"))
    rows.append(("bound for any partition", f"{found.bound:.6g}", ""))
    lines = [table(("", "ms an iteration", "bubble rate"), rows), ""]
    if even is None:
        why = (
            f"{found.model.num_layers} transformer layers do not divide into "
            f"{placement.num_positions} chunks"
            if even_sizes is None
            else "it does not fit the memory limits"
        )
        return [*lines, f"There is no even partition: {why}. {_gap(found)}"]
    if found.sizes == even_sizes:
        return [*lines, f"This is the even partition. {_gap(found)}"]
    saved = (even.cost - cost) / even.cost
    return [*lines, f"{saved:.1%} less time than with the even partition. {_gap(found)}"]


def _named(part: Sequence[Layer]) -> str:
    """``embedding + 4``: transformer layers are counted."""
    names = []
    for kind, run in groupby(layer.kind for layer in part):
        names.append(str(sum(1 for _ in run)) if kind == "transformer" else kind)
    return " + ".join(names)


def _gap(found: Partition) -> str:
    if found.solution.cost <= found.bound * (1 + 1e-6):
        return "No partition and schedule costs less."
    return f"At most {found.gap:.1%} less is possible."


def _flag_lines(found: Partition) -> list[str]:
    placement = found.problem.placement
    lines = [
        f"--pipeline-model-parallel-size {placement.num_stages} \\",
        f"--pipeline-model-parallel-layout '{found.layout}'",
    ]
    if placement != interleaved(placement.num_stages, placement.num_chunks(0)):
        lines.append(
            "note: the parts are in model order. Megatron gives part k to rank k mod p, which is "
            "not this placement: the flag alone does not make it."
        )
    return lines


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
