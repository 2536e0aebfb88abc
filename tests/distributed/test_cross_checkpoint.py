"""One run goes on under other schedules, placements and numbers of stages, as if never stopped.

Each chain starts as the uninterrupted run itself, whose first checkpoint the next part loads. What
no checkpoint can do is refused, with a way out that works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.configs import Config
from tests.distributed.gathering import assemble
from tests.distributed.harness import Result, TrainingFailed, Zygote

MEGATRON = "megatron"
"""Megatron's own 1F1B, in a process without the adaptor: no class of ours may be in the file."""
CROSSES = "--dist-ckpt-optim-fully-reshardable"
LEG = 2
"""Iterations under one schedule."""

type Train = Callable[..., Result]
"""``train(config, schedule, directory, *flags)``."""


@pytest.fixture(scope="module")
def train(zygote: Zygote, reference_zygote: Zygote) -> Train:
    def run(config: Config, schedule: str, directory: Path, *flags: str) -> Result:
        if schedule == MEGATRON:
            return reference_zygote.train(config, directory, flags)
        return zygote.train(config, directory, ("--pipeline-schedule", schedule, *flags))

    return run


@dataclass(frozen=True, slots=True)
class Chain:
    """A run in parts, each with its schedule and number of stages."""

    config: Config
    legs: tuple[tuple[str, int], ...]


# Eight layers for two chunks on each of four stages; eight microbatches for any schedule's warm-up.
FP32 = Config(layers=8, microbatches=8, clip_grad=0.0)
BF16 = replace(FP32, precision="bf16")
SHARDED = replace(BF16, distributed_optimizer=True, extra=(CROSSES,))

DEFAULT = {
    # Both copies of the embedding on the last ranks, which share the writing.
    "fp32-tied-dp2": Chain(
        replace(FP32, layers=4, microbatches=4, tied=True, dp=2),
        (("zb-v", 2), ("v-half", 2), ("zb-h1", 2)),
    ),
    "fp32": Chain(FP32, (("zb-h1", 2), ("zb-v", 4), ("interleaved", 2), ("zb-h2", 2))),
    "bf16-distopt": Chain(
        SHARDED, ((MEGATRON, 2), ("zb-v", 2), ("zb-interleaved", 4), (MEGATRON, 2))
    ),
}
EVERYTHING = (
    ("zb-h1", 2),
    ("zb-v", 2),
    ("interleaved", 4),
    ("zb-h2", 4),
    ("zb-interleaved", 2),
    ("v-half", 4),
    ("1f1b", 2),
)
SLOW = {
    "fp32-everything": Chain(FP32, EVERYTHING),
    "fp32-tied": Chain(replace(FP32, tied=True), (("zb-v", 2), (MEGATRON, 4), ("v-half", 2))),
    "bf16-everything": Chain(BF16, EVERYTHING),
    "bf16-distopt-everything": Chain(SHARDED, EVERYTHING),
    "bf16-distopt-tied": Chain(
        replace(SHARDED, tied=True), (("zb-h1", 2), ("zb-v", 2), ("interleaved", 4), (MEGATRON, 2))
    ),
    "bf16-distopt-tied-dp2": Chain(
        replace(SHARDED, tied=True, dp=2), (("zb-h1", 2), ("zb-v", 2), ("interleaved", 2))
    ),
    # The scale starts so low that no step of these few is skipped.
    "fp16": Chain(
        replace(FP32, precision="fp16", extra=("--initial-loss-scale", "1024")),
        (("zb-h1", 2), ("zb-v", 4), ("zb-h2", 2)),
    ),
    # Ten layers do not come out even over the chunks of any of these.
    "bf16-distopt-uneven": Chain(
        replace(SHARDED, layers=10), (("zb-h1", 2), ("zb-v", 4), ("interleaved", 2))
    ),
}


@pytest.mark.parametrize(
    "chain",
    [
        *(pytest.param(chain, id=name) for name, chain in DEFAULT.items()),
        *(pytest.param(chain, id=name, marks=pytest.mark.slow) for name, chain in SLOW.items()),
    ],
)
def test_a_run_goes_on_elsewhere_bit_for_bit(chain: Chain, train: Train, tmp_path: Path) -> None:
    total = LEG * len(chain.legs)
    config = replace(chain.config, iterations=total)
    (schedule, pp), *others = chain.legs
    checkpoint = tmp_path / "0" / "checkpoint"
    save = ("--save", str(checkpoint), "--save-interval", str(LEG))
    whole = train(replace(config, pp=pp), schedule, tmp_path / "whole", *save)
    parts = []
    for index, (schedule, pp) in enumerate(others, start=1):
        load = ("--load", str(checkpoint), "--ckpt-step", str(LEG * index))
        end = str(LEG * (index + 1))
        checkpoint = tmp_path / str(index) / "checkpoint"
        stop = ("--save", str(checkpoint), "--save-interval", end, "--exit-interval", end)
        flags = load if index == len(others) else load + stop
        directory = tmp_path / f"{index}-{schedule}"
        parts.append(train(replace(config, pp=pp), schedule, directory, *flags))
        assert len(parts[-1].iterations("lr")) == LEG
    assert_goes_on(whole, parts)


def assert_goes_on(whole: Result, parts: Sequence[Result]) -> None:
    """The parts, one after the other, are the end of the whole run; AssertionError if not."""
    import torch

    for part in ("iterations", "evaluations"):
        rows = [row for one in parts for row in one.ranks[-1][part]]
        assert rows
        expected = whole.ranks[-1][part][-len(rows) :]
        for index, (left, right) in enumerate(zip(expected, rows, strict=True)):
            assert left.keys() == right.keys()
            for name in left:
                if left[name] is None:  # the norm of a step that is skipped
                    assert right[name] is None, (part, index, name)
                    continue
                a, b = (torch.as_tensor(one[name]) for one in (left, right))
                if name == "grad_norm":  # summed in another order where layers are elsewhere
                    assert torch.allclose(a, b, rtol=1e-6), (part, index, name)
                else:
                    assert torch.equal(a, b), (part, index, name)
    expected_state, state = (whole_state(one) for one in (whole, parts[-1]))
    assert expected_state.keys() == state.keys()
    different = [name for name in state if not torch.equal(expected_state[name], state[name])]
    assert not different


def whole_state(result: Result) -> dict[str, Any]:
    return assemble(rank["pieces"] for rank in result.ranks)


# The distributed optimizer's default format, whose keys are the buffers of a rank.

TIED_TO_RANKS = Config(
    precision="bf16", distributed_optimizer=True, clip_grad=0.0, microbatches=4, iterations=4
)
STEP = ("--ckpt-step", str(LEG))


@dataclass(frozen=True)
class Saved:
    """An uninterrupted run and its checkpoints."""

    run: Result
    checkpoint: Path

    @property
    def load(self) -> tuple[str, ...]:
        """Flags to go on after its first two iterations."""
        return "--load", str(self.checkpoint), *STEP


def save(train: Train, config: Config, schedule: str, directory: Path, *flags: str) -> Saved:
    checkpoint = directory / "checkpoint"
    where = ("--save", str(checkpoint), "--save-interval", str(LEG))
    return Saved(train(config, schedule, directory / "run", *where, *flags), checkpoint)


@pytest.fixture(scope="module")
def v(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(train, TIED_TO_RANKS, "zb-v", tmp_path_factory.mktemp("v"))


@pytest.fixture(scope="module")
def linear(train: Train, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Saved by Megatron, whose arguments do not tell the placement."""
    return save(train, TIED_TO_RANKS, MEGATRON, tmp_path_factory.mktemp("linear"))


def refusal(zygote: Zygote, config: Config, schedule: str, directory: Path, *flags: str) -> str:
    """What a run that must be refused says, in one line on its first rank only."""
    with pytest.raises(TrainingFailed, match="exit code 2"):
        zygote.train(config, directory, ("--pipeline-schedule", schedule, *flags))
    mark = "zero-bubble: error: "
    logs = [directory / f"rank{rank}.log" for rank in range(config.world_size)]
    first, *others = ([line for line in log.read_text().splitlines() if mark in line]
                      for log in logs)  # fmt: skip
    assert [len(first), *map(len, others)] == [1] + [0] * len(others)
    return first[0].removeprefix(mark)


def assert_says(message: str, saved: Saved, was: str, now: str) -> None:
    assert message.startswith(
        f"--load {saved.checkpoint} was saved with {was}, this run has {now}, and its optimizer "
        "state is in the format dp_reshardable"
    )
    for remedy in (CROSSES, "--ckpt-convert-format torch_dist", "--no-load-optim", "--finetune"):
        assert remedy in message


def test_a_v_checkpoint_tied_to_its_ranks_is_refused_under_linear_placement(
    zygote: Zygote, v: Saved, tmp_path: Path
) -> None:
    message = refusal(zygote, TIED_TO_RANKS, "zb-h1", tmp_path / "run", *v.load)
    assert_says(message, v, "PP 2, placement v", "PP 2, placement linear")
    assert "(--pipeline-schedule zb-v)" in message


def test_a_checkpoint_of_megatrons_own_is_refused_under_a_v(
    zygote: Zygote, linear: Saved, tmp_path: Path
) -> None:
    message = refusal(zygote, TIED_TO_RANKS, "zb-v", tmp_path / "run", *linear.load)
    assert_says(message, linear, "PP 2, placement linear", "PP 2, placement v")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "pp", "layers", "virtual", "now"),
    [
        ("zb-v", 4, 8, None, "PP 4, placement v"),
        ("interleaved", 2, 4, None, "PP 2, placement interleaved (2 chunks a stage)"),
        # Megatron's own schedules, which alone would not know.
        (MEGATRON, 2, 4, None, "PP 2, placement linear"),
        (MEGATRON, 2, 4, "2", "PP 2, placement interleaved (2 chunks a stage)"),
    ],
)
def test_a_v_checkpoint_tied_to_its_ranks_is_refused_elsewhere(
    zygote: Zygote,
    v: Saved,
    tmp_path: Path,
    schedule: str,
    pp: int,
    layers: int,
    virtual: str | None,
    now: str,
) -> None:
    config = replace(TIED_TO_RANKS, pp=pp, layers=layers)
    chunks = () if virtual is None else ("--num-virtual-stages-per-pipeline-rank", virtual)
    message = refusal(zygote, config, schedule, tmp_path / "run", *v.load, *chunks)
    assert_says(message, v, "PP 2, placement v", now)


@pytest.mark.slow
def test_a_linear_checkpoint_tied_to_its_ranks_is_refused_on_more_stages(
    zygote: Zygote, linear: Saved, tmp_path: Path
) -> None:
    config = replace(TIED_TO_RANKS, pp=4)
    message = refusal(zygote, config, "zb-h1", tmp_path / "run", *linear.load)
    assert_says(message, linear, "PP 2, placement linear", "PP 4, placement linear")


@pytest.mark.slow
def test_other_layers_on_the_ranks_are_another_layout(
    zygote: Zygote, linear: Saved, v: Saved, tmp_path: Path
) -> None:
    uneven = ("--pipeline-model-parallel-layout", "Ettt|tL")
    message = refusal(zygote, TIED_TO_RANKS, "zb-h1", tmp_path / "1", *linear.load, *uneven)
    assert_says(
        message,
        linear,
        "PP 2, placement linear, layers 2 | 2 on the ranks",
        "PP 2, placement linear, layers 3 | 1 on the ranks",
    )
    uneven = ("--pipeline-model-parallel-layout", "E|tt|tt|L")
    message = refusal(zygote, TIED_TO_RANKS, "v-half", tmp_path / "2", *v.load, *uneven)
    assert_says(
        message,
        v,
        "PP 2, placement v, layers 1+1 | 1+1 on the ranks",
        "PP 2, placement v, layers 2+2 | 0+0 on the ranks",
    )


def test_another_schedule_of_the_same_placement_needs_no_flag(
    train: Train, v: Saved, tmp_path: Path
) -> None:
    assert_goes_on(v.run, [train(TIED_TO_RANKS, "v-half", tmp_path / "run", *v.load)])


@pytest.mark.slow
def test_the_same_schedule_needs_no_flag(train: Train, v: Saved, tmp_path: Path) -> None:
    assert_goes_on(v.run, [train(TIED_TO_RANKS, "zb-v", tmp_path / "run", *v.load)])


@pytest.mark.slow
def test_a_layout_that_says_what_megatron_does_anyway_is_the_same(
    train: Train, linear: Saved, tmp_path: Path
) -> None:
    even = ("--pipeline-model-parallel-layout", "Ett|ttL")
    resumed = train(TIED_TO_RANKS, "zb-h1", tmp_path / "run", *linear.load, *even)
    assert_goes_on(linear.run, [resumed])


def test_the_model_alone_crosses(train: Train, v: Saved, tmp_path: Path) -> None:
    import torch

    flags = (*v.load, "--no-load-optim")
    resumed = train(TIED_TO_RANKS, "zb-h1", tmp_path / "run", *flags)
    expected, losses = (one.iterations("loss/lm loss") for one in (v.run, resumed))
    assert len(losses) == LEG
    assert torch.equal(losses[0], expected[LEG])  # the same weights and data
    assert not torch.equal(losses[1], expected[LEG + 1])  # but a first step of Adam


@pytest.mark.slow
def test_the_model_is_a_start_for_another_run(train: Train, v: Saved, tmp_path: Path) -> None:
    flags = ("--load", str(v.checkpoint), "--finetune")
    config = replace(TIED_TO_RANKS, pp=4)
    tuned = train(config, "zb-h2", tmp_path / "run", *flags).iterations("loss/lm loss")
    assert len(tuned) == TIED_TO_RANKS.iterations
    assert float(tuned[0]) < float(v.run.iterations("loss/lm loss")[0])


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["torch_dist", "torch"])
def test_a_refused_checkpoint_is_converted_as_the_message_says(
    format_: str, zygote: Zygote, train: Train, tmp_path: Path
) -> None:
    kind = ("--ckpt-format", format_)
    config = replace(TIED_TO_RANKS, extra=kind)
    saved = save(train, config, "zb-v", tmp_path / "v")
    # From files for each rank Megatron takes the latest optimizer state, whatever --ckpt-step.
    (saved.checkpoint / "latest_checkpointed_iteration.txt").write_text(str(LEG))
    message = refusal(zygote, config, "zb-h1", tmp_path / "refused", *saved.load)
    assert "--ckpt-convert-format torch_dist --ckpt-convert-save NEW " + CROSSES in message
    if format_ == "torch":
        assert "it consists of files for each rank (--ckpt-format torch)" in message
    new = tmp_path / "new"
    convert = ("--ckpt-convert-format", "torch_dist", "--ckpt-convert-save", str(new), CROSSES)
    train(config, "zb-v", tmp_path / "conversion", *saved.load, *convert)
    load = ("--load", str(new / "torch_dist"))
    parts = [train(TIED_TO_RANKS, "zb-h1", tmp_path / "resumed", *load)]
    assert_goes_on(saved.run, parts)
