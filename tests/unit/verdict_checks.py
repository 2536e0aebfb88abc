"""What test_statistics.py checks of verdicts, in a process in CPU mode."""

from __future__ import annotations

import inspect
import math
import random
from typing import Any
from unittest import mock

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.zero_bubble.optimizer.ready import clip, prepare_gradients, update_loss_scale
from megatron.zero_bubble.optimizer.statistics import (
    Decision,
    Layout,
    Verdict,
    clips,
    decide,
    own_square,
)
from tests.unit.rollback_models import CALM, CLIP, SPIKE, Trainee, differences
from tests.unit.statistics_checks import INF, NAN, chain, tail


def what_is_clipped(kind: str) -> None:
    """`clips` against the gradients that Megatron has scaled."""
    draw = random.Random(7)
    limits = [1.0, 0.37, 1e-8, 25.0]
    cases = [(limit, norm) for limit in limits for norm in (0.0, INF, 1e-30, 3e38)]
    for limit in limits:
        edge = limit - 1e-6
        for _ in range(40):
            cases.append(
                (limit, abs(edge * (1 + draw.uniform(-4, 4) * 10.0 ** -draw.randint(1, 9))))
            )
        around = torch.tensor(abs(edge))
        for direction in (0.0, INF):
            one = around.clone()
            for _ in range(6):
                cases.append((limit, one.item()))
                one = torch.nextafter(one, torch.tensor(direction))
    answers = set()
    with tail(kind):
        for limit, norm in cases:
            given = torch.tensor([norm], dtype=torch.float32) if kind == "device" else norm
            scaled, called = _scaled_by_megatron(limit, given)
            answer = clips(limit, given)
            answers.add(answer)
            assert answer or not scaled, (limit, norm)
            if kind == "host":  # a coefficient that fp32 rounds to 1 changes no gradient
                assert answer == called, (limit, norm)
            else:
                assert answer == scaled, (limit, norm)
        assert not clips(0.0, 1e9)
        if kind == "host":
            scaled, called = _scaled_by_megatron(1.0, NAN)
            assert (clips(1.0, NAN), scaled, called) == (False, False, False)
    assert answers == {True, False}


def _scaled_by_megatron(limit: float, norm: Any) -> tuple[bool, bool]:
    """Whether gradients have changed, and whether they were multiplied at all."""
    # 1 + 2**-23: a product with any smaller factor than 1 in fp32 is another number.
    before = torch.tensor([1.0, -(1.0 + 2.0**-23), 3e38, 1e-30])
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = before.clone()
    multiplied = mock.Mock(side_effect=clip_grads.multi_tensor_scale_impl)
    with mock.patch.object(clip_grads, "multi_tensor_scale_impl", multiplied):
        clip_grads.clip_grad_by_total_norm_fp32([parameter], max_norm=limit, total_norm=norm)
    return not torch.equal(parameter.grad, before), multiplied.called


EVENTS = {
    "calm": Verdict.STEP,
    "clip": Verdict.CLIP,
    "overflow": Verdict.CLIP,
    "too large": Verdict.TOO_LARGE,
    "inf": Verdict.SKIP,
    "not finite": Verdict.NOT_FINITE,
}


def a_step_in_parts(event: str, precision: str, sharding: str, *, experts: bool) -> None:
    """Row, decision and what follows against Megatron's step of a twin."""
    ours, twin = (Trainee(precision, sharding, "adam", experts=experts) for _ in range(2))
    infinite = event in ("inf", "not finite")
    for trainee in (ours, twin):
        # The square of the norm in "overflow" is infinite in fp32, and no gradient is.
        sizes = {"clip": SPIKE, "too large": 100 * SPIKE, "overflow": 1e25}
        size = sizes.get(event, CALM)
        for member in trainee.members:
            member.config.grad_norm_skip_threshold = INF if event == "overflow" else 100 * CLIP
        trainee.set_gradients(0, size, infinite=infinite)
    success, norm, _ = inspect.unwrap(ChainedOptimizer.step)(twin.optimizer)
    with torch.no_grad():
        decision = _decision_of_one_rank(ours.optimizer)
        assert decision.verdict is EVENTS[event]
        assert not decision.stop
        if decision.verdict is Verdict.NOT_FINITE:
            # Megatron takes it for a norm that is too large, or steps.
            assert precision != "fp16"
            assert decision.norm is not None
            assert not math.isfinite(decision.norm)
            return
        assert (decision.verdict in (Verdict.STEP, Verdict.CLIP)) == success
        assert decision.norm == norm
        if experts and precision == "fp16" and event == "inf":
            # Of two loss scales, that of the narrow layers alone goes down.
            assert sorted(decision.found_inf) == [False, True]
        update_loss_scale(ours.optimizer, decision.found_inf)
        if decision.verdict is Verdict.CLIP:
            clip(ours.optimizer, decision.norm)
        if success:
            ours.optimizer.step_with_ready_grads()
    kinds = ("model", "main", "state", "group", "loss")
    assert not differences(ours.everything(), twin.everything(), *kinds)
    scales = [[one.get_loss_scale().item() for one in t.members] for t in (ours, twin)]
    assert scales[0] == scales[1]


def _decision_of_one_rank(optimizer: Any) -> Decision:
    layout = Layout.of(optimizer)
    infs = prepare_gradients(optimizer)
    subs = optimizer.chained_optimizers
    squares = [own_square([subs[index] for index in part]).item() for part in layout.parts]
    row = layout.row(squares, infs, False)
    assert len(row) == layout.width
    return decide(optimizer, layout, torch.tensor([row], dtype=torch.float64), [0])


def ranks_that_count() -> None:
    """A row's numbers are read from the ranks of their own group; a wish to stop from all."""
    layout = Layout(parts=((0,), (1,)), members=((0, 2), (1, 2, 3)))
    optimizer = chain([], [], scaler=True)
    rows = torch.tensor(
        # norms of the parts, found_inf of the sub-optimizers, stop
        [[1.0, 50.0, 0, 1, 0], [50.0, 4.0, 1, 0, 0], [3.0, 5.0, 0, 0, 1], [50.0, 7.0, 1, 0, 0]],
        dtype=torch.float64,
    )
    whole = decide(optimizer, layout, rows, range(4))
    assert whole.found_inf == (False, False)
    assert whole.norm == math.sqrt(1.0 + 3.0 + 4.0 + 5.0 + 7.0)
    assert whole.stop
    assert whole.verdict is Verdict.CLIP
    part = decide(optimizer, layout, rows, [1, 0])
    assert (part.norm, part.stop) == (math.sqrt(1.0 + 4.0), False)
    rows[3, 3] = 1
    assert decide(optimizer, layout, rows, range(4)).found_inf == (False, True)
    skipped = decide(optimizer, layout, rows, range(4))
    assert (skipped.verdict, skipped.norm) == (Verdict.SKIP, None)
    assert decide(optimizer, layout, rows, range(3)).found_inf == (False, False)


def later_rows_never_make_it_a_step(kind: str, cases: int = 1500) -> Verdict | dict[str, int]:
    """Whatever speaks against a step in the first stages' rows speaks against it for ever.

    Rows are such as ranks send: with a loss scale, what is not a number was found to be so.
    Returns how often each verdict was the last one, for all who must have been there.
    """
    draw = random.Random(11)
    seen: dict[str, int] = {}
    with tail(kind):
        for _ in range(cases):
            scaler = draw.random() < 0.5
            optimizer = chain(
                [], [],
                clip_grad=draw.choice([0.0, 1.0]),
                threshold=draw.choice([INF, 3.0]),
                scaler=scaler,
            )  # fmt: skip
            stages, a_stage = draw.randint(1, 5), draw.randint(1, 3)
            ranks = list(range(stages * a_stage))
            layout = draw.choice(
                [
                    Layout(((0, 1),), (tuple(ranks),) * 2),
                    Layout(((0,), (1,)), (tuple(ranks[::2]), tuple(ranks))),
                ]
            )
            rows = [_random_row(draw, layout, len(ranks), scaler=scaler) for _ in ranks]
            table = torch.tensor(rows, dtype=torch.float64)
            if draw.random() < 0.5:
                draw.shuffle(ranks)  # stages in any order of ranks
            verdicts, stops = [], []
            for stage in range(stages):
                known = ranks[: (stage + 1) * a_stage]
                decision = decide(optimizer, layout, table, known)
                verdicts.append(decision.verdict)
                stops.append(decision.stop)
            against = [one is not Verdict.STEP for one in verdicts]
            assert against == sorted(against), (verdicts, table)
            assert stops == sorted(stops)
            last = verdicts[-1].value
            seen[last] = seen.get(last, 0) + 1
    return seen


def _random_row(draw: random.Random, layout: Layout, ranks: int, *, scaler: bool) -> list[float]:
    """Norms mostly near the limit once they are added, at times exactly on both sides of it."""
    values = [
        draw.choice([0.0, draw.uniform(0, 2 / ranks), 10.0 ** draw.uniform(-12, 0) / ranks])
        for _ in layout.parts
    ]
    if draw.random() < 0.03:
        values[draw.randrange(len(values))] = draw.choice([INF, NAN, 3e38, 100.0])
    values = torch.tensor(values, dtype=torch.float32).tolist()
    infs = [scaler and draw.random() < 0.02 for _ in layout.members]
    if scaler and any(map(math.isnan, values)):
        infs = [True for _ in layout.members]
    return layout.row(values, infs, draw.random() < 0.02)
