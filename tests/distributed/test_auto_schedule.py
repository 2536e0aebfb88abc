"""A job that measures itself and goes over to a schedule of its own keeps Megatron's bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.distributed.configs import NEVER_CLIPS, Config
from tests.distributed.harness import Result, assert_identical, assert_identical_model
from zero_bubble.builders import build
from zero_bubble.costs import Costs
from zero_bubble.export.json_io import load_file
from zero_bubble.lower import lower
from zero_bubble.profile.profile import Profile, load_profile, save_profile
from zero_bubble.schedule import Schedule
from zero_bubble.simulate import simulate
from zero_bubble.trace.merge import load_traces

FIRST, LAST = 3, 5
SWITCH = LAST + 3
"""All have reported when iteration LAST + 1 begins; a switch is announced two iterations ahead."""
FLAGS = (
    *("--zero-bubble-profile-iters", f"{FIRST}:{LAST}", "--zero-bubble-wait-for-search"),
    *("--zero-bubble-effort", "quick", "--zero-bubble-drift-interval", "0"),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration, and what the schedule is chosen by."""

    config: Config
    schedule: str = "auto"
    limit: str = "2p"
    extra: tuple[str, ...] = ()
    default: bool = False


CASES = {
    "pp2": Case(Config()),
    "pp4": Case(Config(pp=4, microbatches=6)),
    "dp2": Case(Config(dp=2, precision="bf16", distributed_optimizer=True)),
    "tp2": Case(Config(tp=2, extra=("--sequence-parallel",))),
    "dropout": Case(Config(dropout=0.1)),
    "overlap": Case(
        Config(
            dp=2,
            precision="bf16",
            distributed_optimizer=True,
            extra=("--overlap-grad-reduce", "--overlap-param-gather"),
        )
    ),
    "fp16": Case(Config(precision="fp16", extra=("--initial-loss-scale", "1024"))),
    "no_limit": Case(Config(pp=4, microbatches=6), limit="auto"),
    "bytes": Case(Config(), limit="1GiB"),
    "less_than_1p": Case(Config(pp=4, microbatches=6), limit="0.75p"),
}
VALIDATED = ("--optimizer-post-validation", "--post-validation-window", "0")
V_CASES = {
    "pp2": Case(Config(clip_grad=NEVER_CLIPS), "auto-v", "1p"),
    "pp4": Case(Config(pp=4, layers=8, microbatches=6, clip_grad=NEVER_CLIPS), "auto-v", "0.75p"),
    "dp2": Case(Config(dp=2, clip_grad=NEVER_CLIPS), "auto-v", "1p", default=True),
    "tp2": Case(Config(tp=2, clip_grad=NEVER_CLIPS), "auto-v", "2p"),
    "validated": Case(Config(clip_grad=NEVER_CLIPS), "auto-v", "1p", VALIDATED),
    "validated_linear": Case(
        Config(pp=4, microbatches=6, iterations=11, clip_grad=NEVER_CLIPS),
        extra=VALIDATED,
        default=True,
    ),
}
"""Compared as models: of a V other ranks hold the layers, and with post-validation the norm is
added in another order."""


def _parameters(cases: dict[str, Case]) -> list[object]:
    return [
        pytest.param(case, id=name, marks=() if case.default else pytest.mark.slow)
        for name, case in cases.items()
    ]


def _train(train: Callable[..., Result], case: Case, cache: Path, *flags: str) -> Result:
    limit = ("--zero-bubble-memory-limit", case.limit)
    kept = ("--zero-bubble-cache", str(cache))
    return train(case.config, case.schedule, *FLAGS, *limit, *kept, *case.extra, *flags)


@pytest.mark.parametrize("case", _parameters(CASES))
def test_auto_schedule_keeps_the_bits_of_1f1b(
    case: Case,
    reference: Callable[[Config], Result],
    train: Callable[..., Result],
    tmp_path: Path,
) -> None:
    actual = _train(train, case, tmp_path)
    assert_identical(reference(case.config), actual)
    _check_switch(case, actual, tmp_path)


@pytest.mark.parametrize("case", _parameters(V_CASES))
def test_auto_schedule_trains_the_same_model(
    case: Case,
    reference: Callable[[Config], Result],
    from_one_start: Callable[[Config], Config],
    train: Callable[..., Result],
    tmp_path: Path,
) -> None:
    case = replace(case, config=from_one_start(case.config))
    actual = _train(train, case, tmp_path)
    assert_identical_model(reference(case.config), actual)
    _check_switch(case, actual, tmp_path)


def test_auto_schedule_from_the_cache_measures_nothing(
    reference: Callable[[Config], Result], train: Callable[..., Result], tmp_path: Path
) -> None:
    """The second start runs from its first batch what the first one found."""
    case = V_CASES["validated_linear"]
    _train(train, case, tmp_path)
    profile = (tmp_path / "profile.json").read_text()
    again = _train(train, case, tmp_path)
    assert_identical_model(reference(case.config), again)
    found = load_file(tmp_path / "schedule.json").schedule
    assert _running(again) == [found.name] * case.config.iterations
    _check_executed(again, [found] * case.config.iterations)
    assert (tmp_path / "profile.json").read_text() == profile
    assert "reusing profile and schedule" in again.logs[0]
    assert "profile of" not in again.logs[0]


@pytest.mark.slow
def test_auto_schedule_from_a_profile_measures_nothing(
    reference: Callable[[Config], Result], train: Callable[..., Result], tmp_path: Path
) -> None:
    """A profile of any job of these sizes will do, one without a description too."""
    case = Case(Config(clip_grad=NEVER_CLIPS), extra=VALIDATED)
    placement = build("zb-h1", 2, 1).placement
    profile = Profile(placement=placement, costs=Costs.uniform(placement, 2.0, 3.0, 1.0, 0.1))
    save_profile(profile, tmp_path / "given.json")
    given = ("--zero-bubble-profile", str(tmp_path / "given.json"))
    actual = _train(train, case, tmp_path / "cache", *given)
    assert_identical_model(reference(case.config), actual)
    found = load_file(tmp_path / "cache" / "schedule.json")
    assert found.costs == profile.costs
    switch = _running(actual).index(found.schedule.name)
    assert 1 <= switch < FIRST


@pytest.mark.slow
def test_auto_schedule_follows_a_growing_batch_without_measuring_again(
    reference: Callable[[Config], Result], train: Callable[..., Result], tmp_path: Path
) -> None:
    """Every number of microbatches gets a schedule of its own, one search after the other."""
    growing = Config(batch_sizes="0:2 320:4 800:6", clip_grad=NEVER_CLIPS)  # in tokens, 32 a sample
    case = Case(growing, extra=VALIDATED)
    actual = _train(train, case, tmp_path)
    assert_identical_model(reference(case.config), actual)
    batches = actual.ranks[0]["runtime"]
    sizes = [sum(one.startswith("0F") for one in batch["executed"]) for batch in batches]
    searched = [batch["schedule"] not in ("zb-h1", "") for batch in batches]
    for size in sorted(set(sizes[SWITCH:])):
        first = sizes.index(size)
        assert not searched[first]
        assert all(searched[first + 3 : first + sizes.count(size)])
    assert sum("profile of" in line for line in actual.logs[0].splitlines()) == 1


@pytest.mark.parametrize(
    ("schedule", "limit"),
    [
        ("auto", "1.5p"),
        pytest.param("auto-v", "0.75p", marks=pytest.mark.slow),
        pytest.param("auto", "1p", marks=pytest.mark.slow),
    ],
)
def test_auto_schedule_keeps_the_memory_limit_in_counted_bytes(
    schedule: str, limit: str, train: Callable[..., Result], tmp_path: Path
) -> None:
    """What a stage holds, counted in an iteration after the switch, is within the limit.

    The limit is that of the profile's M_B, and the flag's text is read here anew.
    """
    config = Config(pp=4, layers=8, microbatches=8, iterations=SWITCH + 1)
    case = Case(config, schedule, limit, VALIDATED)
    trace = ("--zero-bubble-trace", str(tmp_path / "trace"))
    window = ("--zero-bubble-trace-iters", f"{SWITCH}:{SWITCH + 1}")
    _train(train, case, tmp_path, *trace, *window)
    profile = load_profile(tmp_path / "profile.json")
    traces = load_traces(tmp_path / "trace").measured
    if (tmp_path / "schedule.json").exists():  # else the first one keeps the limit, too
        found = load_file(tmp_path / "schedule.json").schedule
        assert {one.schedule.name for one in traces} == {found.name}
    allowed = float(limit.removesuffix("p")) * config.pp
    for one in traces:
        for stage, passes in enumerate(one.rows):
            counted = max(each.held or 0 for each in passes)
            assert 0 < counted <= allowed * sum(profile.costs.m_b[stage]) * (1 + 1e-9)


def _check_switch(case: Case, result: Result, cache: Path) -> None:
    """All ranks ran the first schedule, and from one and the same iteration on the one found."""
    profile = load_profile(cache / "profile.json")
    stages, microbatches = case.config.pp, case.config.num_microbatches
    first: Schedule | None = None  # below 1p it is searched for as well
    if case.limit != "0.75p":
        name = "zb-v" if case.schedule == "auto-v" else "zb-h1"
        first = build(name, stages, microbatches)
    before, after = SWITCH - 1, case.config.iterations - SWITCH + 1
    if not (cache / "schedule.json").exists():
        # Where all stages wait for each other at the step, what costs less may take longer.
        assert case.extra != VALIDATED or case.schedule == "auto-v"
        assert "goes on" in result.logs[0], "neither a switch nor a reason for none"
        _check_executed(result, [first] * (before + after))
        return
    found = load_file(cache / "schedule.json")
    assert found.costs == profile.costs
    assert found.schedule.placement == profile.placement
    _check_executed(result, [first] * before + [found.schedule] * after)
    if first is not None:
        least = simulate(first, profile.costs).cost
        assert simulate(found.schedule, profile.costs).cost < least


def _check_executed(result: Result, schedules: Sequence[Schedule | None]) -> None:
    """Every rank executed these schedules' own programs; None is any.

    With post-validation a stage posts some of its receives later.
    """
    programs = [None if one is None else lower(one) for one in schedules]
    for rank, record in enumerate(result.ranks):
        assert len(record["runtime"]) == len(schedules)
        for index, (batch, program) in enumerate(zip(record["runtime"], programs, strict=True)):
            if program is None:
                continue
            expected = list(map(str, program.instructions[batch["stage"]]))
            where = f"rank {rank}, iteration {index + 1}"
            assert _receives_last(batch["executed"]) == _receives_last(expected), where


def _receives_last(instructions: list[str]) -> list[str]:
    return sorted(instructions, key=lambda one: "RECV" in one)


def _running(result: Result) -> list[str]:
    """The schedule of each iteration, the same on all ranks."""
    names = [[batch["schedule"] for batch in record["runtime"]] for record in result.ranks]
    assert names == [names[0]] * len(names), "ranks ran different schedules"
    return names[0]
