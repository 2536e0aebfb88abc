"""Two ranks that end right after a reduction, while gloo's threads get hardly any time.

    ending_rank.py STORE

Everything is on one CPU, and the threads run only where nobody else wants it: one holds the
reduced tensor when Python shuts down, unless the end of the process waits for it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import torch
import torch.distributed as dist

from megatron.zero_bubble import ending


def starve_threads() -> None:
    cpu = min(os.sched_getaffinity(0))
    for task in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(task, {cpu})
            if task != os.getpid():
                os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    ending.install()
    other = os.fork()
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}", rank=int(other == 0), world_size=2
    )
    starve_threads()
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    del tensor
    if other and os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) != 0:
        sys.exit("the other rank failed")
