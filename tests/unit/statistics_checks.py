"""What test_statistics.py checks of norms, in a process in CPU mode."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.training
import torch
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron.zero_bubble.optimizer.statistics import Layout, folded_norm, own_square
from megatron.zero_bubble.patches import optimizer as patches
from tests.unit.rollback_models import SPIKE, Trainee

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
    return _giving(lambda: list(gradients))


def _giving(gradients: Callable[[], list[torch.Tensor]], **attributes: Any) -> Any:
    """A sub-optimizer with these gradients, under the names that Megatron has had for them."""
    names = ("get_grads_for_grad_norm", "get_main_grads_for_grad_norm")
    return SimpleNamespace(**dict.fromkeys(names, gradients), **attributes)


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
        mock.patch.object(megatron.training, "get_args", return_value=args),
    ):
        return patches._canonical(never)(optimizer)


def outside_the_training_loop() -> None:
    """There are no arguments there that could ask for another norm than Megatron's."""
    assert megatron.training.global_vars._GLOBAL_ARGS is None
    original = mock.Mock(return_value=7.0)
    assert patches._canonical(original)("optimizer") == 7.0
    original.assert_called_once_with("optimizer")


def order_of_ranks() -> None:
    """The same bits however a group, or a backend, counts its ranks."""
    # The two last ones only count if they are added first, and then fp32 rounds up.
    squares = torch.tensor([1.0, 2.0**-24, 2.0**-53, 2.0**-53])
    ranks = len(squares)
    expected = folded_norm([squares.tolist()])
    seen = set()
    for order in itertools.permutations(range(ranks)):
        total = reduce(operator.add, (squares[rank].double() for rank in order))
        seen.add(total.float().item())
        with _group_of(order, squares) as group:
            optimizer = chain([], group=group)
            assert _canonical_norm(optimizer) == expected, order
            layout = Layout.of(optimizer)
        assert layout.members == (tuple(range(ranks)),)
        rows = torch.tensor([layout.row([one], [False], False) for one in squares.tolist()])
        assert folded_norm([layout.squares(0, rows.double(), order)]) == expected
    assert len(seen) > 1, "the order makes no difference for these numbers"


@contextmanager
def _group_of(order: Sequence[int], squares: torch.Tensor) -> Iterator[Any]:
    """A group that counts its ranks in this order, and whose ranks send these."""

    def gather(into: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        into.copy_(squares[list(order)])

    with (
        mock.patch.object(torch.distributed, "get_process_group_ranks", return_value=list(order)),
        mock.patch.object(torch.distributed, "all_gather_into_tensor", gather),
    ):
        yield SimpleNamespace(size=lambda: len(order))


def chain(
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
            _giving(
                lambda one=one: one,  # type: ignore[misc]
                config=config,
                grad_scaler=object() if scaler else None,
                get_grad_stats_parallel_group=lambda: group,
            )
            for one in gradients
        ],
    )


def norm_of_megatrons_chains(kind: str) -> None:
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
            with tail(kind):
                ours, expected = _canonical_norm(trainee.optimizer), theirs(trainee.optimizer)
            assert _same(ours, expected), (sharding, experts, ours, expected)
