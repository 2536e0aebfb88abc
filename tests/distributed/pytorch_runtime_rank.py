"""One rank of PyTorch's pipeline runtime that trains a small model by CSV files.

    python pytorch_runtime_rank.py NAME=FORM:FILE.csv ...

FORM is PyTorch's name of the file's form. For each file it runs one step, compares the gradients of
its part of the model with those of the whole model run without a pipeline, and prints
``NAME: equal``, or ends with an assertion. It knows nothing of this project but the files.
"""

from __future__ import annotations

import copy
import csv
import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

LAYERS, WIDTH, MICROBATCHES, SAMPLES = 4, 6, 4, 3


class Stage(PipelineStage):  # type: ignore[misc]
    """PyTorch's stage without the empty messages that open NCCL's communicators at the start.

    At the turn of a V they go from a rank to itself, which gloo cannot do; gloo needs none.
    """

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []


def main() -> None:
    torch.manual_seed(1234)
    dist.init_process_group("gloo")
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(LAYERS)
    ]
    shape = (MICROBATCHES * SAMPLES, WIDTH)
    inputs, target = torch.randn(shape), torch.randn(shape)
    whole = torch.nn.Sequential(*copy.deepcopy(layers))
    loss = torch.nn.functional.mse_loss(whole(inputs), target)
    loss.backward()
    for argument in sys.argv[1:]:
        name, _, rest = argument.partition("=")
        form, _, path = rest.partition(":")
        check(path, form, layers, whole, inputs, target)
        print(f"{name}: equal", flush=True)
    dist.destroy_process_group()


def check(
    path: str,
    form: str,
    layers: list[torch.nn.Module],
    whole: torch.nn.Sequential,
    inputs: torch.Tensor,
    target: torch.Tensor,
) -> None:
    with open(path, newline="") as file:
        rows = [{int(cell[0]) for cell in row} for row in csv.reader(file)]
    here, positions = rows[dist.get_rank()], len(set.union(*rows))
    share = LAYERS // positions
    parts = {
        position: torch.nn.Sequential(
            *copy.deepcopy(layers[position * share : (position + 1) * share])
        )
        for position in sorted(here)
    }
    stages = [
        Stage(part, position, positions, torch.device("cpu")) for position, part in parts.items()
    ]
    schedule = _PipelineScheduleRuntime(
        stages, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss, scale_grads=True
    )
    schedule._load_csv(path, format=form)
    losses: list[torch.Tensor] = []
    schedule.step(
        *([inputs] if 0 in parts else []),
        target=target if positions - 1 in parts else None,
        losses=losses,
    )
    for position, part in parts.items():
        expected = whole[position * share : (position + 1) * share]
        for got, want in zip(part.parameters(), expected.parameters(), strict=True):
            assert got.grad is not None, f"{path}: position {position} has no gradient"
            assert torch.allclose(got.grad, want.grad, atol=1e-6), (
                f"{path}: position {position}: {got.grad} where {want.grad} is right"
            )
            assert want.grad.abs().max() > 1e-4


if __name__ == "__main__":
    main()
