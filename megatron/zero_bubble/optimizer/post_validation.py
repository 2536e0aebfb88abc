"""Optimizer post-validation (paper, section 4): stages step first and check afterwards.

A stage tells the next one what it and the stages before it know of the gradients. If nothing speaks
against a plain step so far, it takes one that can be undone, and runs forwards of the next batch
on the stepped parameters. The last stage knows everything first, and the result travels back. Then
the step becomes final, or is undone and done as a synchronous step would have been.

All of that happens within Megatron's ``optimizer.step()``, so that the rest of the training loop
sees nothing but a synchronous step.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.zero_bubble.optimizer.adaptive import Calm
from megatron.zero_bubble.optimizer.exchange import Exchange
from megatron.zero_bubble.optimizer.model_parameters import (
    steppable_members,
    write_model_parameters,
)
from megatron.zero_bubble.optimizer.ready import clip, prepare_gradients, update_loss_scale
from megatron.zero_bubble.optimizer.rollback import Rollback, make_rollback
from megatron.zero_bubble.optimizer.statistics import (
    Decision,
    Layout,
    Norm,
    Verdict,
    clips,
    decide,
    not_finite,
    own_square,
)
from megatron.zero_bubble.runtime.run_ahead import RunAheadFailed
from megatron.zero_bubble.runtime.session import Session

__all__ = ["PostValidation", "Settings", "StepRecord", "Stepped"]

logger = logging.getLogger(__name__)

_RUN_AHEAD = "run ahead"

type Stepped = tuple[bool, Norm | None, Any]
"""What Megatron's ``optimizer.step()`` returns: success, gradient norm, zeros in gradients."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the flags say."""

    rollback: str = "deferred"
    on_host: bool = False
    window: int = 20
    threshold: float = 0.5
    wait_limit: float = 600.0


@dataclass(slots=True)
class StepRecord:
    """What one step did on this stage, for those who watch. Host times in ns."""

    iteration: int
    """Counted from 1."""
    stage: int
    optimistic: bool = False
    """Whether the stage stepped before it knew the result."""
    verdict: Verdict = Verdict.STEP
    events: list[tuple[str, int, int]] = field(default_factory=list)
    """(what, begin, end), in order."""

    def parts(self) -> list[tuple[str, int, int]]:
        """Events that do nothing but this step."""
        return [one for one in self.events if one[0] != _RUN_AHEAD]

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self.events.append((what, begin, time.perf_counter_ns()))


class PostValidation:
    """Takes the place of ``optimizer.step()``.

    Args:
        session: runs the batches.
        settings: the flags.
        iteration: the number of the present iteration, counted from 1.
        may_run_into_the_next: whether the present iteration may.
        wants_to_stop: whether this rank wants the job to end after this iteration.
    """

    def __init__(
        self,
        session: Session,
        settings: Settings,
        *,
        iteration: Callable[[], int],
        may_run_into_the_next: Callable[[], bool],
        wants_to_stop: Callable[[], bool],
    ) -> None:
        self.session, self.settings = session, settings
        self._iteration = iteration
        self._may_run_into_the_next, self._wants_to_stop = may_run_into_the_next, wants_to_stop
        self.counts: Counter[str] = Counter()
        """Steps so far, the same on all ranks: ``committed``, ``clipped`` and ``skipped`` are those
        validated afterwards, ``rolled_back`` those of them that a stage had taken and undid,
        ``synchronous`` the others; ``mode_changes`` between the two for reasons of calm."""
        self.listeners: list[Callable[[StepRecord], None]] = []
        """Called after every step."""
        self.alone = False
        """Whether the last step needed no collective over stages, so that none is needed for its
        result either: all ranks know it."""
        self.stop = False
        """Whether a rank wanted to stop when the last step was taken."""
        self.last: StepRecord | None = None
        """What the last step did."""
        self._calm = Calm(settings.window, settings.threshold)
        self._stepped_once = False
        self._link: _Link | None = None
        self._rollback: Rollback | None = None
        self._checks = _GradientChecks()
        session.ahead.enabled = True
        session.preparations.append(self._checks.take_over)

    def step(self, optimizer: Any, synchronous: Callable[[Any], Stepped]) -> Stepped:
        """Megatron's step, or the same without waiting for later stages.

        Raises:
            RuntimeError: a gradient is not finite and there is no loss scale; on all ranks.
            PipelineError: another stage is gone or stuck.
        """
        if self._link is None:
            self._link = self._connect(optimizer)
        record = StepRecord(self._iteration(), self._link.exchange.stage)
        if self._stepped_once and self._calm.is_calm and self._runs_into_the_next():
            stepped = self._validated(self._link, record)
        else:
            stepped = self._synchronous(optimizer, synchronous, record)
        self._stepped_once |= stepped[0]
        # Not while a loss scale is still being looked for: that ends by itself.
        if self._stepped_once and self._calm.see(record.verdict is not Verdict.STEP):
            self.counts["mode_changes"] += 1
            if record.stage == self._link.exchange.last:
                self._tell_mode()
        self.last = record
        for listener in self.listeners:
            listener(record)
        return stepped

    def _runs_into_the_next(self) -> bool:
        attendant = self.session.attendant
        return self._may_run_into_the_next() and (attendant is None or attendant.lets_run_ahead())

    def _synchronous(
        self, optimizer: Any, synchronous: Callable[[Any], Stepped], record: StepRecord
    ) -> Stepped:
        self.alone = self.stop = False
        self.counts["synchronous"] += 1
        with record.during("synchronous step"):
            success, norm, zeros = synchronous(optimizer)
        if norm is None:
            if self._checks.on:
                raise not_finite(record.iteration, None, {})
            record.verdict = Verdict.SKIP
        elif not success:
            record.verdict = Verdict.TOO_LARGE
        elif clips(optimizer.config.clip_grad, norm):
            record.verdict = Verdict.CLIP
        else:
            record.verdict = Verdict.STEP
        return success, norm, zeros

    def _validated(self, link: _Link, record: StepRecord) -> Stepped:
        exchange = link.exchange
        self.alone = True
        exchange.finish()
        with record.during("statistics"):
            exchange.gather(link.own_row(self._wants_to_stop()))
        with record.during("wait for earlier stages"):
            exchange.receive_from_before()
        exchange.send_on()
        exchange.expect_result()
        failure = None
        if link.goes(exchange.stage):
            record.optimistic = True
            failure = self._ahead_of_the_result(link, record)
        try:
            with record.during("wait for later stages"):
                exchange.result()
        except BaseException as error:
            self._take_back(link, record)
            raise error from failure
        decision = link.decide(exchange.last)
        record.verdict, self.stop = decision.verdict, decision.stop
        stepped = self._finish(link, decision, record)
        if failure is not None:
            self._throw_away(link)
            if decision.verdict is Verdict.STEP or not isinstance(failure, Exception):
                # Where a synchronous run would raise it: when the forwards are asked for.
                self.session.ahead.failure = failure
        return stepped

    def _ahead_of_the_result(self, link: _Link, record: StepRecord) -> BaseException | None:
        """Step so that it can be undone, and run ahead. Returns what a pass raised, if one did."""
        if self._rollback is None:
            settings = self.settings
            self._rollback = make_rollback(
                settings.rollback, link.optimizer, on_host=settings.on_host
            )
        try:
            with record.during("optimistic step"):
                self._rollback.apply()
            with record.during(_RUN_AHEAD):
                self.session.begin_next()
                self.session.ahead.run()
        except RunAheadFailed as failed:
            cause = failed.__cause__
            assert cause is not None
            if self.session.forwards_need_others:
                # Other ranks of this stage are stuck in the same forward, and with them the result.
                self._take_back(link, record)
                raise cause from None
            logger.error("a pass that ran ahead raised", exc_info=cause)
            # The protocol goes on, so that the step ends as it would have.
            return cause
        except BaseException:
            self._take_back(link, record)
            raise
        return None

    def _take_back(self, link: _Link, record: StepRecord) -> None:
        """Leave this rank as it was before the step, as far as that needs nobody else.

        Parameters that a distributed optimizer gathered from other ranks stay as gathered, unless
        forwards gather them anyway (--overlap-param-gather).
        """
        self.session.ahead.discard(0)
        if record.optimistic and self._rollback is not None:
            try:
                self._rollback.undo(publish=False)
                write_model_parameters(steppable_members(link.optimizer))
            except Exception:  # what led here says more
                logger.exception("the optimistic step could not be undone on this rank")

    def _throw_away(self, link: _Link) -> None:
        """All stages throw away what has run ahead; some may not have run at all."""
        ran = 0
        while link.goes(ran):
            ran += 1
        self.session.ahead.discard(ran)

    def _finish(self, link: _Link, decision: Decision, record: StepRecord) -> Stepped:
        """Make the step what the result says."""
        optimizer, verdict = link.optimizer, decision.verdict
        scale = optimizer.get_loss_scale().clone()
        if not record.optimistic:
            # Nothing has run, but earlier stages may have sent what they ran ahead.
            self.session.begin_next()
        elif self._rollback is not None:
            with record.during("commit" if verdict is Verdict.STEP else "undo"):
                if verdict is Verdict.STEP:
                    self._rollback.commit()
                else:
                    self._rollback.undo(publish=verdict is not Verdict.CLIP)
        if verdict is Verdict.NOT_FINITE:
            self._throw_away(link)
            # Others are to end by this error too, not by the loss of this rank.
            self.session.drain()
            link.exchange.finish()
            raise not_finite(record.iteration, decision.norm, link.squares())
        update_loss_scale(optimizer, decision.found_inf)
        if verdict is not Verdict.STEP or decision.stop or self._experts_need(optimizer, scale):
            self._throw_away(link)
        if verdict is Verdict.CLIP and decision.norm is not None:
            clip(optimizer, decision.norm)
        if verdict is Verdict.CLIP or (verdict is Verdict.STEP and not record.optimistic):
            with record.during("plain step"):
                optimizer.step_with_ready_grads()
        self._count(link, verdict)
        optimizer.grad_norms_by_group = {}
        return verdict in (Verdict.STEP, Verdict.CLIP), decision.norm, None

    def _experts_need(self, optimizer: Any, scale: torch.Tensor) -> bool:
        """Whether forwards must be repeated for a new loss scale: auxiliary losses contain it."""
        return self.session.has_experts and not torch.equal(scale, optimizer.get_loss_scale())

    def _count(self, link: _Link, verdict: Verdict) -> None:
        names = {Verdict.STEP: "committed", Verdict.CLIP: "clipped"}
        self.counts[names.get(verdict, "skipped")] += 1
        if verdict is not Verdict.STEP and link.goes(0):
            self.counts["rolled_back"] += 1

    def _tell_mode(self) -> None:
        share = f"{100 * self._calm.disturbed:.0f}% of the last {self.settings.window} steps"
        if self._calm.is_calm:
            logger.info("%s were clipped or skipped: steps are validated afterwards again", share)
        else:
            logger.info(
                "%s were clipped or skipped, more than --post-validation-threshold %g: steps are "
                "synchronous until it is that or less",
                share,
                self.settings.threshold,
            )

    def _connect(self, optimizer: Any) -> _Link:
        layout = Layout.of(optimizer)
        stage, ranks = self.session.pipeline()
        exchange = Exchange(
            stage=stage,
            ranks=ranks,
            width=layout.width,
            device=torch.empty(0, device="cuda").device,
            wait_limit=self.settings.wait_limit,
        )
        return _Link(optimizer, layout, exchange, self._checks)


@dataclass(frozen=True, slots=True)
class _Link:
    """An optimizer, and what its ranks know of each other's gradients."""

    optimizer: Any
    layout: Layout
    exchange: Exchange
    checks: _GradientChecks

    def own_row(self, stop: bool) -> list[float]:
        """This rank's row; its gradients are ready then."""
        infs = prepare_gradients(self.optimizer)
        subs = self.optimizer.chained_optimizers
        squares = [own_square([subs[index] for index in part]) for part in self.layout.parts]
        return self.layout.row([one.item() for one in squares], infs, stop)

    def decide(self, stage: int) -> Decision:
        """What the stages up to this one say."""
        exchange = self.exchange
        known = exchange.known(stage)
        return decide(self.optimizer, self.layout, exchange.rows, known, strict=self.checks.on)

    def goes(self, stage: int) -> bool:
        """Whether a stage steps optimistically; known to it, and to all once they know all."""
        if stage == self.exchange.last:
            return False
        so_far = self.decide(stage)
        return so_far.verdict is Verdict.STEP and not so_far.stop

    def squares(self) -> dict[int, float]:
        """Of each rank, the sum of its squared norms."""
        return dict(enumerate(self.exchange.rows[:, : len(self.layout.parts)].sum(1).tolist()))


class _GradientChecks:
    """Megatron's look for NaN and Inf in gradients, bucket by bucket, before they are reduced.

    It ends the one rank that finds it, before others know. The norm shows the same, to all ranks at
    once. Megatron looks, unless told not to, in all runs without a dynamic loss scale.
    """

    def __init__(self) -> None:
        self.on = False
        """Whether Megatron would have looked."""

    def take_over(self, models: Sequence[torch.nn.Module]) -> None:
        for model in models:
            ddp_config: Any = getattr(model, "ddp_config", None)
            if getattr(ddp_config, "check_for_nan_in_grad", False):
                self.on = True
                ddp_config.check_for_nan_in_grad = False
