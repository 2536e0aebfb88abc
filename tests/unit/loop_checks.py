"""What test_ordinary.py and test_loop_patches.py check, in a process in CPU mode."""

from __future__ import annotations

import importlib
import inspect
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import megatron.training
import pytest
import torch
from megatron.core import num_microbatches_calculator as microbatches
from megatron.core.timers import Timer
from megatron.training import global_vars, training
from megatron.training.dist_signal_handler import DistributedSignalHandler

from megatron.zero_bubble import compat
from megatron.zero_bubble.optimizer.ordinary import runs_into_the_next, wants_to_stop
from megatron.zero_bubble.patches import optimizer as optimizer_patches
from megatron.zero_bubble.patches import schedule as schedule_patches
from megatron.zero_bubble.patches import training_loop as loop_patches

MICRO_BATCH_SIZE, DATA_PARALLEL = 2, 3


def _arguments(**changes: Any) -> Any:
    """Of Megatron, in the iteration that is the fifth, which nothing follows but the sixth."""
    fine: dict[str, Any] = {
        "curr_iteration": 4,
        "train_iters": 100,
        "eval_interval": None,
        "do_valid": True,
        "start_eval_at_iter": None,
        "save": None,
        "save_interval": None,
        "non_persistent_save_interval": None,
        "exit_interval": None,
        "phase_transition_iterations": None,
        "check_weight_hash_across_dp_replicas_interval": None,
        "adlr_autoresume": False,
        "adlr_autoresume_interval": 1000,
        "gpu_sniff_test_interval": None,
        "timing_log_level": 0,
        "log_interval": 1,
        "iterations_to_skip": [],
        "save_activations_interval": None,
        "save_tokens_per_expert_interval": None,
        "save_dgrads_interval": None,
        "save_wgrads_interval": None,
        "save_params_interval": None,
        "consumed_train_samples": 0,
        "exit_signal_handler": False,
        "exit_duration_in_mins": None,
    }
    assert changes.keys() <= fine.keys()
    return SimpleNamespace(**fine | changes)


@contextmanager
def _calculator(schedule: str | None = None) -> Iterator[Any]:
    """Megatron's calculator of the number of microbatches, for as long as a test needs it."""
    name = "_GLOBAL_NUM_MICROBATCHES_CALCULATOR"
    growing = {} if schedule is None else {"step_batch_size_schedule": schedule}
    with mock.patch.object(microbatches, name, None):
        microbatches.init_num_microbatches_calculator(
            1,
            rampup_batch_size=None,
            global_batch_size=MICRO_BATCH_SIZE * DATA_PARALLEL * 4,
            micro_batch_size=MICRO_BATCH_SIZE,
            data_parallel_size=DATA_PARALLEL,
            **growing,
        )
        yield getattr(microbatches, name)


def runs(changes: dict[str, Any], schedule: str | None = None) -> bool:
    """Whether the fifth iteration of a job with these arguments runs into the sixth."""
    with _calculator(schedule):
        return runs_into_the_next(_arguments(**changes))


def runs_without_newer_arguments() -> bool:
    """Without the arguments that older versions of Megatron have not."""
    args = _arguments()
    for name in (
        "start_eval_at_iter", "do_valid", "non_persistent_save_interval",
        "phase_transition_iterations", "check_weight_hash_across_dp_replicas_interval",
        "gpu_sniff_test_interval", "iterations_to_skip", "save_activations_interval",
        "save_tokens_per_expert_interval", "save_dgrads_interval", "save_wgrads_interval",
        "save_params_interval",
    ):  # fmt: skip
        delattr(args, name)
    with _calculator():
        return runs_into_the_next(args)


def iterations_before_another_batch_size(schedule: str, iterations: int) -> tuple[list[int], ...]:
    """(those that do not run into the next, those after which Megatron's update says so)."""
    ours, megatrons = [], []
    with _calculator(schedule) as calculator:
        args = _arguments()
        for iteration in range(iterations):
            args.curr_iteration = iteration
            before = dict(vars(calculator))
            if not runs_into_the_next(args):
                ours.append(iteration)
            assert vars(calculator) == before
            assert microbatches._GLOBAL_NUM_MICROBATCHES_CALCULATOR is calculator
            # As the loop counts, and asks at the head of the next iteration.
            number = microbatches.get_num_microbatches()
            args.consumed_train_samples += DATA_PARALLEL * MICRO_BATCH_SIZE * number
            microbatches.update_num_microbatches(args.consumed_train_samples, False, False)
            if microbatches.get_num_microbatches() != number:
                megatrons.append(iteration)
    return ours, megatrons


def signals() -> list[bool]:
    """Whether the rank wants to stop: without the flag, before a signal, after it."""
    answers = []
    with (
        DistributedSignalHandler(signal.SIGUSR1) as handler,
        mock.patch.object(global_vars, "_GLOBAL_SIGNAL_HANDLER", handler),
        mock.patch.object(handler, "signals_received", side_effect=AssertionError("asks all")),
    ):
        answers.append(wants_to_stop(_arguments(exit_signal_handler=True)))
        os.kill(os.getpid(), signal.SIGUSR1)
        answers.append(wants_to_stop(_arguments(exit_signal_handler=False)))
        answers.append(wants_to_stop(_arguments(exit_signal_handler=True)))
    return answers


def time_used_up(minutes: float, limit: float | None) -> bool:
    with mock.patch.object(training, "_TRAIN_START_TIME", time.time() - 60 * minutes):
        return wants_to_stop(_arguments(exit_duration_in_mins=limit))


@contextmanager
def _validation(alone: bool | None, stop: bool = False) -> Iterator[None]:
    """Post-validation after a step that was validated or not; None where it is off."""
    validations = [] if alone is None else [SimpleNamespace(alone=alone, stop=stop, counts={})]
    with mock.patch.object(optimizer_patches, "_validations", validations):
        yield


def without_asking() -> None:
    """A validated step's result is taken for that of all ranks; any other is asked for."""
    original = mock.Mock(return_value=False)
    patched = loop_patches._without_asking(original)
    for value in (True, False):
        with _validation(alone=True):
            assert patched(value, group="mp") is value
    original.assert_not_called()
    for alone in (False, None):
        with _validation(alone):
            assert patched(True, group="mp") is False
        original.assert_called_with(True, group="mp")


def without_reducing() -> None:
    """What the original makes of a rank's value, where all ranks have the same."""
    common_utils = importlib.import_module(compat.training_utils())
    megatrons = inspect.unwrap(common_utils.reduce_max_stat_across_model_parallel_group)
    draw = random.Random(5)
    values = [None, 0, 3, 1e-5, 0.1, 1 / 3, 1e-45, 1e-46, 1e39, float("inf"), 2.0**24 + 1]
    values += [torch.tensor([0.7]), torch.tensor(0.7), 16777217]
    values += [10.0 ** draw.uniform(-40, 30) for _ in range(100)]
    original = mock.Mock(side_effect=megatrons)
    patched = loop_patches._without_reducing(original)
    with _validation(alone=True):
        for value in values:
            ours, theirs = patched(value), megatrons(value)
            assert ours == theirs, value
            assert type(ours) is type(theirs)
        assert patched(float("nan")) != patched(float("nan"))
    original.assert_not_called()
    for count, alone in enumerate((False, None), 1):
        with _validation(alone):
            assert patched(1 / 3) == megatrons(1 / 3)
        assert original.call_count == count


def without_barrier() -> None:
    """A timer that is asked for with a barrier measures the same, and waits for nobody."""
    patched = loop_patches._without_barrier(inspect.unwrap(Timer.elapsed))
    for alone, barriers in ((True, 0), (False, 2), (None, 2)):
        timer = Timer("interval-time")
        with _validation(alone), mock.patch.object(torch.distributed, "barrier") as barrier:
            timer.start()
            timer._start_time -= 5.0
            assert 5.0 <= patched(timer, reset=False, barrier=True) < 60.0
            assert barrier.call_count == barriers  # to stop, and to start again
            assert timer._started
            assert 5.0 <= patched(timer) < 60.0
            assert timer._elapsed == 0
            assert barrier.call_count == barriers


@contextmanager
def _arguments_of_the_run(args: Any) -> Iterator[None]:
    with mock.patch.object(global_vars, "_GLOBAL_ARGS", args):
        yield


def decided_with_the_step() -> None:
    """Megatron's own decision, which asks all ranks only where the step says that one wants to."""
    decide = loop_patches._decided_with_the_step(
        inspect.unwrap(training.checkpoint_and_decide_exit)
    )
    given = (None, None, None, 5, 0, None, None)
    handler = mock.Mock()
    handler.signals_received.return_value = [True, False]
    # (alone, stop) -> (exits, ranks are asked): with a signal, and with no time left.
    cases = {(True, False): False, (True, True): True, (False, False): True, (None, False): True}
    for (alone, stop), exits in cases.items():
        for changes in ({"exit_signal_handler": True}, {"exit_duration_in_mins": 1}):
            handler.signals_received.reset_mock()
            args = _arguments(**changes)
            before = dict(vars(args))
            with (
                _validation(alone, stop),
                _arguments_of_the_run(args),
                mock.patch.object(global_vars, "_GLOBAL_TIMERS", mock.Mock()),
                mock.patch.object(global_vars, "_GLOBAL_SIGNAL_HANDLER", handler),
                mock.patch.object(training, "_TRAIN_START_TIME", time.time() - 600),
                mock.patch.object(training, "print_datetime"),
                mock.patch.object(torch.distributed, "all_reduce") as all_reduce,
            ):
                assert decide(*given) is exits, (alone, stop, changes)
            asked = handler.signals_received.called or all_reduce.called
            assert asked is exits
            assert dict(vars(args)) == before


def other_reasons_stay() -> None:
    """To save and to exit by the number of the iteration is decided as ever."""
    saved = []
    save: Callable[..., None] = lambda iteration, *rest, **options: saved.append(iteration)  # noqa: E731
    decide = loop_patches._decided_with_the_step(
        inspect.unwrap(training.checkpoint_and_decide_exit)
    )
    args = _arguments(save="somewhere", save_interval=5, exit_interval=10)
    found = []
    with (
        _validation(alone=True),
        _arguments_of_the_run(args),
        mock.patch.object(global_vars, "_GLOBAL_TIMERS", mock.Mock()),
        mock.patch.object(training, "save_checkpoint_and_time", save),
        mock.patch.object(training, "print_datetime"),
    ):
        for iteration in (4, 5, 10):
            found.append(decide(None, None, None, iteration, 0, None, None))
    assert (found, saved) == ([False, False, True], [5, 10])


def an_error_leaves_the_flags() -> None:
    original = mock.Mock(side_effect=OSError("disk"))
    args = _arguments(exit_signal_handler=True, exit_duration_in_mins=7)
    with _validation(alone=True), _arguments_of_the_run(args), pytest.raises(OSError, match="disk"):
        loop_patches._decided_with_the_step(original)(1, key=2)
    original.assert_called_once_with(1, key=2)
    assert (args.exit_signal_handler, args.exit_duration_in_mins) == (True, 7)


def saving_discards_first() -> None:
    calls: list[Any] = []
    ahead = SimpleNamespace(discard=lambda: calls.append("discard"))

    def original(*given: Any, **options: Any) -> str:
        calls.append((given, options))
        return "saved"

    patched = loop_patches._after_discarding(original)
    for sessions, expected in (([SimpleNamespace(ahead=ahead)], ["discard"]), ([], [])):
        calls.clear()
        with mock.patch.object(schedule_patches, "_sessions", sessions):
            assert patched(5, key=6) == "saved"
        assert calls == [*expected, ((5,), {"key": 6})]


def tied_gradients_are_added_after() -> None:
    calls: list[str] = []
    across = SimpleNamespace(add_tied_gradients=lambda: calls.append("added"))
    patched = loop_patches._with_tied_gradients(lambda *given: calls.append("original"))
    for sessions, expected in (
        ([SimpleNamespace(across_stages=across)], ["original", "added"]),
        ([SimpleNamespace(across_stages=None)], ["original"]),
        ([], ["original"]),
    ):
        calls.clear()
        with mock.patch.object(schedule_patches, "_sessions", sessions):
            patched(1, 2)
        assert calls == expected


def counts_in_the_log() -> list[Any]:
    """What the second, the third and the fourth iteration write and print, logging every second
    one and writing every third one."""
    found: list[Any] = []
    counts = Counter(committed=7, clipped=2)
    writer = SimpleNamespace(add_scalar=lambda *given: found.append(given))
    patched = loop_patches._with_counts(lambda *given: "reported")
    validations = [SimpleNamespace(counts=counts)]
    with (
        mock.patch.object(optimizer_patches, "_validations", validations),
        mock.patch.object(megatron.training, "get_tensorboard_writer", return_value=writer),
        mock.patch.object(megatron.training.utils, "print_rank_last", found.append),
    ):
        for iteration in (2, 3, 4):
            args = SimpleNamespace(
                curr_iteration=iteration - 1, log_interval=2, tensorboard_log_interval=3
            )
            with _arguments_of_the_run(args):
                assert patched() == "reported"
            found.append(iteration)
    with _validation(alone=None):
        assert patched() == "reported"
    return found


def steps_are_megatrons_own_without_it() -> None:
    original = mock.Mock(return_value=(True, 1.0, None))
    optimizer = object()
    with _validation(alone=None):
        assert optimizer_patches._validated(original)(optimizer) == (True, 1.0, None)
    original.assert_called_once_with(optimizer)
    norm = mock.Mock(return_value=1.5)
    args = SimpleNamespace(canonical_grad_norm=False, curr_iteration=0)
    with _validation(alone=None), _arguments_of_the_run(args):
        assert optimizer_patches._canonical(norm)(optimizer) == 1.5
    norm.assert_called_once_with(optimizer)


def validated_steps_record_no_gradients() -> None:
    seen: list[Any] = []

    def step(optimizer: Any, synchronous: Any) -> Any:
        seen.append((optimizer, synchronous, torch.is_grad_enabled()))
        return True, 2.0, None

    original = mock.Mock()
    with mock.patch.object(optimizer_patches, "_validations", [SimpleNamespace(step=step)]):
        assert optimizer_patches._validated(original)("chain") == (True, 2.0, None)
        assert torch.is_grad_enabled()
    original.assert_not_called()
    assert seen == [("chain", original, False)]
