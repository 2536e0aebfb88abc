"""Train through Megatron's own loop on CPU ranks, and compare two runs bit by bit.

with Zygote("reference", log_directory) as reference:
    result = reference.train(config, directory)
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from tests.distributed.configs import Config
from tests.distributed.gathering import assemble

__all__ = [
    "Result",
    "TrainingFailed",
    "Zygote",
    "assert_identical",
    "assert_identical_model",
    "differences",
    "model_differences",
]

STARTUP_LIMIT_S = 120.0
RUN_LIMIT_S = 180.0
ROUNDING = 1e-6
"""By how much a sum of floats may differ, relatively, when it is added up in another order."""
_LOG_LINES = 40


class TrainingFailed(AssertionError):
    """A rank ended with an error or not at all; the message has the end of its log."""


@dataclass(frozen=True)
class Result:
    """A finished run: what `recorder.Recorder` saved, by rank."""

    config: Config
    directory: Path
    seconds: float
    ranks: list[dict[str, Any]]

    @property
    def logs(self) -> list[str]:
        """What each rank printed."""
        files = (self.directory / f"rank{rank}.log" for rank in range(self.config.world_size))
        return [file.read_text(errors="replace") for file in files]

    def iterations(self, name: str) -> list[Any]:
        """A value of each iteration (``"loss/lm loss"``, ``"grad_norm"``, ...), last rank's."""
        return [one[name] for one in self.ranks[-1]["iterations"]]

    def continued(self, by: Result) -> Result:
        """The run that this one and its resumption make together."""
        parts = ("iterations", "evaluations", "finite", "steps")
        ranks = [
            later | {part: earlier[part] + later[part] for part in parts}
            for earlier, later in zip(self.ranks, by.ranks, strict=True)
        ]
        return Result(self.config, by.directory, self.seconds + by.seconds, ranks)


class Zygote:
    """A process that has imported everything and forks the ranks of one run after another.

    ``reference`` is Megatron with nothing of ours but CPU mode; ``ours`` has the adaptor. The
    caller stays free of what either does to torch.
    """

    def __init__(self, kind: Literal["reference", "ours"], log_directory: Path) -> None:
        self.kind = kind
        self.log = log_directory / f"{kind}.log"
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "ZERO_BUBBLE_DEVICE": "cpu",
            "PYTHONWARNINGS": "ignore",
        }
        if sys.platform == "linux":
            # Else gloo asks for the host's own name, which not every container can resolve.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py")), kind, str(self.log)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            self._answer(STARTUP_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def train(
        self,
        config: Config,
        directory: Path,
        extra: Sequence[str] = (),
        limit_s: float = RUN_LIMIT_S,
    ) -> Result:
        """Train ``config`` with ``extra`` flags; logs and records go into ``directory``.

        Raises:
            TrainingFailed: a rank failed, or they did not all finish within ``limit_s`` seconds.
        """
        answer = self._run(config, directory, extra, limit_s)
        failure = answer["failure"]
        if failure is not None:
            log = directory / f"rank{failure['rank']}.log"
            raise TrainingFailed(
                f"{self.kind}: rank {failure['rank']} of {config}: {failure['reason']}\n"
                f"{' '.join(extra)}\n{_tail(log)}\n(all of it: {log})"
            )
        ranks = _records(config, directory, "rank{}.pt")
        if any(rank["adaptor"] != (self.kind == "ours") for rank in ranks):
            raise TrainingFailed(f"{self.kind}: the adaptor must be there in ours, and only there")
        return Result(config, directory, answer["seconds"], ranks)

    def fail(
        self,
        config: Config,
        directory: Path,
        extra: Sequence[str] = (),
        limit_s: float = RUN_LIMIT_S,
    ) -> Result:
        """What was recorded up to the exception that ends every rank.

        Raises:
            TrainingFailed: a rank did not end with an exception.
        """
        answer = self._run(config, directory, extra, limit_s)
        for rank in range(config.world_size):
            if not (directory / f"rank{rank}.failed.pt").exists():
                log = directory / f"rank{rank}.log"
                raise TrainingFailed(
                    f"{self.kind}: rank {rank} of {config} did not fail by itself, but was to "
                    f"({answer['failure']})\n{_tail(log)}\n(all of it: {log})"
                )
        ranks = _records(config, directory, "rank{}.failed.pt")
        return Result(config, directory, answer["seconds"], ranks)

    def _run(self, config: Config, directory: Path, extra: Sequence[str], limit_s: float) -> Any:
        directory.mkdir(parents=True, exist_ok=True)
        argv = [*config.flags(), "--data-cache-path", str(self.log.parent / "cache"), *extra]
        (directory / "command.txt").write_text(" ".join(argv) + "\n")
        request = {
            "argv": argv,
            "spikes": [asdict(one) for one in config.spikes],
            "happening": config.happening,
            "frozen": config.frozen,
            "world_size": config.world_size,
            "directory": str(directory),
            "timeout_s": limit_s,
        }
        assert self._process.stdin is not None
        with _turn():
            print(json.dumps(request), file=self._process.stdin, flush=True)
            return self._answer(limit_s + 30)

    def close(self) -> None:
        """End the process; ranks still running end with it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, limit_s: float) -> Any:
        assert self._process.stdout is not None
        deadline = time.monotonic() + limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        line = self._process.stdout.readline() if ready else ""
        if not line:
            what = f"gave no answer in {limit_s:.0f} s"
            if ready:
                what = f"ended with exit code {self._process.wait()}"
            self._process.kill()
            raise TrainingFailed(f"the {self.kind} process {what}\n{_tail(self.log)}")
        return json.loads(line)


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    """Runs of all test processes on this machine take turns: at once they would be slower than one
    after the other, and miss their limits."""
    with open(Path(tempfile.gettempdir()) / f"zero-bubble-tests-{os.getuid()}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def differences(expected: Result, actual: Result) -> Iterator[str]:
    """Every difference in bits, by rank: iterations in order, evaluations, then the final state."""
    for rank, (left, right) in enumerate(zip(expected.ranks, actual.ranks, strict=True)):
        for part in ("iterations", "evaluations"):
            if len(left[part]) != len(right[part]):
                counts = f"{len(left[part])} and {len(right[part])}"
                yield f"rank {rank}: {counts} {part}"
            for index, pair in enumerate(zip(left[part], right[part], strict=False)):
                for what in _unequal(*pair):
                    yield f"rank {rank}, {part.removesuffix('s')} {index}: {what}"
        for what in _unequal(left["state"], right["state"]):
            yield f"rank {rank}, at the end: {what}"


def assert_identical(expected: Result, actual: Result) -> None:
    """Both runs have the same bits in all that was recorded; AssertionError names what differs."""
    _assert_none(list(differences(expected, actual)), expected, actual)


def model_differences(expected: Result, actual: Result) -> Iterator[str]:
    """Every difference between two models in training, whichever ranks hold their parts.

    The gradients' norm is compared up to rounding: a stage sums the squares of its own gradients,
    and another placement has others on it. Where the norm clips, it scales all gradients, so that
    every bit may differ after the first step. Losses are then compared up to rounding too, and
    parameters and optimizer state not at all.
    """
    clips = expected.config.clips
    for part in ("iterations", "evaluations"):
        before, after = _of_all_ranks(expected, part), _of_all_ranks(actual, part)
        if len(before) != len(after):
            yield f"{len(before)} and {len(after)} {part}"
        for index, (left, right) in enumerate(zip(before, after, strict=False)):
            rounded = {name for name in left if name == "grad_norm" or (clips and _is_loss(name))}
            for what in (*_unequal(left, right, but=rounded), *_far(left, right, rounded)):
                yield f"{part.removesuffix('s')} {index}: {what}"
    if not clips:
        models = [assemble(rank["pieces"] for rank in run.ranks) for run in (expected, actual)]
        yield from (f"at the end: {what}" for what in _unequal(*models))


def assert_identical_model(expected: Result, actual: Result) -> None:
    """Both runs trained the same model to the same bits; AssertionError names what differs."""
    _assert_none(list(model_differences(expected, actual)), expected, actual)


def _assert_none(found: list[str], expected: Result, actual: Result) -> None:
    if found:
        more = f"\n... and {len(found) - 8} more" if len(found) > 8 else ""
        raise AssertionError(
            f"{actual.config}: {len(found)} differences, the first of them:\n"
            + "\n".join(found[:8])
            + f"{more}\nexpected: {expected.directory}\nactual:   {actual.directory}"
        )


def _of_all_ranks(result: Result, part: str) -> list[dict[str, Any]]:
    """What each iteration or evaluation gave, on whichever rank it is known.

    AssertionError if two ranks say different things, or none knows a loss.
    """
    rows = []
    for index, records in enumerate(zip(*(rank[part] for rank in result.ranks), strict=True)):
        row: dict[str, Any] = {}
        for rank, record in enumerate(records):
            known = {name: row[name] for name in record if name in row}
            for what in _unequal(known, {name: record[name] for name in known}):
                raise AssertionError(f"{part} {index}: ranks disagree, on rank {rank} {what}")
            row |= record
        assert any(map(_is_loss, row)), f"{part} {index}: no rank knows a loss"
        rows.append(row)
    return rows


def _is_loss(name: str) -> bool:
    """As iterations and evaluations name them; the loss scale is none."""
    return name.startswith("loss/") or name.endswith(" loss")


def _far(left: dict[str, Any], right: dict[str, Any], names: set[str]) -> Iterator[str]:
    """Differences beyond rounding, of values on both sides."""
    import torch

    for name in sorted(names & left.keys() & right.keys()):
        if left[name] is None or right[name] is None:  # the norm of a step that is skipped
            if left[name] is not right[name]:
                yield f"{name} is {right[name]!r}, not {left[name]!r}"
            continue
        a, b = (torch.as_tensor(one[name], dtype=torch.float64) for one in (left, right))
        if not torch.allclose(a, b, rtol=ROUNDING, atol=0.0):
            yield f"{name} is {b.tolist()!r}, not {a.tolist()!r} within {ROUNDING:g}"


def _unequal(
    left: dict[str, Any], right: dict[str, Any], but: Container[str] = ()
) -> Iterator[str]:
    """Names on one side only, and different values, except of the names in ``but``."""
    import torch

    for name in left.keys() ^ right.keys():
        yield f"{name} is only in the {'expected' if name in left else 'actual'} run"
    for name in left:
        if name not in right or name in but:
            continue
        a, b = left[name], right[name]
        if not (torch.is_tensor(a) and torch.is_tensor(b)):
            if type(a) is not type(b) or a != b:
                yield f"{name} is {b!r}, not {a!r}"
        elif a.dtype != b.dtype or a.shape != b.shape:
            yield f"{name} is {b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
        elif not torch.equal(a, b):
            worst = (a.double() - b.double()).abs().max().item()
            count = int((a != b).sum())
            yield f"{name} differs in {count} of {a.numel()} values, by at most {worst:.3g}"


def _records(config: Config, directory: Path, name: str) -> list[dict[str, Any]]:
    import torch  # here, so that collecting the tests stays quick

    paths = [directory / name.format(rank) for rank in range(config.world_size)]
    # The records are our own, and hold more than tensors.
    return [torch.load(path, weights_only=False) for path in paths]


def _tail(log: Path) -> str:
    if not log.exists():
        return "(no log)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
