"""One rank that calls Megatron's forward_backward function and ours on one model and one batch.

    python side_by_side_rank.py [Megatron's flags]

Ends with code 0 when every check held, else with the assertion.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import megatron.zero_bubble.adaptor  # noqa: F401  (before Megatron's own modules)

# isort: split
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config
from megatron.training import get_args, training

import pretrain_gpt
from megatron.zero_bubble.arguments import schedule_for
from megatron.zero_bubble.patches.schedule import current_session
from zero_bubble.builders import BUILDERS
from zero_bubble.schedule import Kind

MICROBATCHES = 5


def check_all(forward_step: Any, data_iterator: Any, model: list[Any], *_: Any, **__: Any) -> Any:
    """Takes the place of the first train_step."""
    batch = [next(data_iterator) for _ in range(MICROBATCHES)]
    megatron = schedules.forward_backward_pipelining_without_interleaving
    session, config = current_session(), get_model_config(model[0])
    assert session is not None

    def call(function: Callable[..., list[Any]], step: Any = forward_step, **options: Any) -> Any:
        args = get_args()
        return function(
            forward_step_func=step,
            data_iterator=iter(batch),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            **options,
        )

    def gradients(function: Callable[..., list[Any]]) -> tuple[list[Any], list[torch.Tensor]]:
        for chunk in model:
            chunk.zero_grad_buffer()
        losses = call(function, forward_only=False)
        return losses, [p.main_grad.clone() for chunk in model for p in chunk.parameters()]

    expected_losses, expected = gradients(megatron)
    assert any(gradient.any() for gradient in expected)
    for name in (name for name, builder in BUILDERS.items() if builder.is_linear):
        session.reschedule(partial(schedule_for, name))
        for deallocate in (False, True):
            config.deallocate_pipeline_outputs = deallocate
            losses, ours = gradients(session.forward_backward)
            same(losses, expected_losses, f"{name}, deallocate {deallocate}: losses")
            same(ours, expected, f"{name}, deallocate {deallocate}: gradients")
            # Layers are split when a schedule first has W's, whichever ran before.
            assert (session.store.computed > 0) == has_weight_passes(name), name
        config.deallocate_pipeline_outputs = False

    # A scaled loss scales every gradient by the same power of two, exactly.
    config.grad_scale_func = lambda loss: loss * 8
    scaled = gradients(session.forward_backward)[1]
    config.grad_scale_func = None
    same(scaled, [8 * gradient for gradient in expected], "scaled gradients")

    with torch.no_grad():
        for chunk in model:
            chunk.eval()
        every: tuple[dict[str, Any], ...]
        every = ({}, {"first_val_step": True}, {"collect_non_loss_data": True})
        for options in every:
            step = with_data(forward_step) if "collect_non_loss_data" in options else forward_step
            theirs: Any = call(megatron, step, forward_only=True, **options)
            data = call(session.forward_backward, step, forward_only=True, **options)
            same(data, theirs, f"forward only, {options}")
            last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
            assert len(data) == (MICROBATCHES if last else 0)
    print("side by side: equal", flush=True)
    torch.distributed.barrier()
    raise SystemExit(0)


def has_weight_passes(name: str) -> bool:
    stages = torch.distributed.get_world_size()
    rows = schedule_for(name, stages, MICROBATCHES).passes
    return any(one.kind is Kind.W for row in rows for one in row)


def with_data(forward_step: Any) -> Any:
    """A forward step whose loss function hands out the output itself when asked."""

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss_func = forward_step(data_iterator, model)

        def loss_or_data(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            return {"output": output.clone()} if non_loss_data else loss_func(output)

        return output, loss_or_data

    return step


def same(ours: Any, theirs: Any, what: str) -> None:
    """Equal in structure and in every bit."""
    assert type(ours) is type(theirs), what
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), what
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), what
        for one, other in zip(ours, theirs, strict=True):
            same(one, other, what)
    else:
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs)), what


if __name__ == "__main__":
    training.train_step = check_all
    pretrain_gpt.main()
