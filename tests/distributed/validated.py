"""What a run with post-validation must have done, said by the synchronous run it is compared with.

The bits are not enough: a run that steps synchronously all the time has them too.
"""

from __future__ import annotations

import re
from collections import Counter

from tests.distributed.harness import Result, assert_identical

__all__ = ["FLAG", "assert_validated", "outcomes", "rolled_back", "same_log"]

FLAG = "--optimizer-post-validation"
STEP, CLIP, SKIP = "step", "clip", "skip"
COUNTED = {STEP: "committed", CLIP: "clipped", SKIP: "skipped"}

_LINE = re.compile(r"^ \[[^\]]*\] (iteration .*)$", re.MULTILINE)
_TIME = re.compile(r" elapsed time per iteration \(ms\): [\d.]+ \|")
_VALIDATION = re.compile(r"^ *(validation loss at .*)$", re.MULTILINE)


def assert_validated(
    expected: Result,
    actual: Result,
    *,
    first: int = 0,
    also_synchronous: frozenset[int] = frozenset(),
) -> None:
    """The same bits and the same log, by steps that were validated afterwards where they may be.

    ``first`` is the number of the run's first iteration, if it resumes. ``also_synchronous`` are
    iterations that step synchronously for another reason than those of every run.
    """
    assert_identical(expected, actual)
    assert same_log(expected) == same_log(actual)
    synchronous = _synchronous(expected, first) | also_synchronous
    verdicts = outcomes(expected)
    for rank, record in enumerate(actual.ranks):
        assert all(record["finite"]), f"rank {rank}: {record['finite']}"
        steps = record["steps"]
        assert [one["verdict"] for one in steps] == verdicts, f"rank {rank}"
        alone = {index for index, one in enumerate(steps) if one["synchronous"]}
        assert alone == synchronous, f"rank {rank}"
        _assert_optimistic(rank, steps, expected.config.pp)
        counts = Counter(
            "synchronous" if one["synchronous"] else COUNTED[one["verdict"]] for one in steps
        )
        # The first stage knows least: if it does not step, no other does.
        counts["rolled_back"] = len(rolled_back(actual)[0])
        told = {name: one for name, one in record["counts"].items() if name != "mode_changes"}
        assert Counter(told) == counts, f"rank {rank}"


def outcomes(result: Result) -> list[str]:
    """What each step of a synchronous run did with its gradients, by what the run recorded."""
    clip = result.config.clip_grad
    skipped, norms = result.iterations("skipped"), result.iterations("grad_norm")
    return [
        SKIP if skip else CLIP if 0 < clip < norm + 1e-6 else STEP
        for skip, norm in zip(skipped, norms, strict=True)
    ]


def rolled_back(result: Result) -> dict[int, list[int]]:
    """Of each stage, the iterations whose step it had to undo."""
    return {
        record["steps"][0]["stage"]: [
            index
            for index, one in enumerate(record["steps"])
            if one["optimistic"] and one["verdict"] != STEP
        ]
        for record in result.ranks
    }


def same_log(result: Result) -> list[str]:
    """What Megatron logs of iterations and evaluations, on any rank, without the times."""
    found = []
    for log in result.logs:
        found += [_TIME.sub("", line) for line in _LINE.findall(log)]
        found += _VALIDATION.findall(log)
    assert len(found) >= result.config.iterations
    return found


def _synchronous(expected: Result, first: int) -> set[int]:
    """Iterations that any run steps synchronously, counted from its own first one.

    Those until a step succeeds, the last one, and those before an evaluation.
    """
    skipped, total = expected.iterations("skipped"), expected.config.iterations
    until_success = {i for i in range(len(skipped)) if all(skipped[:i])}
    every = max(1, total // 2)  # as Config says
    before_evaluation = {i for i in range(len(skipped)) if (first + i + 1) % every == 0}
    last = {total - first - 1} & set(range(len(skipped)))
    return until_success | before_evaluation | last


def _assert_optimistic(rank: int, steps: list[dict[str, object]], stages: int) -> None:
    """Who steps before it knows: not the last stage, and every other one where nothing clips."""
    for index, one in enumerate(steps):
        where, last = f"rank {rank}, iteration {index}", one["stage"] == stages - 1
        if one["synchronous"] or last:
            assert not one["optimistic"], where
        elif one["verdict"] == STEP:
            assert one["optimistic"], where
