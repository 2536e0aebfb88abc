"""The flags of optimizer post-validation: what they fill in, and what each refusal says."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron.zero_bubble.arguments import add_arguments, validate
from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.post_validation_arguments import (
    _INPLACE_RULES,
    _RULES,
    settle_rerun_mode,
)
from megatron.zero_bubble.rules import Rule
from tests.unit.cpu_mode import checks_of
from tests.unit.megatron_checks import POST_VALIDATION_UNSET
from tests.unit.test_arguments import arguments as arguments_without
from zero_bubble.builders import BUILDERS

FLAG = "--optimizer-post-validation"


def arguments(**changes: Any) -> argparse.Namespace:
    """What Megatron's parser gives for a job with the flag that can run."""
    fine = {
        "optimizer_post_validation": True,
        "pipeline_schedule": "zb-h1",
        "rerun_mode": "disabled",
        "optimizer": "adam",
        "untie_embeddings_and_output_weights": True,
        "overlap_grad_reduce": False,
        "timing_log_level": 0,
        "barrier_with_L1_time": True,
        "vision_pretraining": False,
        "vision_pretraining_type": "classify",
    }
    return arguments_without(**(POST_VALIDATION_UNSET | fine | changes))


def complaint(**changes: Any) -> str:
    """The message that such a job stops with."""
    with pytest.raises(ConfigurationError) as caught:
        validate(arguments(**changes))
    return str(caught.value)


def parsed(*words: str) -> dict[str, Any]:
    """Of this project's flags, those that the words change."""
    parser = add_arguments(argparse.ArgumentParser())
    unset = vars(parser.parse_args([]))
    return {key: one for key, one in vars(parser.parse_args(words)).items() if one != unset[key]}


def test_the_flags_are_parsed() -> None:
    assert parsed() == {}
    assert parsed(FLAG) == parsed("--enable-optimizer-post-validation")
    assert parsed(FLAG) == {"optimizer_post_validation": True}
    assert parsed("--canonical-grad-norm") == {"canonical_grad_norm": True}
    assert parsed("--rollback", "snapshot", "--rollback-snapshot-on-host") == {
        "rollback": "snapshot",
        "rollback_snapshot_on_host": True,
    }
    window = ("--post-validation-window", "7", "--post-validation-threshold", "0.25")
    assert parsed(*window) == {"post_validation_window": 7, "post_validation_threshold": 0.25}


def test_the_flags_have_a_group_of_their_own() -> None:
    parser = add_arguments(argparse.ArgumentParser())
    _, ours = parser.format_help().split("optimizer post-validation:\n")
    for attribute in POST_VALIDATION_UNSET:
        assert "--" + attribute.replace("_", "-") in ours


@pytest.mark.parametrize("kind", ["inverse", "Deferred", ""])
def test_an_unknown_kind_of_rollback(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(FLAG, "--rollback", kind)
    assert "'deferred', 'snapshot', 'inplace'" in capsys.readouterr().err


def test_what_is_not_given_gets_its_default() -> None:
    args = arguments()
    validate(args)
    assert (args.rollback, args.post_validation_window, args.post_validation_threshold) == (
        "deferred",
        20,
        0.5,
    )
    once = dict(vars(args))
    validate(args)
    assert vars(args) == once


def test_what_is_given_stays() -> None:
    given = {
        "rollback": "snapshot",
        "rollback_snapshot_on_host": True,
        "post_validation_window": 0,
        "post_validation_threshold": 0.0,
    }
    args = arguments(**given)
    validate(args)
    assert vars(args) | given == vars(args)


@pytest.mark.parametrize(
    ("attribute", "value", "shown"),
    [
        ("rollback", "deferred", "--rollback deferred"),
        ("rollback_snapshot_on_host", True, "--rollback-snapshot-on-host"),
        ("post_validation_window", 0, "--post-validation-window 0"),
        ("post_validation_threshold", 0.0, "--post-validation-threshold 0.0"),
    ],
)
@pytest.mark.parametrize("schedule", [None, "zb-h1"])
def test_a_companion_without_the_flag(
    schedule: str | None, attribute: str, value: Any, shown: str
) -> None:
    flag = shown.split()[0]
    given = {"optimizer_post_validation": False, "pipeline_schedule": schedule}
    assert complaint(**given, **{attribute: value}) == (
        f"{shown} is for {FLAG}, which is not given: add it, or leave {flag} out"
    )


@pytest.mark.parametrize("kind", [None, "deferred", "inplace"])
def test_copies_on_the_host_are_those_of_snapshot(kind: str | None) -> None:
    assert complaint(rollback=kind, rollback_snapshot_on_host=True) == (
        "--rollback-snapshot-on-host is for --rollback snapshot, but --rollback is "
        f"{kind or 'deferred'}: add --rollback snapshot, or leave --rollback-snapshot-on-host out"
    )


def test_a_window_below_zero() -> None:
    assert complaint(post_validation_window=-1) == (
        "--post-validation-window -1: must be a number of steps, or 0 to step "
        "optimistically however many are clipped"
    )


@pytest.mark.parametrize("fraction", [-0.1, 1.01, float("nan"), float("inf")])
def test_a_threshold_that_is_no_fraction(fraction: float) -> None:
    assert complaint(post_validation_threshold=fraction) == (
        f"--post-validation-threshold {fraction:g}: must be a fraction from 0 to 1, where 0 "
        "steps optimistically however many are clipped"
    )


@pytest.mark.parametrize("schedule", [None, "megatron"])
@pytest.mark.parametrize("stages", [1, 2])
def test_megatrons_own_schedule_cannot_run_ahead(schedule: str | None, stages: int) -> None:
    message = complaint(pipeline_schedule=schedule, pipeline_model_parallel_size=stages)
    assert message == (
        f"{FLAG} needs one of this project's schedules, but --pipeline-schedule is megatron: "
        f"choose another (zb-v, say) for a pipeline of two stages or more, or leave {FLAG} out"
    )


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("kind", [None, "deferred", "snapshot", "inplace"])
def test_every_schedule_of_ours_can(name: str, kind: str | None) -> None:
    validate(arguments(pipeline_schedule=name, rollback=kind))


@pytest.mark.parametrize("schedule", [None, "zb-h1", "interleaved"])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_canonical_norm_works_with_any_schedule(schedule: str | None, stages: int) -> None:
    given = {"optimizer_post_validation": False, "canonical_grad_norm": True}
    if schedule is None or stages > 1:
        given |= {"pipeline_schedule": schedule, "pipeline_model_parallel_size": stages}  # type: ignore[dict-item]
    # What post-validation refuses is no matter here.
    validate(arguments(**given, **{rule.attribute: FORBIDDEN[rule.flag][0] for rule in _RULES}))


# What a rule forbids, and the value its message must show (a switch has none).
FORBIDDEN = {
    "--rerun-mode": ("validate_results", " validate_results"),
    "--log-num-zeros-in-grad": (True, ""),
    "--log-params-norm": (True, ""),
    "--log-straggler": (True, ""),
    "--log-max-attention-logit": (True, ""),
    "--qk-clip": (True, ""),
    "--optimizer": ("muon", " muon"),
    "--optimizer-cpu-offload": (True, ""),
    "--optimizer-cuda-graph": (True, ""),
    "--use-precision-aware-optimizer": (True, ""),
    "--overlap-param-gather-with-optimizer-step": (True, ""),
    "--reuse-grad-buf-for-mxfp8-param-ag": (True, ""),
    "--fp8-param-gather": (True, ""),
    "--fp4-param-gather": (True, ""),
    "--dataloader-save": ("somewhere", " somewhere"),
    "--perform-rl-step": (True, ""),
}
OF_ANOTHER_SCRIPT = ("--dataloader-save",)
"""Not a flag of Megatron's parser; its checkpointing looks for the argument all the same."""
SET_TO_WORK = ("--rerun-mode",)
"""Flags whose default in Megatron does not work: our parser sets another."""


def test_every_rule_has_its_case() -> None:
    assert [rule.flag for rule in _RULES] == list(FORBIDDEN)


@pytest.mark.parametrize("kind", ["deferred", "snapshot", "inplace"])
@pytest.mark.parametrize("rule", _RULES, ids=lambda rule: rule.flag)
def test_features_that_do_not_work_with_the_flag(rule: Rule, kind: str) -> None:
    bad, shown = FORBIDDEN[rule.flag]
    message = complaint(rollback=kind, **{rule.attribute: bad})
    assert message == f"{FLAG} does not work with {rule.flag}{shown}: {rule.remedy}"
    assert "; leave it out" in message or "; use " in message
    for good in rule.allowed:
        validate(arguments(**{rule.attribute: good}))
    # A run without post-validation may have it.
    validate(arguments(optimizer_post_validation=False, **{rule.attribute: bad}))


def test_rules_name_megatrons_flags_and_allow_its_defaults() -> None:
    wanted = [rule.flag for rule in _RULES if rule.flag not in OF_ANOTHER_SCRIPT]
    found = checks_of("tests.unit.megatron_checks")("flags_of_megatron", wanted=wanted)
    assert sorted(found) == sorted(wanted)
    for rule in _RULES:
        if rule.flag in found:
            attribute, default = found[rule.flag]
            assert attribute == rule.attribute
            assert (default in rule.allowed) == (rule.flag not in SET_TO_WORK)


def test_the_other_checks_read_megatrons_attributes() -> None:
    wanted = {
        "--timing-log-level": ("timing_log_level", 0),
        "--no-barrier-with-level-1-timing": ("barrier_with_L1_time", True),
        "--vision-pretraining": ("vision_pretraining", False),
        "--vision-pretraining-type": ("vision_pretraining_type", "classify"),
        "--overlap-grad-reduce": ("overlap_grad_reduce", False),
        "--untie-embeddings-and-output-weights": ("untie_embeddings_and_output_weights", False),
    }
    megatron = checks_of("tests.unit.megatron_checks")
    assert megatron("flags_of_megatron", wanted=list(wanted)) == wanted


@pytest.mark.parametrize("rule", _INPLACE_RULES, ids=lambda rule: rule.flag)
def test_only_adamw_is_inverted(rule: Rule) -> None:
    bad = {"optimizer": "sgd", "decoupled_weight_decay": False}[rule.attribute]
    assert complaint(rollback="inplace", **{rule.attribute: bad}) == (
        f"{FLAG} with --rollback inplace does not work with {rule.flag} {bad}: {rule.remedy}"
    )
    assert "use --rollback deferred or --rollback snapshot" in rule.remedy
    for kind in ("deferred", "snapshot"):
        validate(arguments(rollback=kind, **{rule.attribute: bad}))


def test_timers_that_wait_for_all_ranks() -> None:
    assert complaint(timing_log_level=1) == (
        f"{FLAG} does not work with --timing-log-level 1: such timers wait for all ranks in every "
        "iteration; add --no-barrier-with-level-1-timing, or use --timing-log-level 0"
    )
    validate(arguments(timing_log_level=2, barrier_with_L1_time=False))


def test_weights_that_change_after_the_step() -> None:
    dino = {"vision_pretraining": True, "vision_pretraining_type": "dino"}
    assert complaint(**dino) == (
        f"{FLAG} does not work with --vision-pretraining-type dino: it changes weights after the "
        f"step, when forward passes have used them; leave {FLAG} out"
    )
    for name, fine in (("vision_pretraining", False), ("vision_pretraining_type", "classify")):
        validate(arguments(**(dino | {name: fine})))


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_tied_embeddings_work_on_two_stages_and_on_one(name: str, overlap: bool) -> None:
    tied = {"untie_embeddings_and_output_weights": False, "overlap_grad_reduce": overlap}
    validate(arguments(pipeline_schedule=name, **tied))


@pytest.mark.parametrize("flags", ["", "--canonical-grad-norm", "--rerun-mode report_stats"])
def test_the_rerun_mode_of_a_run_without_the_flag_is_megatrons(flags: str) -> None:
    expected = "report_stats" if "report_stats" in flags else "validate_results"
    assert rerun_modes()[flags] == (expected, [])


def test_the_flag_switches_the_rerun_engine_off_and_says_so() -> None:
    mode, said = rerun_modes()[FLAG]
    assert mode == "disabled"
    assert said == [
        f"{FLAG} sets --rerun-mode disabled: the rerun engine's check waits for all ranks in "
        "every iteration, and would run again what has run ahead"
    ]


@pytest.mark.parametrize("given", ["disabled", "validate_results"])
def test_a_rerun_mode_that_is_given_is_kept(given: str) -> None:
    """Also where it is Megatron's default; `validate` then refuses it."""
    assert rerun_modes()[f"{FLAG} --rerun-mode {given}"] == (given, [])


def rerun_modes() -> dict[str, tuple[str, list[str]]]:
    modes: dict[str, tuple[str, list[str]]] = checks_of("tests.unit.megatron_checks")("rerun_modes")
    return modes


def test_a_megatron_without_a_rerun_engine() -> None:
    args = argparse.Namespace(optimizer_post_validation=True)
    settle_rerun_mode(args, None)
    assert vars(args) == {"optimizer_post_validation": True}
