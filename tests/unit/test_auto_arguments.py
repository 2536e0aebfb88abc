"""The flags of the automatic schedule and of recording: defaults, and what each refusal says."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble.arguments import add_arguments, validate
from megatron.zero_bubble.auto_arguments import cache_directory, check_auto, limit_factor
from megatron.zero_bubble.errors import ConfigurationError
from tests.unit.megatron_checks import AUTO_UNSET
from tests.unit.test_arguments import arguments as other_arguments
from zero_bubble.costs import Costs
from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.profile.profile import Profile, save_profile

SEARCHING = {
    "zero_bubble_memory_limit": ("2p", " 2p"),
    "zero_bubble_profile_iters": ("5:10", " 5:10"),
    "zero_bubble_effort": ("quick", " quick"),
    "zero_bubble_wait_for_search": (True, ""),
    "zero_bubble_profile": ("p.json", " p.json"),
    "zero_bubble_cache": ("there", " there"),
    "zero_bubble_drift_interval": (0, " 0"),
    "zero_bubble_drift_threshold": (0.0, " 0.0"),
    "zero_bubble_profile_exit": (True, ""),
}
"""Those that only a search has a use for: a value that is given, and how it is shown."""


def arguments(**changes: Any) -> argparse.Namespace:
    """A job of two stages with --pipeline-schedule auto that can run."""
    fine = {
        "pipeline_schedule": "auto",
        "train_iters": 100,
        "eval_interval": 1000,
        "save": None,
        "load": None,
        "rank": 0,
    }
    return other_arguments(**(AUTO_UNSET | fine | changes))


def complaint(**changes: Any) -> str:
    """The message that such a job stops with."""
    with pytest.raises(ConfigurationError) as caught:
        validate(arguments(**changes))
    return str(caught.value)


def parsed(*words: str) -> dict[str, Any]:
    """What the words change."""
    parser = add_arguments(argparse.ArgumentParser())
    unset = vars(parser.parse_args([]))
    return {key: one for key, one in vars(parser.parse_args(words)).items() if one != unset[key]}


def saved(directory: Path, placement: Placement) -> str:
    path = directory / "profile.json"
    save_profile(Profile(placement=placement, costs=Costs.uniform(placement, 1, 1, 1)), path)
    return str(path)


def test_nothing_is_asked_for_by_default() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    assert AUTO_UNSET.items() <= vars(parser.parse_args([])).items()


def test_the_flags_are_parsed() -> None:
    for attribute, (value, shown) in SEARCHING.items():
        flag = "--" + attribute.replace("_", "-")
        assert parsed(flag, *shown.split()) == {attribute: value}
    assert parsed("--zero-bubble-trace-iters", "3:4") == {"zero_bubble_trace_iters": "3:4"}


@pytest.mark.parametrize("text", ["5", "5-10", "a:b", "5:", "-5:10", "5:10:15"])
def test_iterations_of_another_form(text: str, tmp_path: Path) -> None:
    message = complaint(zero_bubble_profile_iters=text)
    assert message.startswith(f"--zero-bubble-profile-iters {text}: expected FIRST:LAST")
    message = complaint(zero_bubble_trace=str(tmp_path), zero_bubble_trace_iters=text)
    assert message.startswith(f"--zero-bubble-trace-iters {text}: expected FIRST:LAST")


def test_what_is_not_given_gets_its_default() -> None:
    args = arguments()
    assert validate(args) == linear(2)
    assert args.zero_bubble_memory_limit == "auto"
    assert args.zero_bubble_profile_iters == (5, 10)
    assert args.zero_bubble_effort == "normal"
    assert (args.zero_bubble_drift_interval, args.zero_bubble_drift_threshold) == (100, 0.02)
    once = dict(vars(args))
    validate(args)
    assert vars(args) == once
    # Not by `validate`, which asks Megatron about layers.
    of_v = arguments(pipeline_schedule="auto-v")
    check_auto(of_v, v_shape(2))
    assert {name: vars(of_v)[name] for name in AUTO_UNSET} == {
        name: once[name] for name in AUTO_UNSET
    }


def test_what_is_given_stays() -> None:
    given = {
        "zero_bubble_memory_limit": "1.5p",
        "zero_bubble_effort": "thorough",
        "zero_bubble_drift_interval": 0,
        "zero_bubble_drift_threshold": 0.0,
    }
    args = arguments(**given, zero_bubble_profile_iters="2:3")
    for _ in range(2):
        validate(args)
        assert vars(args) | given == vars(args)
        assert args.zero_bubble_profile_iters == (2, 3)


@pytest.mark.parametrize("schedule", [None, "zb-h1"])
@pytest.mark.parametrize("attribute", SEARCHING)
def test_a_flag_of_the_search_without_one(attribute: str, schedule: str | None) -> None:
    value, shown = SEARCHING[attribute]
    flag = "--" + attribute.replace("_", "-")
    assert complaint(pipeline_schedule=schedule, **{attribute: value}) == (
        f"{flag}{shown} is for --pipeline-schedule auto or auto-v, but that is "
        f"{schedule or 'megatron'}: change it, or leave {flag} out"
    )


@pytest.mark.parametrize(
    "limit", ["auto", "0.5p", "1p", "2P", ".5p", "12GiB", "512 MiB", "1e9", "inf", "1p,2p"]
)
def test_memory_limits_that_can_be_kept(limit: str) -> None:
    args = arguments(zero_bubble_memory_limit=limit)
    validate(args)
    assert args.zero_bubble_memory_limit == limit


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        *((wrong, ": expected auto, 2p, ") for wrong in ("much", "-1p", "nan", "3 apples")),
        ("1p,1p,1p", "one for all of 2 stages, or one each"),
        ("0.4p", "is less than one microbatch with 2 stages: give at least 0.5p"),
        ("0p", "is less than one microbatch with 2 stages: give at least 0.5p"),
        ("2", "is in bytes, too few for any microbatch: add a unit such as GiB, or p"),
        ("inf,4096", "is in bytes, too few for any microbatch: add a unit such as GiB, or p"),
    ],
)
def test_memory_limits_that_cannot(limit: str, reason: str) -> None:
    message = complaint(zero_bubble_memory_limit=limit)
    assert message.startswith(f"--zero-bubble-memory-limit {limit}")
    assert reason in message
    assert " --memory-limit" not in message


def test_the_least_limit_is_one_that_is_taken() -> None:
    """A third of three stages' worth is rounded up in the message."""
    three = {"pipeline_model_parallel_size": 3, "world_size": 3, "num_layers": 6}
    message = complaint(zero_bubble_memory_limit="0.3p", **three)
    assert message.endswith("give at least 0.34p")
    validate(arguments(zero_bubble_memory_limit="0.34p", **three))


@pytest.mark.parametrize(
    ("limit", "factor"),
    [("2p", 2.0), ("0.5P", 0.5), (".75p", 0.75), ("1.p", 1.0), (" 3p ", 3.0)]
    + [("1p,2p", 1.0), ("2p, 1.5P,3p", 1.5)]
    + [(other, None) for other in ("auto", "12GiB", "inf", "p", "7", "1p,12GiB", "inf,1p", "1p,")],
)
def test_limits_in_microbatches_times_stages(limit: str, factor: float | None) -> None:
    assert limit_factor(limit) == factor


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ("1:5", "FIRST must be at least 2, and LAST not before it"),
        ("7:6", "FIRST must be at least 2, and LAST not before it"),
        ("6:6", "the first iteration measures memory, those after it times; give at least two"),
        ("5:98", "100 iterations (--train-iters)"),
    ],
)
def test_windows_in_which_nothing_can_be_measured(window: str, reason: str) -> None:
    message = complaint(zero_bubble_profile_iters=window)
    assert message.startswith(f"--zero-bubble-profile-iters {window}")
    assert reason in message


def test_a_short_job_is_told_what_needs_no_measuring() -> None:
    """The default window counts too, and each kind names its own first schedule.

    After iteration 10 all have reported in 11, where a switch is announced for 13 at best.
    """
    assert "--pipeline-schedule zb-h1," in complaint(train_iters=12)
    message = complaint(pipeline_schedule="auto-v", train_iters=12)
    assert message.startswith("--zero-bubble-profile-iters 5:10")
    assert "--pipeline-schedule zb-v," in message
    validate(arguments(train_iters=13))
    validate(arguments(train_iters=None))  # --train-samples
    validate(arguments(zero_bubble_profile_iters="5:97"))


def test_a_short_job_with_a_profile_has_nothing_to_measure(tmp_path: Path) -> None:
    """Unless it says when, for microbatches of another size."""
    path = saved(tmp_path, linear(2))
    validate(arguments(train_iters=5, zero_bubble_profile=path))
    given = {"train_iters": 5, "zero_bubble_profile": path, "zero_bubble_profile_iters": "3:4"}
    assert complaint(**given).startswith("--zero-bubble-profile-iters 3:4")


@pytest.mark.parametrize(
    ("window", "warned"), [("5:10", True), ("7:8", True), ("8:14", True), ("8:13", False)]
)
def test_an_evaluation_within_the_window(
    window: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One after every seventh iteration; after the last of the window counts."""
    with caplog.at_level(logging.WARNING):
        validate(arguments(zero_bubble_profile_iters=window, eval_interval=7))
    told = [one for one in caplog.messages if "--eval-interval 7 falls into it" in one]
    assert len(told) == warned
    caplog.clear()
    validate(arguments(zero_bubble_profile_iters=window, eval_interval=7, rank=1))
    assert not caplog.messages


def test_drift_out_of_range() -> None:
    for interval in (-1, 1, 9):
        assert complaint(zero_bubble_drift_interval=interval).startswith(
            f"--zero-bubble-drift-interval {interval}: at least 10 iterations"
        )
    validate(arguments(zero_bubble_drift_interval=10))
    for threshold in (-0.1, 1.0, 20.0, float("nan")):
        assert complaint(zero_bubble_drift_threshold=threshold) == (
            f"--zero-bubble-drift-threshold {threshold:g}: must be a fraction from 0 to below 1"
        )


def test_a_profile_of_another_placement(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(2))
    validate(arguments(zero_bubble_profile=path))
    for other, stages, name in (
        (linear(3), 3, "linear"),
        (v_shape(2), 2, "v"),
    ):
        path = saved(tmp_path, other)
        assert complaint(zero_bubble_profile=path) == (
            f"--zero-bubble-profile {path} is of {stages} stages with placement {name}, the job "
            "has 2 and linear: give a profile of this placement, or leave the flag out to measure"
        )


def test_a_profile_that_cannot_be_read(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.json")
    message = complaint(zero_bubble_profile=missing)
    assert message.startswith(f"--zero-bubble-profile {missing}")
    (tmp_path / "text.json").write_text('{"format": "something else"}')
    message = complaint(zero_bubble_profile=str(tmp_path / "text.json"))
    assert message.startswith(f"--zero-bubble-profile {tmp_path}/text.json: field 'format'")


def test_to_end_with_the_profile_it_must_be_measured_and_kept(tmp_path: Path) -> None:
    path = saved(tmp_path, linear(2))
    message = complaint(zero_bubble_profile_exit=True, zero_bubble_profile=path)
    assert message == (
        f"--zero-bubble-profile-exit measures, --zero-bubble-profile {path} says not to: leave "
        "one of them out"
    )
    for nowhere in ({}, {"save": "there", "zero_bubble_cache": "none"}):
        message = complaint(zero_bubble_profile_exit=True, **nowhere)
        assert message.startswith("--zero-bubble-profile-exit")
        assert "--zero-bubble-cache DIR" in message
    validate(arguments(zero_bubble_profile_exit=True, save="there"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"save": "s"}, "s/zero-bubble"),
        ({"load": "l"}, "l/zero-bubble"),
        ({"save": "s", "load": "l"}, "s/zero-bubble"),
        ({"save": "s", "zero_bubble_cache": "c"}, "c"),
        ({"save": "s", "zero_bubble_cache": "none"}, None),
    ],
)
def test_where_profiles_are_kept(given: dict[str, str], expected: str | None) -> None:
    found = cache_directory(arguments(**given))
    assert found == (None if expected is None else Path(expected))


def test_recording_needs_a_schedule_of_ours(tmp_path: Path) -> None:
    trace = {"zero_bubble_trace": str(tmp_path)}
    for asked, shown in (
        (trace, f"--zero-bubble-trace {tmp_path}"),
        ({"log_zero_bubble_to_tensorboard": True}, "--log-zero-bubble-to-tensorboard"),
    ):
        message = complaint(pipeline_schedule=None, **asked)
        assert message.startswith(f"{shown} needs a --pipeline-schedule of ours")
        assert "1f1b is the same schedule" in message
        for ours in ("1f1b", "zb-h1", "auto"):
            validate(arguments(pipeline_schedule=ours, tensorboard_dir="there", **asked))


def test_scalars_need_somebody_who_writes_them() -> None:
    asked = {"pipeline_schedule": "zb-h1", "log_zero_bubble_to_tensorboard": True}
    message = complaint(**asked)
    assert message.startswith("--log-zero-bubble-to-tensorboard")
    assert "--tensorboard-dir" in message
    validate(arguments(**asked, tensorboard_dir="there"))
    validate(arguments(**asked, wandb_project="there"))


def test_what_is_recorded(tmp_path: Path) -> None:
    new = str(tmp_path / "new")
    args = arguments(pipeline_schedule="zb-h1", zero_bubble_trace=new)
    validate(args)
    assert args.zero_bubble_trace_iters == (16, 18)
    assert not Path(new).exists()
    window = {"pipeline_schedule": "zb-h1", "zero_bubble_trace_iters": "3:4"}
    assert complaint(**window).startswith(
        "--zero-bubble-trace-iters 3:4 needs --zero-bubble-trace DIR"
    )
    args = arguments(**window, zero_bubble_trace=new)
    validate(args)
    assert args.zero_bubble_trace_iters == (3, 4)


def test_what_cannot_be_recorded(tmp_path: Path) -> None:
    given = {"pipeline_schedule": "zb-h1", "zero_bubble_trace": str(tmp_path)}
    for first, last in ((0, 3), (4, 3)):
        assert complaint(**given, zero_bubble_trace_iters=f"{first}:{last}") == (
            f"--zero-bubble-trace-iters {first}:{last}: FIRST must be at least 1, and LAST not "
            "before it"
        )
    assert complaint(**given, zero_bubble_trace_iters="101:102") == (
        "--zero-bubble-trace-iters 101:102: the job has 100 iterations (--train-iters); choose "
        "earlier ones"
    )
    file = tmp_path / "file"
    file.touch()
    assert complaint(**given | {"zero_bubble_trace": str(file)}).startswith(
        f"--zero-bubble-trace {file} is a file: name a directory"
    )


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, "--pipeline-schedule auto"),
        ({"pipeline_schedule": "zb-h1", "zero_bubble_trace": "somewhere"}, "--zero-bubble-trace"),
    ],
)
def test_cpu_mode_cannot_count_distributed_activations(
    changes: dict[str, Any], ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = changes | {"distribute_saved_activations": True}
    validate(arguments(**given))  # where a device counts
    monkeypatch.setattr("megatron.zero_bubble.patches.cpu.installed", lambda: True)
    assert complaint(**given).startswith(
        f"{ours} does not work with --distribute-saved-activations in CPU mode"
    )
