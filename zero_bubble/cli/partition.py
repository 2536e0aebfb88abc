"""``zero-bubble partition``: how many layers each stage gets, together with the schedule."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from zero_bubble.cli.amount import amount, parse_amount
from zero_bubble.cli.common import (
    Commands,
    ProgressBar,
    UsageError,
    add_command,
    add_placement,
    add_size,
    memory_limits,
    placement_of,
)
from zero_bubble.cli.compiling import announce_compiling
from zero_bubble.cli.output import require_json
from zero_bubble.cli.searching import EFFORTS
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import save_schedule
from zero_bubble.placement import Placement
from zero_bubble.search.partition_model import Layer, LayerKind, Model

if TYPE_CHECKING:
    from zero_bubble.search.partition import PartitionProgress

__all__ = ["add", "run"]

_LIMIT = "1p"
_ROOM = "raise --memory-limit, or use more stages"
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
    "m_b": ("MEMORY", "memory from F to B"),
    "m_w": ("MEMORY", "its part that stays to W"),
    "weight_memory": ("MEMORY", "weights, gradients, states of the optimizer"),
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
        "Memory is a bare number in any one unit, or an amount such as 3GiB.",
        examples="""
        zero-bubble partition --layers 16 --loss-t-f 1.5 --stages 4 --microbatches 12
        zero-bubble partition --layers 6 --loss-t-f 2 --stages 2 --microbatches 6 --placement v
        zero-bubble partition --model model.json --stages 4 --microbatches 12 --memory-limit 2p
        """,
    )
    add_size(parser)
    add_placement(parser)
    parser.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help="most memory a stage may hold, its weights included. 1p (the default) is what 1F1B "
        "needs at most under the even partition (one of least bottleneck, if layers do not "
        "divide): stages times M_B of its largest stage, and its most weights; 2p is twice M_B. "
        "12GiB or 80GB are bytes, a bare number is in the model's unit, inf is no limit; one for "
        "all stages, or one each, separated by commas",
    )
    parser.add_argument(
        "--effort",
        choices=EFFORTS,
        default="normal",
        help="how many partitions get a schedule: up to 10, 40 or 200 (normal). With 64 layers on "
        "16 stages quick takes 10 seconds or so, normal about a minute, thorough several",
    )
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
            kind = parse_amount if metavar == "MEMORY" else float
            group.add_argument(flag, type=kind, metavar=metavar, help=f"{what} ({default})")


def run(arguments: argparse.Namespace) -> int:
    placement = placement_of(arguments)
    if arguments.microbatches < 1:
        raise UsageError(f"--microbatches {arguments.microbatches}: at least 1 is needed")
    if arguments.output is not None:
        # A search may take minutes: not after it.
        require_json("--output", arguments.output)
    model = _model(arguments)
    limits = _limits(model, placement, arguments.memory_limit)
    # Imported here: other commands should not wait until a compiler is loaded.
    from zero_bubble.cli.partition_report import report
    from zero_bubble.search.partition import NoPartitionFits, idle_share, partition

    announce_compiling()
    sizes = (placement.num_stages, arguments.microbatches)
    with ProgressBar() as bar:

        def show(now: PartitionProgress) -> None:
            gap = max(0.0, (now.cost - now.bound) / now.cost) if now.cost else 0.0
            least = idle_share(model, *sizes, now.bound)
            bar.update(idle_share(model, *sizes, now.cost), least, gap)

        try:
            found = partition(
                model,
                placement,
                arguments.microbatches,
                limits,
                effort=arguments.effort,
                progress=show,
            )
        except NoPartitionFits as error:
            raise ValueError(f"{error.described(amount)}; {_ROOM}") from error
    if arguments.output is not None:
        save_schedule(
            found.solution.schedule,
            arguments.output,
            found.costs,
            memory_limit=found.problem.memory_limit,
        )
    print(report(found, _origin(model, placement, arguments.memory_limit), arguments.output))
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
    """The limit of each stage, weights included; see the help for what ``Xp`` means."""
    flag = text or _LIMIT
    largest = max(layer.m_b + layer.weight_memory for layer in model.layers)
    if "b" in flag.lower() and largest < _LEAST_BYTES:
        raise UsageError(
            f"--memory-limit {flag} is in bytes, but the model is not: its largest layer takes "
            f"{largest:.6g}; give its memory in bytes (--layer-m-b, --model), or a limit such as 1p"
        )
    from zero_bubble.search.partition_balance import reference_sizes

    sizes = reference_sizes(model, placement)
    m_b = max(map(sum, model.costs(placement, sizes).m_b))
    weights = max(model.weight_memory(placement, sizes))
    # What `memory_limits` asks of the costs: M_B of each stage, here the largest one of all.
    tables = {
        name: tuple((value / len(held),) * len(held) for held in placement.positions)
        for name, value in (("t", 0.0), ("m", m_b))
    }
    times, memory = tables["t"], tables["m"]
    costs = Costs(t_f=times, t_b=times, t_w=times, m_b=memory, m_w=memory)
    limits = memory_limits(flag, placement, costs)
    parts = flag.split(",") * (1 if "," in flag else placement.num_stages)
    return tuple(
        limit + (weights if part.strip().lower().endswith("p") else 0.0)
        for limit, part in zip(limits, parts, strict=True)
    )


def _origin(model: Model, placement: Placement, text: str | None) -> str:
    """Where the limit comes from, for people to read."""
    if text is not None:
        return f"--memory-limit {text}"
    even = model.even_sizes(placement.num_positions) is not None
    reference = "the even partition" if even else "a partition of least bottleneck"
    return f"{_LIMIT}, the default: what 1F1B needs at most under {reference}"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
