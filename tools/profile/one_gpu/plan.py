"""Which jobs there are, what each of them runs in turn, and Megatron's flags for it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zero_bubble.builders import BUILDERS, build
from zero_bubble.export.json_io import save_schedule
from zero_bubble.schedule import Schedule

__all__ = [
    "DEFAULT_SCHEDULES",
    "ENGINE",
    "FUSED",
    "ITERATIONS",
    "LOCAL",
    "MEGATRON",
    "MEGATRON_INTERLEAVED",
    "Job",
    "Plan",
    "Size",
    "Turn",
    "auto_limit",
    "jobs_of",
    "known",
    "megatron_flags",
    "needs_numba",
    "plan_of",
    "schedule_of",
    "write_schedules",
]

MEGATRON, MEGATRON_INTERLEAVED = "megatron", "megatron-interleaved"
"""Megatron's own functions; they run on the models of `1f1b` and `interleaved`."""
_OWN = {MEGATRON: "1f1b", MEGATRON_INTERLEAVED: "interleaved"}
DEFAULT_SCHEDULES = (
    MEGATRON,
    MEGATRON_INTERLEAVED,
    "1f1b",
    "zb-h1",
    "auto-1p",
    "auto-2p",
    "zb-v",
    "v-half",
)
FUSED = frozenset({*_OWN, "gpipe", "1f1b", "interleaved"})
"""Those whose backward is one pass."""
LOCAL, ENGINE = "local", "transformer_engine"
"""For --transformer-impl."""
_AUTO = re.compile(r"auto-(\d+(?:\.\d+)?)p")
ITERATIONS = 5
"""Of a turn. The first meets an empty allocator, and the last does not run into another one:
neither counts."""


@dataclass(frozen=True, slots=True)
class Size:
    """The model and the batch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    microbatch_size: int
    microbatches: int
    layer: str = LOCAL
    """Whose layers, as --transformer-impl has it."""

    @property
    def batch(self) -> int:
        """Samples of an iteration."""
        return self.microbatch_size * self.microbatches


@dataclass(frozen=True, slots=True)
class Job:
    """Ranks that are started together, with one model and one optimizer."""

    placement: str
    validates: bool
    """Whether with --optimizer-post-validation."""
    schedules: tuple[str, ...]
    """In the order of a round."""
    delays: bool = False
    """Whether layers are built so that they delay their weight gradients: those of Transformer
    Engine in schedules that split. Megatron's own schedules would lose these gradients."""

    @property
    def name(self) -> str:
        words = [self.placement, "delaying" * self.delays, "validated" * self.validates]
        return "-".join(filter(None, words))

    @property
    def first(self) -> str:
        """A known schedule of the job's placement, to build the model by."""
        names = (_OWN.get(one, one) for one in self.schedules if auto_limit(one) is None)
        return next(names, "zb-h1")  # what is searched for is linear, and splits


@dataclass(frozen=True, slots=True)
class Turn:
    """`ITERATIONS` iterations of one schedule, from the same start as every other turn."""

    label: str
    schedule: str
    """A name for --pipeline-schedule, or one of Megatron's own."""
    limit: float | None = None
    """In units of p M_B: ``schedule`` is a file that the first such turn has searched for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a job's ranks are told."""

    directory: str
    """Where they write."""
    device: str
    turns: tuple[Turn, ...]

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> Plan:
        data = json.loads(path.read_text())
        return cls(data["directory"], data["device"], tuple(Turn(**one) for one in data["turns"]))


def auto_limit(name: str) -> float | None:
    """The 1.5 of ``auto-1.5p``; None for other names."""
    found = _AUTO.fullmatch(name)
    return float(found[1]) if found else None


def known(name: str) -> bool:
    """Whether there is such a schedule here."""
    return name in BUILDERS or name in _OWN or bool(auto_limit(name))


def needs_numba(name: str) -> bool:
    """Whether something is searched for, which is done by compiled code."""
    return auto_limit(name) is not None or (name in BUILDERS and BUILDERS[name].takes_costs)


def _placement(name: str) -> str:
    builder = BUILDERS.get(_OWN.get(name, name), BUILDERS["1f1b"])
    return builder.placement(2).name


def jobs_of(schedules: Sequence[str], validation: Sequence[str], layer: str = LOCAL) -> list[Job]:
    """The jobs that run these schedules, without and with post-validation.

    Post-validation is measured with schedules of ours that split the backward. Megatron's 1F1B,
    which all are compared with, is always there, and with it 1f1b and zb-h1, whose times and memory
    predict the linear ones and limit the searches.

    Args:
        validation: ``off``, ``on``, or both.
        layer: with Transformer Engine's, schedules that split have jobs of their own.
    """
    by_placement: dict[str, list[str]] = {"linear": [MEGATRON, "1f1b", "zb-h1"]}
    for name in schedules:
        by_placement.setdefault(_placement(name), []).append(name)
    if "interleaved" in by_placement:
        by_placement["interleaved"].insert(0, "interleaved")
    jobs = []
    for placement, some in by_placement.items():
        names = tuple(dict.fromkeys(some))
        plain = placement == "linear" or "off" in validation
        split = tuple(one for one in names if one in schedules and one not in FUSED)
        for part, delays in _apart(names) if layer == ENGINE else ((names, False),):
            if part and (plain or any(one in FUSED for one in part)):
                jobs.append(Job(placement, False, part, delays))
        if "on" in validation and split:
            jobs.append(Job(placement, True, split, layer == ENGINE))
    # What the first job searches for, others run.
    return sorted(jobs, key=lambda one: one.validates)


def _apart(names: Sequence[str]) -> tuple[tuple[tuple[str, ...], bool], ...]:
    """Those whose backward is one pass, and those that split."""
    return (
        (tuple(one for one in names if one in FUSED), False),
        (tuple(one for one in names if one not in FUSED), True),
    )


def plan_of(job: Job, rounds: int, device: str, scratch: Path) -> Plan:
    """All turns of a job; schedules take turns within a round, so that noise meets all alike."""
    one_round = [
        Turn(name, _told(name, scratch), None if job.validates else auto_limit(name))
        for name in job.schedules
    ]
    return Plan(str(scratch / job.name), device, tuple(one_round * rounds))


def _told(name: str, scratch: Path) -> str:
    """What stands for the schedule in a turn: itself, or a file for what takes a search."""
    return str(scratch / f"{name}.json") if needs_numba(name) else name


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    """A known schedule; Megatron's own are those of ours with the same passes."""
    return build(_OWN.get(name, name), ranks, microbatches)


def write_schedules(jobs: Sequence[Job], ranks: int, size: Size, scratch: Path) -> None:
    """Build once, for all ranks, what takes a search that needs no measurement."""
    for name in {name for job in jobs for name in job.schedules}:
        if needs_numba(name) and auto_limit(name) is None:
            save_schedule(schedule_of(name, ranks, size.microbatches), scratch / f"{name}.json")


def megatron_flags(job: Job, plan: Plan, ranks: int, size: Size, scratch: Path) -> list[str]:
    """Megatron's command line: a GPT on random data, with a small vocabulary.

    The learning rate stays, so that turns are alike. Gradients are never clipped, though their norm
    is known: its last bits depend on the placement. Checks for NaN are off, on both sides: they
    make the host wait for the device in every microbatch.
    """
    return f"""--pipeline-model-parallel-size {ranks}
        --num-layers {size.layers} --hidden-size {size.hidden} --num-attention-heads {size.heads}
        --seq-length {size.sequence} --max-position-embeddings {size.sequence}
        --micro-batch-size {size.microbatch_size} --global-batch-size {size.batch}
        --train-iters {ITERATIONS * len(plan.turns)}
        --lr 1e-4 --lr-decay-style constant --clip-grad 1e6 --no-check-for-nan-in-loss-and-grad
        --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --num-workers 0
        --split 100,0,0 --eval-interval 1000000 --eval-iters 0 --log-interval 1000000
        --hidden-dropout 0 --attention-dropout 0 --untie-embeddings-and-output-weights
        --transformer-impl {size.layer} --attention-backend unfused
        --no-gradient-accumulation-fusion --no-persist-layer-norm --no-masked-softmax-fusion
        --rerun-mode disabled --pipeline-schedule {_told(job.first, scratch)}
        {"--bf16" if plan.device == "cuda" else ""}
        {"--optimizer-post-validation" if job.validates else ""}""".split()
