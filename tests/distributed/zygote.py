"""A process that imports Megatron once and forks the ranks of one run after another.

Started by `harness.Zygote` as ``python zygote.py reference|ours LOG``. Reads a request as a line of
JSON on standard input, answers with a line of JSON on standard output, ends with its input.

A ``reference`` has nothing of ours but CPU mode: an empty module stands in for the adaptor, so
that pretrain_gpt.py runs on an unpatched Megatron. ``ours`` is pretrain_gpt.py as users run it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
import types
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
ADAPTOR = "megatron.zero_bubble.adaptor"
GRACE_S = 3.0
"""After one rank has failed: long enough for the others to say something about it."""


def main() -> None:
    kind, log = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    _redirect(Path(log))
    pretrain_gpt = _load(kind)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(pretrain_gpt, json.loads(line))), file=answers, flush=True)


def _load(kind: str) -> types.ModuleType:
    """Import all there is to import, so that a rank starts by forking."""
    sys.path.insert(0, str(REPOSITORY))
    from megatron.zero_bubble.patches import cpu

    cpu.install()
    if kind == "reference":
        sys.modules[ADAPTOR] = types.ModuleType(ADAPTOR)
    import pretrain_gpt

    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    if kind == "ours":
        _compile_builders()
    if kind == "reference":
        del sys.modules[ADAPTOR]
        unexpected = sorted(name for name in sys.modules if _is_ours(name))
        if unexpected:
            sys.exit(f"a reference runs without us, but imported {', '.join(unexpected)}")
    import torch

    torch.set_num_threads(1)
    return pretrain_gpt


def _compile_builders() -> None:
    """Build a V: the ranks then inherit numba and the compiled code that its orders need."""
    from zero_bubble.builders import build

    build("zb-v", 2, 4)


# What Megatron and torch import only once they train; each rank would pay for it again.
_IMPORTED_LATE = (
    "megatron.core.tokenizers.text.libraries",
    "megatron.training.checkpointing",
    "tests.distributed.freezing",
    "tests.distributed.happenings",
    "tests.distributed.injection",
    "tests.distributed.recorder",
    "torch._dynamo",
    "torch.onnx",
)


def _is_ours(module: str) -> bool:
    """Whether a reference must not have it: all of ours but CPU mode and the packages it is in,
    and `compat`, which the script needs to call Megatron at all."""
    if module in ("megatron.zero_bubble", "megatron.zero_bubble.patches"):
        return False
    if module == "megatron.zero_bubble.compat":
        return False
    if module.startswith("megatron.zero_bubble.patches.cpu"):
        return False
    return f"{module}.".startswith(("zero_bubble.", "megatron.zero_bubble."))


def _run(pretrain_gpt: types.ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks, wait for them until the limit, leave none behind."""
    started = time.monotonic()
    world_size = request["world_size"]
    environment = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    ranks: dict[int, int] = {}
    for rank in range(world_size):
        # One process group, led by the first rank, so that one signal ends them and their children.
        # Joined on both sides of the fork, so that neither can be early.
        group = next(iter(ranks), 0)
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, group)
            os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _be_rank(pretrain_gpt, request, rank)
        with contextlib.suppress(OSError):
            os.setpgid(pid, group)
        ranks[pid] = rank

    failure: dict[str, Any] | None = None
    deadline = started + request["timeout_s"]
    alive = dict(ranks)
    while alive and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
            continue
        rank = alive.pop(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and failure is None:
            failure = {"rank": rank, "reason": f"exit code {code}"}
            deadline = min(deadline, time.monotonic() + GRACE_S)
    if alive and failure is None:
        waiting = ", ".join(map(str, sorted(alive.values())))
        reason = f"did not finish in {request['timeout_s']} s (still running: {waiting})"
        failure = {"rank": min(alive.values()), "reason": reason}
        # Each of them writes into its log where it is waiting.
        os.killpg(next(iter(ranks)), signal.SIGUSR1)
        time.sleep(1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(next(iter(ranks)), signal.SIGKILL)
    for pid in alive:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return {"failure": failure, "seconds": round(time.monotonic() - started, 2)}


def _be_rank(pretrain_gpt: types.ModuleType, request: dict[str, Any], rank: int) -> None:
    """The whole life of a rank, in the forked process; does not return."""
    code = 1
    directory = Path(request["directory"])
    try:
        _die_with_parent()
        _redirect(directory / f"rank{rank}.log")
        faulthandler.register(signal.SIGUSR1)
        sys.argv = ["pretrain_gpt.py", *request["argv"]]
        from tests.distributed import freezing, happenings, injection
        from tests.distributed.recorder import Recorder

        recorder = Recorder()
        recorder.install()
        injection.install(request["spikes"])
        freezing.install(request["frozen"])
        happenings.install(request["happening"], directory)
        try:
            pretrain_gpt.main()
            code = 0
        except SystemExit as end:
            # Megatron leaves this way at --exit-interval.
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            if recorder.has_begun:
                recorder.save(directory / f"rank{rank}.failed.pt")
            raise
        if code == 0:
            recorder.save(directory / f"rank{rank}.pt")
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        # Not sys.exit: what the zygote's interpreter set up is not this process's to tear down.
        os._exit(code)


def _redirect(log: Path) -> None:
    """Send file descriptors 1 and 2 to the log, so that native code's messages land there too."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# A checkpoint writer's helper process imports this file again.
if __name__ == "__main__":
    main()
