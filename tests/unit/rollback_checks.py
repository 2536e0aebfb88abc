"""What test_rollback.py and test_rollback_inplace.py check, in a process in CPU mode."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.optimizer import deferred, snapshot, state
from megatron.zero_bubble.optimizer.deferred import Deferred
from megatron.zero_bubble.optimizer.model_parameters import MainParameter
from megatron.zero_bubble.optimizer.rollback import Rollback, make_rollback
from megatron.zero_bubble.optimizer.snapshot import Snapshot
from tests.unit.rollback_models import CALM, CLIP, SPIKE, Trainee, differences

# What becomes of a step that went ahead: `interrupted` is clipped before forwards have gathered all
# parameters, `inf` is skipped for this rank's gradients and `skip` for a reason elsewhere. `plain`
# does not go ahead.
EVENTS = (
    "plain", "ok", "clip", "ok", "skip", "interrupted", "ok", "clip", "clip", "inf", "skip", "ok",
    "plain", "ok",
)  # fmt: skip
CLIPPED = ("clip", "interrupted")
ALIGNMENT = 4096  # elements


def rollback_of(kind: str, trainee: Trainee) -> Rollback:
    """By its name; `sliced` and `host` are deferred in short slices and a snapshot on the host."""
    if kind == "sliced":
        return Deferred(trainee.optimizer, slice_elements=deferred.ALIGNMENT)
    if kind == "host":
        return make_rollback("snapshot", trainee.optimizer, on_host=True)
    return make_rollback(kind, trainee.optimizer)


def check_as_a_plain_step(kind: str, events: tuple[str, ...] = EVENTS, **settings: Any) -> None:
    """A trainee with a rollback against a twin without, after every part of every step."""
    found = found_wrong(kind, events, **settings)
    assert not found, found[:10]


def found_wrong(kind: str, events: tuple[str, ...] = EVENTS, **settings: Any) -> list[str]:
    """What differs from the twin, or after an undo from what was before it."""
    ours, twin = Trainee(**settings), Trainee(**settings)
    rollback = rollback_of(kind, ours)
    if settings["precision"] != "fp16":
        events = tuple(event for event in events if event != "inf")
    wrong = []
    for iteration, event in enumerate(events):
        for trainee in (ours, twin):
            trainee.set_learning_rate(iteration)
            size = SPIKE if event in CLIPPED else CALM
            trainee.set_gradients(iteration, size, infinite=event == "inf")
        if event == "skip":
            twin.optimizer.prepare_grads()
        else:
            assert twin.optimizer.step()[0] == (event != "inf")
        twin.forward()
        if event == "plain":
            ours.optimizer.step()
        else:
            wrong += _go_ahead(kind, rollback, ours, twin, event)
        ours.forward()
        wrong += [f"{iteration} {event}: {name}" for name in _against(ours, twin)]
        if wrong:
            break
        for trainee in (ours, twin):
            trainee.end_iteration()
    return wrong


def _against(ours: Trainee, twin: Trainee, *kinds: str) -> list[str]:
    return differences(ours.everything(), twin.everything(), *kinds)


def _go_ahead(kind: str, rollback: Rollback, ours: Trainee, twin: Trainee, event: str) -> list[str]:
    """A step of ours that goes ahead and ends as the event says; what is wrong on the way."""
    infinite = ours.optimizer.prepare_grads()
    norm = ours.optimizer.get_grad_norm()
    assert infinite == (event == "inf")
    assert infinite or (norm > CLIP) == (event in CLIPPED)
    before = ours.everything()
    rollback.apply()
    ahead = ours.forward(interrupted=event == "interrupted")
    wrong = []
    if event == "ok":
        wrong += [f"applied {name}" for name in _against(ours, twin, "model")]
    if kind in ("deferred", "sliced"):
        untouched = ["state", "group", "gradient"]
        if ours.separate:
            untouched.append("main")
        wrong += [f"touched {n}" for n in differences(ours.everything(), before, *untouched)]
    if event == "ok":
        rollback.commit()
        # What forwards saved must not have been touched since.
        torch.autograd.grad(ahead, ours.parameters())
        return wrong
    publish = event in ("skip", "inf")
    rollback.undo(publish=publish)
    if publish:
        ours.forward()
        return [*wrong, *(f"undone {n}" for n in differences(ours.everything(), before))]
    undone = ("main", "state", "group", "gradient")
    wrong += [f"undone {n}" for n in differences(ours.everything(), before, *undone)]
    for member in ours.members:
        clip_grad_by_total_norm_fp32(member.get_parameters(), max_norm=CLIP, total_norm=norm)
    ours.optimizer.step_with_ready_grads()
    return wrong


def check_batches(elements: int, sizes: list[list[int]]) -> None:
    """Every element once and in order, none too many at a time, and no cut between vectors.

    Args:
        sizes: of the parameters of each group; negative for one that is not contiguous.
    """
    parameters = []
    for group, group_sizes in enumerate(sizes):
        for size in group_sizes:
            tensor = torch.zeros(abs(size)) if size >= 0 else torch.zeros(2, -size // 2).t()
            tensor.grad = torch.zeros_like(tensor)
            parameters.append(MainParameter(tensor, tensor, True, group, f"{group} {size}"))
    covered = dict.fromkeys(parameters, 0)
    order = []
    for batch in deferred.batches(parameters, elements):
        taken = 0
        for piece in batch:
            assert piece.parameter.group == batch[0].parameter.group
            assert piece.start == covered[piece.parameter] < piece.stop
            size = piece.parameter.tensor.numel()
            assert piece.stop == size or piece.stop % ALIGNMENT == 0
            covered[piece.parameter] = piece.stop
            taken += piece.stop - piece.start
            order.append(parameters.index(piece.parameter))
        whole = len(batch) == 1 and not batch[0].parameter.tensor.is_contiguous()
        assert 0 < taken <= elements or whole
    assert all(stop == parameter.tensor.numel() for parameter, stop in covered.items())
    assert order == sorted(order)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _step_live(self: Deferred, member: Any) -> None:
    member.optimizer.step()


# name: what is replaced, each as (whose attribute, the attribute), and by what
SABOTAGE: dict[str, tuple[list[tuple[Any, str]], Any]] = {
    "counters are not set back": ([(state.Counters, "restore")], _nothing),
    "the model is not written": ([(deferred, "write_model_parameters")], _nothing),
    "gathers are not forgotten": ([(o, "forget_gathers") for o in (deferred, snapshot)], _nothing),
    "nothing is gathered": (
        [(owner, "gather_model_parameters") for owner in (deferred, snapshot)],
        _nothing,
    ),
    "the model's tensors are stepped": ([(Deferred, "_step_backups")], _step_live),
    "counters are shared": ([(deferred, "fresh")], lambda value: value),
    "the step is not made": ([(Deferred, "commit")], _nothing),
    "gradients are taken for safe": (
        [(owner, "writes_gradients") for owner in (deferred, snapshot)],
        lambda inner: False,
    ),
    "cuts anywhere": ([(deferred, "ALIGNMENT")], 1003),
}


def found_wrong_with(
    sabotage: str, kind: str, events: tuple[str, ...] = EVENTS, **settings: Any
) -> list[str]:
    """What the comparison finds, or autograd's complaint, with a part of the package broken."""
    places, replacement = SABOTAGE[sabotage]
    with ExitStack() as broken:
        for owner, attribute in places:
            broken.enter_context(mock.patch.object(owner, attribute, replacement))
        try:
            return found_wrong(kind, events, **settings)
        except RuntimeError as error:
            return [str(error)]


def memory_of(kind: str, **settings: Any) -> dict[str, int]:
    """Bytes kept and of scratch after a step ahead, with the figures to compare them with."""
    trainee = Trainee(**settings)
    trainee.set_gradients(0, CALM)
    trainee.optimizer.step()
    trainee.optimizer.prepare_grads()
    rollback = rollback_of(kind, trainee)
    rollback.apply()
    found = {"kept": rollback.kept_bytes, "scratch": rollback.scratch_bytes}
    rollback.undo(publish=True)
    return {
        **found,
        "elements": sum(parameter.numel() for parameter in trainee.parameters()),
        "tensors": len(trainee.parameters()),
    }


def complaint_without_a_step(kind: str, **settings: Any) -> str:
    """What is said where no ordinary step came first; nothing may have been changed then."""
    trainee = Trainee(**settings)
    trainee.set_gradients(0, CALM)
    trainee.optimizer.prepare_grads()
    before = trainee.everything()
    with pytest.raises(RuntimeError) as caught:
        rollback_of(kind, trainee).apply()
    assert not differences(trainee.everything(), before)
    return str(caught.value)


def refusal(
    kind: str = "deferred",
    *,
    on_host: bool = False,
    config: dict[str, Any] | None = None,
    ddp: dict[str, Any] | None = None,
    optimizer_class: str | None = None,
    inner_class: str | None = None,
    groups: dict[str, Any] | None = None,
    **settings: Any,
) -> str | None:
    """What ``make_rollback`` says against a trainee of which something was changed."""
    defaults = {"precision": "bf16", "sharding": "distributed", "inner": "adam"}
    trainee = Trainee(**(defaults | settings))
    optimizer: Any = trainee.optimizer
    (member,) = trainee.members
    for changed, values in ((member.config, config), (getattr(member, "ddp_config", None), ddp)):
        for name, value in (values or {}).items():
            setattr(changed, name, value)
    for group in member.optimizer.param_groups:
        group.update(groups or {})
    if inner_class is not None:
        member.optimizer = getattr(torch.optim, inner_class)(member.get_parameters(), lr=1e-2)
    if optimizer_class == "member":
        optimizer = member
    elif optimizer_class is not None:
        member.__class__ = type(optimizer_class, (type(member),), {})
    try:
        make_rollback(kind, optimizer, on_host=on_host)
    except ConfigurationError as error:
        return str(error)
    return None


def host_buffers_are_used_again(**settings: Any) -> bool:
    """Whether a snapshot on the host makes its copies in the same memory each time."""
    trainee = Trainee(**settings)
    trainee.set_gradients(0, CALM)
    trainee.optimizer.step()
    rollback = Snapshot(trainee.optimizer, on_host=True)
    places = []
    for iteration in (1, 2):
        trainee.set_gradients(iteration, CALM)
        trainee.optimizer.prepare_grads()
        rollback.apply()
        places.append([copy.data_ptr() for _, copy in rollback._copies])
        rollback.commit()
    return places[0] == places[1]


def after_a_spike(spike: float, inner: str = "adam", steps: int = 20) -> dict[str, float]:
    """One step in place, undone, after calm steps; how far it is from what was before.

    Returns:
        The largest difference of a main parameter, in units of the learning rate, and of a moment
        relative to the largest of its tensor.
    """
    trainee = Trainee("bf16", "plain", inner)
    for iteration in range(steps):
        trainee.set_gradients(iteration, CALM)
        trainee.optimizer.step()
    trainee.set_gradients(steps, CALM * spike)
    trainee.optimizer.prepare_grads()
    before = trainee.everything()
    rollback = make_rollback("inplace", trainee.optimizer)
    rollback.apply()
    assert differences(trainee.everything(), before, "main"), "nothing was stepped"
    rollback.undo(publish=True)
    after = trainee.everything()
    assert not differences(after, before, "group", "gradient")

    def furthest(kind: str) -> float:
        off = 0.0
        for name, value in before.items():
            if name.split()[0] == kind and value.dim():
                unit = 1e-2 if kind == "main" else value.abs().max().item()
                off = max(off, (after[name] - value).abs().max().item() / unit)
        return off

    return {"main": furthest("main"), "moments": furthest("state")}


def spike_is_refused(spike: float, inner: str = "adam") -> str:
    """What is said after such a spike."""
    with pytest.raises(RuntimeError) as caught:
        after_a_spike(spike, inner)
    return str(caught.value)
