"""One rank of cross_stage_syncs.py: trains, and writes down what it says to other ranks.

python benchmarks/cross_stage_worker.py DIRECTORY [Megatron's flags]

Rank r writes DIRECTORY/rank{r}.json: its stage, and a log in the order of events. Times are ns of
one clock for all ranks. An entry is one of

- a call of torch.distributed: what, with whom, from which line of Megatron or ours, and which one
  it is on its line, so that calls of different ranks can be matched;
- a wait for a call that did not block;
- the beginning and the end of an instruction of the schedule, and which batch it is of;
- the beginning of a training step.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier",
    "new_group", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "_all_gather_base", "_reduce_scatter_base",
)  # fmt: skip
SENDS, RECEIVES = ("send", "isend"), ("recv", "irecv")
NOT_BLOCKING = ("isend", "irecv")


class Log:
    """What this rank does, in order."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.stage = -1
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._here = threading.local()
        self._waits_of: defaultdict[int | None, list[int]] = defaultdict(list)

    def wrap(self) -> None:
        """Take the place of torch's functions; to be called before Megatron copies any."""
        for name in (*COLLECTIVES, *SENDS, *RECEIVES):
            original = getattr(dist.distributed_c10d, name)
            wrapped = self._wrapped(name, original)
            for module in (dist, dist.distributed_c10d):
                if getattr(module, name, None) is original:
                    setattr(module, name, wrapped)
        self._watch_joins()

    def _watch_joins(self) -> None:
        """What another thread waits for, the stage waits for when it joins that thread."""
        join = threading.Thread.join

        @wraps(join)
        def watched(thread: threading.Thread, timeout: float | None = None) -> None:
            begin = time.perf_counter_ns()
            join(thread, timeout)
            for index in self._waits_of.pop(thread.ident, ()):
                self.waited(index, begin)

        threading.Thread.join = watched  # type: ignore[method-assign]

    def waited(self, index: int, begin: int) -> None:
        """A wait for the call of this entry is over."""
        if threading.current_thread() is threading.main_thread():
            end = time.perf_counter_ns()
            self.entries.append({"kind": "wait", "of": index, "begin": begin, "end": end})
        else:
            self._waits_of[threading.get_ident()].append(index)

    def _wrapped(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def call(*given: Any, **options: Any) -> Any:
            if getattr(self._here, "inside", False):  # torch makes some of others
                return original(*given, **options)
            begin, where = time.perf_counter_ns(), caller()
            self._here.inside = True
            try:
                result = original(*given, **options)
            finally:
                self._here.inside = False
            entry = self._entry(name, signature.bind(*given, **options).arguments, result)
            if entry is None:
                return result
            entry |= {"begin": begin, "end": time.perf_counter_ns(), "where": where}
            self.entries.append(entry)
            if hasattr(result, "is_completed") and not entry["blocks"]:
                return Awaited(result, len(self.entries) - 1, self)
            return result

        return call

    def _entry(self, name: str, arguments: dict[str, Any], result: Any) -> dict[str, Any] | None:
        """None if this rank takes no part."""
        group = arguments.get("group")
        if group is None:
            group = dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        peer = None
        if name in SENDS:
            peer = in_world(group, arguments.get("dst"), arguments.get("group_dst"))
        elif name in RECEIVES:
            # That of a receive from anyone is what it returns.
            peer = in_world(group, arguments.get("src"), arguments.get("group_src"))
            peer = result if peer is None else peer
        line = ["new_group" if name == "new_group" else "collective", group.group_name]
        if peer is not None:
            ends = (dist.get_rank(), peer) if name in SENDS else (peer, dist.get_rank())
            line = ["message", group.group_name, *ends]
        direction = "receive" if name in RECEIVES else "send"
        number = self._counts[(*line, direction)]
        self._counts[(*line, direction)] += 1
        return {
            "kind": "call",
            "what": name,
            "group": group.group_desc,
            "ranks": dist.get_process_group_ranks(group),
            "peer": peer,
            "direction": None if peer is None else direction,
            "line": line,
            "number": number,
            "blocks": name not in NOT_BLOCKING and not arguments.get("async_op", False),
        }

    def step(self) -> None:
        self.entries.append({"kind": "step", "begin": time.perf_counter_ns()})

    def before(self, instruction: Any) -> None:
        self._instruction("begin", str(instruction))

    def after(self, instruction: Any) -> None:
        self._instruction("end", str(instruction))

    def _instruction(self, kind: str, name: str) -> None:
        self.entries.append({"kind": kind, "what": name, "batch": self._counts[kind, name]})
        self._counts[kind, name] += 1


class Awaited:
    """torch's handle of a call that did not block."""

    def __init__(self, work: Any, index: int, log: Log) -> None:
        self._work, self._index, self._log = work, index, log

    def wait(self, *given: Any, **options: Any) -> Any:
        begin = time.perf_counter_ns()
        result = self._work.wait(*given, **options)
        self._log.waited(self._index, begin)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def in_world(group: Any, rank: int | None, rank_in_group: int | None) -> int | None:
    if rank is None and rank_in_group is not None:
        return dist.get_global_rank(group, rank_in_group)
    return rank


def caller() -> str:
    """file:line of the innermost frame in Megatron's packages or ours, from ``megatron/`` on."""
    frame = sys._getframe(2)
    while frame is not None:
        _, inside, path = frame.f_code.co_filename.rpartition("/megatron/")
        if inside:
            return f"{path}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "elsewhere"


def main() -> None:
    directory = Path(sys.argv.pop(1))
    log = Log()
    log.wrap()
    import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

    # isort: split
    from megatron.training import training

    import pretrain_gpt
    from megatron.zero_bubble.patches.schedule import current_session

    train_step = training.train_step

    def watched_step(*given: Any, **options: Any) -> Any:
        session = current_session()
        if session.observer is None:
            session.observer = log
            session.listeners.append(lambda record: setattr(log, "stage", record.stage))
        log.step()
        return train_step(*given, **options)

    training.train_step = watched_step
    pretrain_gpt.main()
    written = {"stage": log.stage, "entries": log.entries}
    (directory / f"rank{os.environ['RANK']}.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main()
