"""What test_arguments.py and test_patching.py ask of Megatron, in a process in CPU mode."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable
from logging.handlers import BufferingHandler
from typing import Any

AUTO_UNSET = {
    "zero_bubble_memory_limit": None,
    "zero_bubble_profile_iters": None,
    "zero_bubble_effort": None,
    "zero_bubble_wait_for_search": False,
    "zero_bubble_profile": None,
    "zero_bubble_cache": None,
    "zero_bubble_drift_interval": None,
    "zero_bubble_drift_threshold": None,
    "zero_bubble_profile_exit": False,
    "zero_bubble_trace": None,
    "zero_bubble_trace_iters": None,
    "log_zero_bubble_to_tensorboard": False,
}
"""The flags of measuring and scheduling, as they are when nobody gives them."""
RUNTIME_UNSET = {
    "zero_bubble_bucket_all_stages": False,
    "zero_bubble_reorder_tail": True,
    "zero_bubble_tp_overlap": True,
    "zero_bubble_recompute": None,
}
"""Those of how a schedule is run."""
POST_VALIDATION_UNSET: dict[str, Any] = {
    "optimizer_post_validation": False,
    "canonical_grad_norm": False,
    "rollback": None,
    "rollback_snapshot_on_host": False,
    "post_validation_window": None,
    "post_validation_threshold": None,
}


def flags_of_megatron(wanted: list[str]) -> dict[str, tuple[str, Any]]:
    """(attribute, default) of those of the wanted flags that Megatron has without the adaptor."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(conflict_handler="resolve"))
    return {
        flag: (action.dest, action.default)
        for action in parser._actions
        for flag in action.option_strings
        if flag in wanted
    }


def complaint(arguments: dict[str, Any]) -> str | None:
    """What is wrong with a combination of arguments, where Megatron has to be asked."""
    from megatron.zero_bubble.arguments import validate
    from megatron.zero_bubble.errors import ConfigurationError

    try:
        validate(argparse.Namespace(**arguments))
    except ConfigurationError as error:
        return str(error)
    return None


def version_of_megatron() -> str:
    """As patching reads it; the installed one must pass without a word."""
    from megatron.zero_bubble.patches import patching

    handler = BufferingHandler(capacity=100)
    patching.logger.addHandler(handler)
    try:
        patching.check_version()
    finally:
        patching.logger.removeHandler(handler)
    assert handler.buffer == [], handler.buffer[0].getMessage()
    return patching._version()


def complaints_of_missing_attributes() -> dict[str, str]:
    """For each attribute that the runtime relies on: what is said when it alone is missing."""
    from functools import reduce

    from megatron.zero_bubble.errors import ConfigurationError
    from megatron.zero_bubble.patches import patching

    patching.check_relied_on()
    said = {}
    for module, attributes in patching.RELIED_ON.items():
        for attribute in attributes:
            *path, last = attribute.split(".")
            owner = reduce(getattr, path, importlib.import_module(module))
            original = vars(owner)[last]
            delattr(owner, last)
            try:
                patching.check_relied_on()
            except ConfigurationError as error:
                said[f"{module}.{attribute}"] = str(error)
            finally:
                setattr(owner, last, original)
    return said


FLAGS = {
    "--num-layers": 2,
    "--hidden-size": 8,
    "--num-attention-heads": 2,
    "--seq-length": 8,
    "--max-position-embeddings": 8,
    "--micro-batch-size": 1,
}


def _parsed(arguments: list[str], parse: Callable[[], Any] | None = None) -> dict[str, Any]:
    from megatron.training import arguments as megatron_arguments

    words = [str(word) for pair in FLAGS.items() for word in pair]
    before, sys.argv = sys.argv, ["pretrain_gpt.py", *words, *arguments]
    try:
        return dict(vars((parse or megatron_arguments.parse_args)()))
    finally:
        sys.argv = before


def _validated(arguments: list[str], world_size: int = 1) -> argparse.Namespace:
    from megatron.training import arguments as megatron_arguments

    args = argparse.Namespace(**_parsed(arguments) | {"world_size": world_size})
    megatron_arguments.validate_args(args)
    return args


def adaptor_without_flags() -> None:
    """With the adaptor and none of its flags: Megatron's arguments and Megatron's schedules."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training as training_loop

    from megatron.zero_bubble.patches import cpu

    plain = _parsed([])
    choose = schedules.get_forward_backward_func
    importlib.import_module("megatron.zero_bubble.adaptor")
    assert training_loop.get_forward_backward_func is schedules.get_forward_backward_func
    assert schedules.get_forward_backward_func is not choose, "the adaptor did nothing"

    ours = _parsed([])
    flags = {
        "pipeline_schedule": None,
        "enable_zero_bubble": False,
        "zero_bubble_wait_limit": None,
        "zero_bubble_device": None,
        **RUNTIME_UNSET,
        **AUTO_UNSET,
        **POST_VALIDATION_UNSET,
    }
    # CPU mode's own settings are the only others.
    expected = argparse.Namespace(**plain)
    cpu.apply_argument_defaults(expected)
    assert ours == vars(expected) | flags, {
        key: value for key, value in ours.items() if vars(expected).get(key) != value
    }

    for words in ([], ["--pipeline-schedule", "megatron"]):
        _validated(words)
        for stages, chunks in ((1, None), (2, None), (4, 2)):
            given = {"pp_size": stages, "vp_size": chunks}
            assert training_loop.get_forward_backward_func(**given) is choose(**given)


def adaptor_with_a_schedule() -> None:
    """With a flag, training and evaluation get the one session's function."""
    from megatron.training import global_vars
    from megatron.training import training as training_loop

    from megatron.zero_bubble.patches.schedule import current_session

    importlib.import_module("megatron.zero_bubble.adaptor")
    assert current_session() is None, "a session without a schedule"
    stages = ["--pipeline-model-parallel-size", "2"]
    global_vars._GLOBAL_ARGS = _validated([*stages, "--pipeline-schedule", "zb-h1"], world_size=2)
    try:
        functions = [training_loop.get_forward_backward_func() for _ in range(2)]
    finally:
        global_vars._GLOBAL_ARGS = None
        _validated([])
    session = current_session()
    assert session is not None
    assert functions == [session.forward_backward] * 2


def rerun_modes() -> dict[str, tuple[str, list[str]]]:
    """Flags to (rerun mode after parsing, what was said of it), by our parser."""
    from megatron.training.arguments import parse_args

    from megatron.zero_bubble import post_validation_arguments
    from megatron.zero_bubble.patches import arguments

    ours = arguments._with_ours(inspect.unwrap(parse_args))  # the adaptor may be there already
    found = {}
    before = os.environ["RANK"]
    os.environ["RANK"] = "0"  # the one that speaks
    try:
        for flags in (
            "",
            "--canonical-grad-norm",
            "--rerun-mode report_stats",
            "--optimizer-post-validation",
            "--optimizer-post-validation --rerun-mode disabled",
            "--optimizer-post-validation --rerun-mode validate_results",
        ):
            handler = BufferingHandler(capacity=100)
            post_validation_arguments.logger.addHandler(handler)
            try:
                mode = _parsed(flags.split(), ours)["rerun_mode"]
            finally:
                post_validation_arguments.logger.removeHandler(handler)
            found[flags] = mode, [record.getMessage() for record in handler.buffer]
    finally:
        os.environ["RANK"] = before
    return found


def a_wrong_combination_ends_the_process() -> tuple[Any, str]:
    """(exit code, what was said) of a parse that our rules refuse, on the rank that speaks."""
    importlib.import_module("megatron.zero_bubble.adaptor")
    said = io.StringIO()
    os.environ["LOCAL_RANK"] = "0"  # the one that speaks
    try:
        with contextlib.redirect_stderr(said):
            _validated(["--pipeline-schedule", "zb-h1"])
    except SystemExit as end:
        return end.code, said.getvalue()
    raise AssertionError("the combination was accepted")
