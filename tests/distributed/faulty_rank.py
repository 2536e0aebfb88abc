"""A rank of a training run that goes wrong on purpose.

    faulty_rank.py WHAT STAGE [flags of pretrain_gpt.py]

In the third iteration, on that stage alone, WHAT happens: ``stop`` and ``kill`` send the process
SIGSTOP and SIGKILL in a forward pass, ``forward`` and ``weight`` raise in an F or W pass.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

MESSAGE = "this pass fails on purpose"
BATCH, MICROBATCH = 2, 1


def _die_of(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def _fail() -> None:
    raise ArithmeticError(MESSAGE)


FAULTS: dict[str, tuple[str, Callable[[], None]]] = {
    "stop": ("forward", lambda: _die_of(signal.SIGSTOP)),
    "kill": ("forward", lambda: _die_of(signal.SIGKILL)),
    "forward": ("forward", _fail),
    "weight": ("weight", _fail),
}


def inject(what: str) -> None:
    """Let the fault happen before the pass of MICROBATCH in batch BATCH."""
    from megatron.zero_bubble.runtime.compute import MegatronCompute

    method, happen = FAULTS[what]
    original = getattr(MegatronCompute, method)
    batches = 0

    def faulty(self: Any, chunk: int, microbatch: int, *rest: Any) -> Any:
        nonlocal batches
        if microbatch == MICROBATCH:
            if batches == BATCH:
                print(f"faulty_rank: {what}", flush=True)
                happen()
            batches += 1
        return original(self, chunk, microbatch, *rest)

    setattr(MegatronCompute, method, faulty)


if __name__ == "__main__":
    import pretrain_gpt  # brings CPU mode and the adaptor, which a test that imports us must not

    what, stage = sys.argv[1:3]
    del sys.argv[1:3]
    if stage == os.environ["RANK"]:
        inject(what)
    pretrain_gpt.main()
