"""What the distributed tests vary, and the Megatron flags that say it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

__all__ = [
    "AXES",
    "PLACED",
    "PLACED_AXES",
    "SCHEDULES",
    "VALIDATED_AXES",
    "Case",
    "Config",
    "Spike",
    "ValidatedCase",
    "cases",
    "covering",
    "placed_cases",
    "validated_cases",
]

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2")
"""Names for ``--pipeline-schedule`` that promise the bits of Megatron's own 1F1B."""
PLACED = ("zb-v", "v-half", "v-min", "interleaved", "zb-interleaved")
"""Those with two chunks a stage: the same bits, but on other ranks than 1F1B has them."""

NEVER_CLIPS = 1e6

type Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, slots=True)
class Spike:
    """What happens to the gradient of one parameter, once it is complete, before the step.

    The parameter has its name in the model, so that it is the same under every placement.
    """

    parameter: str
    iteration: int
    """Counted from 0."""
    factor: float
    """What all of the gradient is multiplied by; inf or NaN takes the place of its first value."""


@dataclass(frozen=True, slots=True)
class Config:
    """A small GPT and how it is spread over ranks; the same for the reference and for ours."""

    precision: Precision = "fp32"
    distributed_optimizer: bool = False
    pp: int = 2
    tp: int = 1
    dp: int = 1
    cp: int = 1
    tied: bool = False
    dropout: float = 0.0
    clip_grad: float = 1.0
    """The toy model's norm is above 1.0 in most iterations, so that the default does clip."""
    microbatches: int | None = None
    """Per data-parallel replica; None is two a stage, enough for ZB-H2 to fill its warm-up."""
    batch_sizes: str | None = None
    """Megatron's ``--step-batch-size-schedule``, in place of ``microbatches``."""
    iterations: int = 12
    layers: int = 4
    hidden: int = 32
    sequence: int = 32
    text: str | None = None
    """Megatron's ``--data-path``, of bytes as tools/prepare_text.py writes them, in place of mock
    data."""
    spikes: tuple[Spike, ...] = ()
    happening: str = ""
    """See `happenings`; a reference has none."""
    frozen: str = ""
    """A pattern; parameters that have it in their name in the model do not train."""
    model: tuple[str, ...] = ()
    """More Megatron flags, for both sides, of those that say which model it is."""
    extra: tuple[str, ...] = ()
    """More Megatron flags, for both sides."""

    @property
    def world_size(self) -> int:
        return self.pp * self.tp * self.dp * self.cp

    @property
    def num_microbatches(self) -> int:
        return self.microbatches or 2 * self.pp

    @property
    def clips(self) -> bool:
        """Whether gradients may be scaled by their norm; 0 is Megatron's way to say never."""
        return 0 < self.clip_grad < NEVER_CLIPS

    def start(self) -> Config:
        """A run on one rank whose first iteration gives this configuration's model its weights.

        A checkpoint has no precision and no ranks, so that few of them serve all.
        """
        return Config(
            pp=1,
            tied=self.tied,
            layers=self.layers,
            hidden=self.hidden,
            sequence=self.sequence,
            clip_grad=0.0,
            microbatches=1,
            model=self.model,
        )

    def flags(self) -> list[str]:
        """Megatron's command line, without ``--pipeline-schedule``."""
        flags: dict[str, Any] = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": 4,
            "seq-length": self.sequence,
            "max-position-embeddings": self.sequence,
            "micro-batch-size": 1,
            "train-iters": self.iterations,
            "lr": 1e-3,
            "lr-decay-style": "cosine",
            "lr-warmup-iters": 2,
            "clip-grad": self.clip_grad,
            "attention-dropout": self.dropout,
            "hidden-dropout": self.dropout,
            "pipeline-model-parallel-size": self.pp,
            "tensor-model-parallel-size": self.tp,
            "context-parallel-size": self.cp,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": 127 if self.text is None else 257,
            "split": "90,5,5",
            "seed": 1234,
            "num-workers": 0,
            "log-interval": 1,
            # Evaluation once, in the middle; eval-interval must be set even without it.
            "eval-interval": max(1, self.iterations // 2),
            "eval-iters": 1,
            # What training on CPUs needs.
            "distributed-backend": "gloo",
            "transformer-impl": "local",
            "attention-backend": "unfused",
        }
        if self.batch_sizes is None:
            flags["global-batch-size"] = self.num_microbatches * self.dp
        else:
            flags["step-batch-size-schedule"] = self.batch_sizes
        if self.text is not None:
            flags["data-path"] = self.text
        switches = [
            *(["mock-data"] if self.text is None else []),
            "use-cpu-initialization",
            "no-gradient-accumulation-fusion",
            "no-persist-layer-norm",
            "no-masked-softmax-fusion",
        ]
        if self.precision != "fp32":
            switches.append(self.precision)
        if self.distributed_optimizer:
            switches.append("use-distributed-optimizer")
        if not self.tied:
            switches.append("untie-embeddings-and-output-weights")
        words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
        return [*words, *(f"--{switch}" for switch in switches), *self.model, *self.extra]

    def __str__(self) -> str:
        parts = [
            self.precision,
            "distopt" if self.distributed_optimizer else "plain",
            f"pp{self.pp}",
            f"tp{self.tp}" if self.tp > 1 else "",
            f"dp{self.dp}" if self.dp > 1 else "",
            f"cp{self.cp}" if self.cp > 1 else "",
            "tied" if self.tied else "untied",
            f"dropout{self.dropout}" if self.dropout else "",
            "clip" if self.clips else "noclip",
            "spikes" if self.spikes else "",
            "frozen" if self.frozen else "",
            "text" if self.text else "",
        ]
        return "-".join(filter(None, parts))


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a configuration under one of our schedules."""

    schedule: str
    config: Config

    def __str__(self) -> str:
        return f"{self.schedule}-{self.config}"


@dataclass(frozen=True, slots=True)
class ValidatedCase:
    """A run with optimizer post-validation, to be compared with one that steps synchronously."""

    schedule: str
    rollback: str
    config: Config

    @classmethod
    def of(
        cls,
        schedule: str,
        rollback: str,
        ranks: str,
        precision: Precision,
        dropout: float = 0.0,
        **fields: Any,
    ) -> ValidatedCase:
        shape = _RANKS[ranks]
        # Two chunks a rank of a V need a layer each.
        layers = 2 * shape["pp"] if schedule == "zb-v" else 4
        given = {
            "iterations": 30,
            "clip_grad": _CLIPS_A_THIRD[ranks, layers, dropout > 0],
            "layers": layers,
            "extra": LOSS_SCALE if precision == "fp16" else (),
            **shape,
            **fields,
        }
        return cls(schedule, rollback, Config(precision=precision, dropout=dropout, **given))

    def __str__(self) -> str:
        return f"{self.schedule}-{self.rollback}-{self.config}"


# Dropout and precision are one axis: dropout is tried in fp32 only.
AXES: Mapping[str, Sequence[Any]] = {
    "schedule": SCHEDULES,
    "numerics": ("fp32", "fp32-dropout", "bf16"),
    "distributed_optimizer": (False, True),
    "pp": (2, 4),
    "tied": (False, True),
    "clip_grad": (1.0, NEVER_CLIPS),
}

PLACED_AXES: Mapping[str, Sequence[Any]] = {
    "schedule": PLACED,
    "precision": ("fp32", "bf16"),
    "distributed_optimizer": (False, True),
    "pp": (2, 4),
    "tied": (False, True),
}

# Beyond the pipeline: too few ranks on a small machine to cross with everything.
_GRIDS = (Config(tp=2), Config(dp=2), Config(dp=2, precision="bf16", distributed_optimizer=True))


VALIDATED_AXES: Mapping[str, Sequence[Any]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "schedule": ("zb-h1", "zb-h2", "zb-v"),
    "ranks": ("pp2", "pp4", "pp2-dp2"),
    "distributed_optimizer": (False, True),
    "rollback": ("deferred", "snapshot"),
    "dropout": (0.0, 0.1),
}
_RANKS = {"pp2": {"pp": 2}, "pp4": {"pp": 4}, "pp2-dp2": {"pp": 2, "dp": 2}}
# By ranks, layers and dropout: about a third of the toy model's 30 iterations have a norm above it.
_CLIPS_A_THIRD = {
    ("pp2", 4, False): 1.4, ("pp2", 4, True): 1.4,
    ("pp2-dp2", 4, False): 1.14, ("pp2-dp2", 4, True): 1.08,
    ("pp4", 4, False): 1.08, ("pp4", 4, True): 1.08,
    ("pp4", 8, False): 1.45, ("pp4", 8, True): 1.45,
}  # fmt: skip
# The scale overflows a few times in 30 iterations.
LOSS_SCALE = ("--initial-loss-scale", str(2**18), "--loss-scale-window", "6", "--hysteresis", "1")


def _case(schedule: str, numerics: str, **fields: Any) -> Case:
    dropout = 0.1 if numerics == "fp32-dropout" else 0.0
    precision: Precision = "bf16" if numerics == "bf16" else "fp32"
    return Case(schedule, Config(precision=precision, dropout=dropout, **fields))


def covering(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows in which each pair of values of two axes occurs; the same rows every time.

    Greedy: of all rows, take the one that covers most pairs not covered yet.
    """
    names = list(axes)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]

    def pairs(row: Mapping[str, Any]) -> Iterable[tuple[tuple[str, Any], tuple[str, Any]]]:
        return itertools.combinations(row.items(), 2)

    missing = {pair for row in rows for pair in pairs(row)}
    chosen = []
    while missing:
        best = max(rows, key=lambda row: sum(pair in missing for pair in pairs(row)))
        chosen.append(best)
        missing.difference_update(pairs(best))
    return chosen


def cases() -> list[tuple[Case, bool]]:
    """Every comparison, and whether it belongs to the default tier (the others are slow).

    Default: `covering` of AXES, and each grid of ranks under one schedule. Slow: the rest of the
    product. There clipping alternates instead of doubling the number of runs.
    """
    default = [_case(**row) for row in covering(AXES)]
    default += [Case("zb-h2", grid) for grid in _GRIDS]
    rest = [_case(**dict(zip(AXES, values, strict=True))) for values in _alternating()]
    rest += [Case(schedule, grid) for schedule in SCHEDULES for grid in _GRIDS]

    def but_for_clipping(case: Case) -> Case:
        return replace(case, config=replace(case.config, clip_grad=0.0))

    done = {but_for_clipping(case) for case in default}
    slow = [case for case in rest if but_for_clipping(case) not in done]
    # Neighbours share a reference, so that a failure shows early on all of them.
    both = [(case, True) for case in default] + [(case, False) for case in slow]
    return sorted(both, key=lambda one: (not one[1], str(one[0].config), one[0].schedule))


def _alternating() -> Iterable[tuple[Any, ...]]:
    *others, clips = AXES.values()
    schedules, *settings = others
    for index, setting in enumerate(itertools.product(*settings)):
        for schedule in schedules:
            yield schedule, *setting, clips[index % len(clips)]


def placed_cases() -> list[tuple[Case, bool]]:
    """Comparisons for PLACED, default tier first; the product of PLACED_AXES without clipping.

    Default (True) are the rows of their `covering`. Two chunks a rank need a layer each.
    """

    def case(schedule: str, pp: int, **fields: Any) -> Case:
        return Case(schedule, Config(pp=pp, layers=2 * pp, clip_grad=0.0, **fields))

    default = [case(**row) for row in covering(PLACED_AXES)]
    names = list(PLACED_AXES)
    rows = (dict(zip(names, one, strict=True)) for one in itertools.product(*PLACED_AXES.values()))
    rest = [one for one in (case(**row) for row in rows) if one not in default]
    return [(one, True) for one in default] + [(one, False) for one in rest]


def validated_cases() -> list[tuple[ValidatedCase, bool]]:
    """Comparisons for post-validation, default tier first; the product of VALIDATED_AXES.

    Default (True) are the rows of their `covering`.
    """
    default = [ValidatedCase.of(**row) for row in covering(VALIDATED_AXES)]
    names = list(VALIDATED_AXES)
    products = itertools.product(*VALIDATED_AXES.values())
    every = [ValidatedCase.of(**dict(zip(names, one, strict=True))) for one in products]
    rest = [one for one in every if one not in default]
    # Neighbours share a synchronous run.
    rest.sort(key=lambda one: (str(one.config), one.schedule, one.rollback))
    return [(one, True) for one in default] + [(one, False) for one in rest]
