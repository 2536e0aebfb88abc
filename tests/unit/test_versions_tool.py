"""The tool that runs the tests against each version of Megatron, up to where it needs a wheel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.zero_bubble.patches.patching import TESTED_VERSIONS
from tools import test_versions as tool

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["test_versions.py", *words])
    return tool.main()


def test_the_versions_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "BUILD", tmp_path)
    (tmp_path / "megatron-core-0.18.2").mkdir()
    assert run(monkeypatch, "--list") == 0
    assert capsys.readouterr().out.splitlines() == [
        "0.17.1 not in the cache",
        "0.18.2 in the cache",
        "0.19.2 not in the cache",
    ]


def test_an_unknown_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--versions", "0.16") == 2
    assert "--versions 0.16: no such version is tested; give any of 0.17, 0.18, 0.19" in (
        capsys.readouterr().err
    )


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, tuple[bool, str]]:
    """What comes of the tests by version; the versions themselves are taken for unpacked."""
    found: dict[str, tuple[bool, str]] = {}

    def tests(words: list[str], environment: dict[str, str]) -> tuple[bool, str]:
        directory = Path(environment["PYTHONPATH"].split(os.pathsep)[0])
        return found[directory.name.removeprefix("megatron-core-")]

    monkeypatch.setattr(tool, "BUILD", tmp_path)
    monkeypatch.setattr(tool, "_probe", lambda version, environment: "")
    monkeypatch.setattr(tool, "_run_tests", tests)
    for version in TESTED_VERSIONS:
        (tmp_path / f"megatron-core-{version}").mkdir()
        found[version] = True, "3 passed"
    return found


def test_one_version_that_fails_fails_all(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    outcomes: dict[str, tuple[bool, str]],
) -> None:
    assert run(monkeypatch) == 0
    outcomes["0.17.1"] = False, "1 failed, 2 passed"
    capsys.readouterr()
    assert run(monkeypatch) == 1
    said = capsys.readouterr().out.splitlines()[-3:]
    assert said[0].startswith("megatron-core 0.17.1: FAILED in 0 s: 1 failed, 2 passed")
    assert said[1].startswith("megatron-core 0.18.2: passed in 0 s: 3 passed")
    assert run(monkeypatch, "--versions", "0.18", "0.19.2") == 0


def test_the_wheel_comes_before_the_environment(tmp_path: Path) -> None:
    paths = tool._environment(tmp_path)["PYTHONPATH"].split(os.pathsep)
    assert paths[:2] == [str(tmp_path), str(ROOT)]


def test_another_megatron_than_the_wheels_is_not_tested() -> None:
    """Without the wheel on the path it would be that of the environment."""
    environment = dict(os.environ)
    with pytest.raises(tool.VersionError, match=r"^would import 0\.\d+\.\d+ from /"):
        tool._probe("0.0.1", environment)


def test_a_pinned_wheel_that_is_there_is_not_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tool, "WHEELS", tmp_path)
    (tmp_path / "megatron_core-0.17.1-cp312-cp312-linux.whl").touch()
    (tmp_path / "pyyaml-6.0.41-cp312-cp312-linux.whl").touch()
    assert any(tool._wheels_of("megatron-core==0.17.1"))
    assert not any(tool._wheels_of("pyyaml==6.0.4"))


def test_what_runs_by_default_is_there() -> None:
    tests = tool._default_tests()
    for name in ("unit/test_patch_targets.py", "distributed/test_bit_identity.py"):
        assert f"tests/{name}" in tests
    assert "tests/unit/test_drawings.py" not in tests  # of the scheduler alone
