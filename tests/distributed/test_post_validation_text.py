"""A longer run on real text: how often a step is undone, when, and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.distributed.configs import Config
from tests.distributed.harness import Result
from tests.distributed.validated import CLIP, FLAG, assert_validated, outcomes, rolled_back
from tools.prepare_text import find_files, read_documents, write_dataset

ROOT = Path(__file__).parents[2]
ITERATIONS, BLOCK = 500, 50
LIMIT_S = 900.0


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb-h1"])
def test_post_validation_of_500_iterations_on_text(
    schedule: str,
    train: Callable[..., Result],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From random weights, with Megatron's default --clip-grad; the text is this repository's."""
    files = find_files([ROOT / "docs", ROOT / "zero_bubble", ROOT / "tests"])
    write_dataset(read_documents(files), tmp_path / "text", overwrite=False)
    config = Config(
        precision="bf16",
        pp=2,
        hidden=64,
        sequence=64,
        iterations=ITERATIONS,
        clip_grad=1.0,
        text=str(tmp_path / "text"),
    )
    expected = train(config, schedule, "--canonical-grad-norm", limit_s=LIMIT_S)
    actual = train(config, schedule, FLAG, "--post-validation-window", "0", limit_s=LIMIT_S)
    assert_validated(expected, actual)
    losses = expected.iterations("loss/lm loss")
    assert losses[-1] < 0.8 * losses[0], "it learns"
    with capsys.disabled():
        print("\n" + report(actual))


def report(result: Result) -> str:
    """A table of blocks of iterations."""
    verdicts, undone = outcomes(result), rolled_back(result)[0]
    norms, losses = result.iterations("grad_norm"), result.iterations("loss/lm loss")
    clipped = [index for index, one in enumerate(verdicts) if one == CLIP]
    rows = [
        f"{len(clipped)} of {len(verdicts)} iterations were clipped. The first stage had stepped "
        f"in {len(undone)} of them, and undid it; in the others its own gradients said not to.",
        " iterations  clipped  undone  median norm    loss",
    ]
    for begin in range(0, len(verdicts), BLOCK):
        block = range(begin, begin + BLOCK)
        rows.append(
            f"{begin + 1:6}-{begin + BLOCK:<4}"
            f"{sum(one in block for one in clipped):9}"
            f"{sum(one in block for one in undone):8}"
            f"{sorted(norms[begin : begin + BLOCK])[BLOCK // 2]:13.3f}"
            f"{float(losses[block[-1]]):8.3f}"
        )
    rows.append(f"undone: {', '.join(ranges(undone)) or 'none'}")
    return "\n".join(rows)


def ranges(indices: Sequence[int]) -> list[str]:
    """Iterations as Megatron counts them, from 1: ``4-35``, ``37``, ..."""
    runs: list[tuple[int, int]] = []
    for number in (index + 1 for index in indices):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return [str(begin) if begin == end else f"{begin}-{end}" for begin, end in runs]
