"""A rank of a training run whose TensorBoard and wandb are replaced by lists, kept in a file.

    logging_rank.py FILE [flags of pretrain_gpt.py]

A rank for which Megatron makes a writer leaves FILE.RANK, a JSON object: name of the writer to the
names and values it was given, in order.
"""

import json
import os
import sys
from types import ModuleType
from typing import Any

written: dict[str, list[tuple[str, Any]]] = {}


class SummaryWriter:
    """Takes the place of TensorBoard's."""

    def __init__(self, **_: Any) -> None:
        written["tensorboard"] = []

    def add_scalar(self, name: str, value: Any, *_: Any) -> None:
        written["tensorboard"].append((name, float(value)))

    def __getattr__(self, name: str) -> Any:
        return lambda *_given, **_options: None


def stand_in_for_writers() -> None:
    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    wandb: Any = ModuleType("wandb")
    wandb.init = lambda **_: written.setdefault("wandb", [])
    wandb.log = lambda values, *_: written["wandb"].extend(
        (name, float(value)) for name, value in values.items()
    )
    wandb.finish = lambda *_: None
    wandb.config = {}
    sys.modules |= {"torch.utils.tensorboard": tensorboard, "wandb": wandb}


if __name__ == "__main__":
    stand_in_for_writers()  # before Megatron looks for them
    import pretrain_gpt

    file = sys.argv.pop(1)
    pretrain_gpt.main()
    if written:
        with open(f"{file}.{os.environ['RANK']}", "w") as out:
            json.dump(written, out)
