"""Patches: what they replace, what they leave, and that without a flag nothing changes."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from megatron.zero_bubble.errors import ConfigurationError
from megatron.zero_bubble.launch import cannot_import
from megatron.zero_bubble.patches import patching
from megatron.zero_bubble.patches.patching import RELIED_ON, Patch, apply, check_version
from tests.unit.cpu_mode import checks_of

megatron = checks_of("tests.unit.megatron_checks")


def double(original: Callable[..., int]) -> Callable[..., int]:
    def doubled(*args: Any) -> int:
        return 2 * original(*args)

    return doubled


@pytest.fixture
def add_module(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Puts a module with these attributes into sys.modules, for one test."""

    def add(name: str, **attributes: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return add


@pytest.fixture(autouse=True)
def version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lets megatron-core be of this version; without it, of the newest tested one."""

    def be(number: str) -> None:
        monkeypatch.setattr(patching, "_version", lambda: number)

    be("0.19.2")
    return be


def a_function() -> Callable[[], int]:
    """A new one, that no other module holds: this one would be mended too."""
    return lambda: 1


def test_a_function_is_replaced_wherever_it_was_imported(add_module: Callable[..., Any]) -> None:
    one, twin = a_function(), a_function()
    home = add_module("somewhere.schedules", pick=one)
    before = add_module("somewhere.training", pick=one, also=one, other=twin)
    ours = add_module("megatron.zero_bubble.runtime.some", pick=one)
    apply(Patch("somewhere.schedules", "pick", "a test", double))
    assert home.pick() == 2
    assert before.pick is home.pick
    assert before.also is home.pick
    assert before.other is twin
    # Ours keep Megatron's own, else a replacement that calls it would call itself.
    assert ours.pick is one
    assert one() == 1
    from somewhere.schedules import pick  # type: ignore[import-not-found]

    assert pick() == 2


def test_a_second_patch_wraps_the_first(add_module: Callable[..., Any]) -> None:
    one = a_function()
    home = add_module("somewhere.schedules", pick=one)
    user = add_module("somewhere.training", pick=one)
    for _ in range(2):
        apply(Patch("somewhere.schedules", "pick", "a test", double))
    assert home.pick() == 4
    assert user.pick() == 4


def test_a_method_is_replaced_by_its_dotted_name(add_module: Callable[..., Any]) -> None:
    class Optimizer:
        def step(self) -> int:
            return 3

    original = Optimizer.step
    user = add_module("somewhere.training", step=original)
    add_module("somewhere.optimizer", Optimizer=Optimizer)
    existing = Optimizer()
    apply(Patch("somewhere.optimizer", "Optimizer.step", "a test", double))
    assert existing.step() == 6
    assert Optimizer().step() == 6
    # It is the class that changed, and not whoever holds the function.
    assert user.step is original


@pytest.mark.parametrize(
    ("module", "attribute"),
    [
        ("somewhere.schedules", "gone"),
        ("somewhere.schedules", "Gone.step"),
        ("somewhere.schedules", "pick.step"),
        ("somewhere.else_", "pick"),
    ],
)
def test_a_missing_hook_is_named_with_its_purpose(
    module: str, attribute: str, add_module: Callable[..., Any], version: Callable[[str], None]
) -> None:
    one = a_function()
    home = add_module("somewhere.schedules", pick=one)
    version("0.18.4")
    with pytest.raises(ConfigurationError) as caught:
        apply(Patch(module, attribute, "it picks the schedule", double))
    assert str(caught.value) == (
        f"megatron-core 0.18.4 has no {module}.{attribute}, which zero-bubble changes "
        "(it picks the schedule): install megatron-core 0.19.2"
    )
    assert home.pick is one


def test_whatever_the_runtime_calls_is_missed_at_the_start() -> None:
    said = megatron("complaints_of_missing_attributes")
    assert list(said) == [f"{one}.{name}" for one, names in RELIED_ON.items() for name in names]
    for name, message in said.items():
        assert f"has no {name}, which zero-bubble calls: install megatron-core 0.19.2" in message


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("No module named 'yaml'", name="yaml"),
            "megatron-core 0.19.2 needs the Python package yaml, which is missing: install it "
            "(pip install pyyaml)",
        ),
        (
            ImportError("cannot import name 'this'", name="megatron.core.utils"),
            "zero-bubble does not fit megatron-core 0.19.2 (cannot import name 'this'): install "
            "megatron-core 0.19.2",
        ),
    ],
)
def test_an_import_that_fails_is_one_message(error: ImportError, message: str) -> None:
    assert str(cannot_import(error)) == message


def test_a_patch_is_logged_with_its_reason(
    add_module: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    add_module("somewhere.schedules", pick=a_function())
    with caplog.at_level(logging.INFO, patching.__name__):
        apply(Patch("somewhere.schedules", "pick", "it picks the schedule", double))
    assert caplog.messages == ["patched somewhere.schedules.pick: it picks the schedule"]


@pytest.mark.parametrize(
    ("number", "warning"),
    [
        ("0.17.1", None),
        ("0.18.2", None),
        ("0.19.2", None),
        ("0.17.0", "megatron-core 0.17.0 has not been tested"),
        ("0.19.3", "megatron-core 0.19.3 has not been tested"),
        ("0.20.0", r"megatron-core 0.20.0 (newer than any known) has not been tested"),
        ("1.0.0", r"megatron-core 1.0.0 (newer than any known) has not been tested"),
    ],
)
def test_an_untested_version_is_warned_about(
    number: str,
    warning: str | None,
    version: Callable[[str], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    version(number)
    check_version()
    tested = "tested: 0.17.1, 0.18.2, 0.19.2"
    expected = [] if warning is None else [f"{warning} with zero-bubble; {tested}"]
    assert caplog.messages == expected


@pytest.mark.parametrize("number", ["0.16.1", "0.9.0"])
def test_a_version_without_a_training_loop_is_refused(
    number: str, version: Callable[[str], None]
) -> None:
    version(number)
    with pytest.raises(ConfigurationError) as caught:
        check_version()
    message = str(caught.value)
    assert message.startswith(f"megatron-core {number} is too old: zero-bubble needs 0.17 to 0.19")
    assert message.endswith("install megatron-core 0.19.2")


def test_the_installed_version_is_the_tested_one() -> None:
    assert megatron("version_of_megatron") == importlib.metadata.version("megatron-core")


# In this order: the first of them sees Megatron before and after the adaptor.
def test_without_flags_the_adaptor_changes_no_behaviour() -> None:
    megatron("adaptor_without_flags")


def test_with_a_schedule_training_and_evaluation_share_a_session() -> None:
    megatron("adaptor_with_a_schedule")


def test_a_wrong_combination_ends_the_process_as_argparse_does() -> None:
    code, said = megatron("a_wrong_combination_ends_the_process")
    assert code == 2
    assert said == (
        "zero-bubble: error: --pipeline-schedule zb-h1 needs a pipeline, but "
        "--pipeline-model-parallel-size is 1: set it to 2 or more, or leave --pipeline-schedule "
        "out\n"
    )
