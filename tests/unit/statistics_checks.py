"""What test_statistics.py checks, in a process in CPU mode: rows, norms, and what they decide."""

from __future__ import annotations

import inspect
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.training
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
    folded_norm,
    own_square,
)
from megatron.zero_bubble.patches import optimizer as patches
from tests.unit.rollback_models import CALM, CLIP, SPIKE, Trainee, differences

INF, NAN = float("inf"), float("nan")
UNIT = 2.0**-24  # half the distance of two neighbours in fp32, relative


@contextmanager
def tail(kind: str) -> Iterator[None]:
    """`device`: as with Transformer Engine, which scales by a tensor; `host`: as without it."""
    if kind == "host":
        assert clip_grads.multi_tensor_scale_tensor_impl is None
        yield
        return

    def scale(chunk: int, overflow: Any, lists: Any, coefficient: torch.Tensor) -> None:
        for source, target in zip(*lists, strict=True):
            target.copy_(source * coefficient)

    with mock.patch.object(clip_grads, "multi_tensor_scale_tensor_impl", scale):
        yield


def _member(gradients: Sequence[torch.Tensor]) -> Any:
    return SimpleNamespace(get_grads_for_grad_norm=lambda: list(gradients))


def _random_gradients(draw: random.Random) -> list[torch.Tensor]:
    size = 10.0 ** draw.uniform(-25, 15)
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    return [
        torch.randn(draw.choice([(1,), (7,), (33, 5), (0,), (100,)]), generator=generator) * size
        for _ in range(draw.randrange(6))
    ]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) != isinstance(theirs, torch.Tensor):
        return False
    if isinstance(ours, torch.Tensor):
        alike = (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        return alike and torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    return bool(ours == theirs) or (math.isnan(ours) and math.isnan(theirs))


def norm_of_one_rank(kind: str) -> None:
    """Megatron's own norm in every bit, its type included."""
    draw = random.Random(1)
    cases = [_random_gradients(draw) for _ in range(200)]
    cases += [[torch.tensor([1.0, value])] for value in (INF, -INF, NAN, 0.0, 3e38)]
    with tail(kind):
        for gradients in cases:
            theirs = clip_grads.get_grad_norm_fp32(gradients)
            ours = folded_norm([[own_square([_member(gradients)]).item()]])
            assert _same(ours, theirs), (ours, theirs)
            split = [_member(gradients[:2]), _member(gradients[2:])]  # of one part
            assert _same(folded_norm([[own_square(split).item()]]), theirs)


def norm_of_many_ranks(kind: str, ranks: int) -> None:
    """Megatron's, but for the roundings of its sum in fp32, which has any order of addition."""
    draw = random.Random(ranks)
    for _ in range(100):
        squares = [own_square([_member(_random_gradients(draw))]).item() for _ in range(ranks)]
        if draw.random() < 0.5:  # of one size, so that all of them count
            squares = [draw.uniform(0.1, 1.0) for _ in range(ranks)]
            squares = torch.tensor(squares, dtype=torch.float32).tolist()
        with tail(kind):
            ours = folded_norm([squares])
            theirs = _by_all_reduce(squares, draw)
        if ranks == 2:  # one addition, rounded once
            assert _same(ours, theirs)
            continue
        # n - 1 additions, each rounded, of positive numbers; the root halves the error.
        assert abs(float(ours) - float(theirs)) <= float(theirs) * ranks * UNIT, (ours, theirs)
        exact = torch.tensor([math.fsum(squares)], dtype=torch.float64).float()
        root = exact.item() ** 0.5
        assert abs(float(ours) - root) <= (root * 2 * UNIT if kind == "device" else 0.0)


def _by_all_reduce(squares: list[float], draw: random.Random) -> Any:
    """Megatron's norm, on a rank whose all-reduce adds the others' squares in some order."""

    def all_reduce(total: torch.Tensor, **options: Any) -> None:
        terms = [torch.tensor([one], dtype=torch.float32) for one in squares[1:]] + [total.clone()]
        while len(terms) > 1:
            draw.shuffle(terms)
            terms.append(terms.pop() + terms.pop())
        total.copy_(terms[0])

    def first(*given: Any) -> tuple[torch.Tensor, None]:
        return torch.tensor([squares[0]], dtype=torch.float64).sqrt(), None

    with (
        mock.patch.object(torch.distributed, "all_reduce", all_reduce),
        mock.patch.object(clip_grads, "l2_norm_impl", first),
        # The square of that root must be the given one.
        mock.patch.object(torch.Tensor, "__pow__", lambda one, power: _square(one, squares[0])),
    ):
        return clip_grads.get_grad_norm_fp32([torch.ones(1)])


def _square(root: torch.Tensor, known: float) -> torch.Tensor:
    assert abs(root.item() ** 2 - known) <= 4 * UNIT * known or not math.isfinite(known)
    return torch.tensor([known], dtype=torch.float32)


def _canonical_norm(optimizer: Any) -> Any:
    """What a run with --canonical-grad-norm, and no post-validation, has for its norm."""
    never = mock.Mock(side_effect=AssertionError)
    args = SimpleNamespace(canonical_grad_norm=True)
    with (
        mock.patch.object(patches, "_validations", []),
        mock.patch.object(megatron.training, "get_args", lambda: args),
    ):
        return patches._canonical(never)(optimizer)


def order_of_ranks() -> None:
    """The same bits however a group, or a backend, counts its ranks."""
    # The two last ones only count if they are added first, and then fp32 rounds up.
    squares = torch.tensor([1.0, 2.0**-24, 2.0**-53, 2.0**-53])
    ranks = len(squares)
    expected = folded_norm([squares.tolist()])
    assert expected == 1.0
    seen = set()
    for order in itertools.permutations(range(ranks)):
        total = torch.tensor(sum(squares[rank].item() for rank in order), dtype=torch.float64)
        seen.add(total.float().item())
        with _group_of(order, squares) as group:
            chain = _chain([], group=group)
            assert _canonical_norm(chain) == expected, order
            layout = Layout.of(chain)
        rows = torch.tensor([layout.row([one], [False], False) for one in squares.tolist()])
        assert folded_norm([layout.squares(0, rows.double(), order)]) == expected
    assert len(seen) > 1, "the order makes no difference for these numbers"


@contextmanager
def _group_of(order: Sequence[int], squares: torch.Tensor) -> Iterator[Any]:
    """A group that counts its ranks in this order, and whose ranks send these."""

    def gather(into: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        into.copy_(squares[list(order)])

    with (
        mock.patch.object(torch.distributed, "get_process_group_ranks", lambda group: list(order)),
        mock.patch.object(torch.distributed, "all_gather_into_tensor", gather),
    ):
        yield SimpleNamespace(size=lambda: len(order))


def _chain(
    *gradients: list[torch.Tensor],
    clip_grad: float = 1.0,
    threshold: float = INF,
    scaler: bool = False,
    group: Any = None,
) -> Any:
    """What is read of a ChainedOptimizer, one sub-optimizer for each of these gradients."""
    config = SimpleNamespace(clip_grad=clip_grad, grad_norm_skip_threshold=threshold)
    return SimpleNamespace(
        config=config,
        grads_states_parallel_group_is_shared=lambda: False,
        chained_optimizers=[
            SimpleNamespace(
                config=config,
                grad_scaler=object() if scaler else None,
                get_grads_for_grad_norm=lambda one=one: one,
                get_grad_stats_parallel_group=lambda: group,
            )
            for one in gradients
        ],
    )


def norm_of_megatrons_chains() -> None:
    """One and two sub-optimizers, with a group in common and with groups of their own."""
    theirs = inspect.unwrap(ChainedOptimizer.get_grad_norm)
    for sharding, experts in itertools.product(("plain", "distributed"), (False, True)):
        trainee = Trainee("bf16", sharding, "adam", experts=experts)
        layout = Layout.of(trainee.optimizer)
        members = len(trainee.members)
        assert members == 1 + experts
        separate = experts and sharding == "plain"
        assert len(layout.parts) == (2 if separate else 1)
        assert sorted(itertools.chain(*layout.parts)) == list(range(members))
        assert layout.members == ((0,),) * members
        for iteration in range(3):
            trainee.set_gradients(iteration, SPIKE)
            trainee.optimizer.prepare_grads()
            ours, expected = _canonical_norm(trainee.optimizer), theirs(trainee.optimizer)
            # Two parts: both take the root of a sum of squares of roots.
            slack = 2 * math.ulp(expected) if separate else 0.0
            assert abs(ours - expected) <= slack, (sharding, experts, ours, expected)


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
    "too large": Verdict.TOO_LARGE,
    "inf": Verdict.SKIP,
    "not finite": Verdict.NOT_FINITE,
}


def a_step_in_parts(event: str, precision: str, sharding: str, *, experts: bool) -> None:
    """Row, decision and what follows against Megatron's step of a twin."""
    settings = {"precision": precision, "sharding": sharding, "inner": "adam", "experts": experts}
    ours, twin = Trainee(**settings), Trainee(**settings)
    infinite = event in ("inf", "not finite")
    for trainee in (ours, twin):
        size = {"calm": CALM, "clip": SPIKE, "too large": 100 * SPIKE}.get(event, CALM)
        for member in trainee.members:
            member.config.grad_norm_skip_threshold = 100 * CLIP
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
        slack = 2 * math.ulp(norm) if norm is not None and experts else 0.0
        assert decision.norm == norm or abs(decision.norm - norm) <= slack
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
    optimizer = _chain([], [], scaler=True)
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
            optimizer = _chain(
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
