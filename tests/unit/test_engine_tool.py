"""tools/test_transformer_engine.py: which versions it tests, over what, and its exit code."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import layer_arguments
from tests.unit import stand_in_te
from tools import test_transformer_engine as tool


class Commands:
    """In place of processes: pip makes its target, pytest fails on one version."""

    def __init__(self, failing: str = "", network: bool = True) -> None:
        self.failing, self.network = failing, network
        self.fetched: list[str] = []
        self.tested: list[tuple[list[str], str]] = []

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if "pip" in command:
            self.fetched += [one for one in command if one.startswith("transformer-engine==")]
            if self.network:
                Path(command[command.index("--target") + 1]).mkdir()
            return subprocess.CompletedProcess(command, int(not self.network))
        packages = options["env"][tool.VARIABLE]
        self.tested.append((command[3:], packages))
        return subprocess.CompletedProcess(
            command, int(bool(self.failing) and self.failing in packages)
        )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "BUILD", tmp_path / "build")

    def call(commands: Commands, *words: str) -> int:
        monkeypatch.setattr(subprocess, "run", commands)
        monkeypatch.setattr("sys.argv", ["test_transformer_engine.py", *words])
        return tool.main()

    return call


def test_each_version_is_fetched_once_and_tested(run: Any, tmp_path: Path) -> None:
    commands = Commands()
    assert run(commands) == run(commands) == 0
    assert commands.fetched == [f"transformer-engine=={one}" for one in tool.VERSIONS]
    packages = [str(tmp_path / "build" / f"transformer-engine-{one}") for one in tool.VERSIONS]
    assert commands.tested == 2 * [(list(tool.TESTS), one) for one in packages]


def test_one_version_that_fails_fails_all(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Commands(failing="2.8.0"), "--versions", "2.20.2", "2.8.0", "--", "-x") == 1
    assert capsys.readouterr().out.endswith(
        "transformer-engine 2.20.2: passed\ntransformer-engine 2.8.0: FAILED\n"
    )


def test_a_version_that_cannot_be_had_is_no_failed_test(
    run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(Commands(network=False), "--versions", "9.9.9") == 2
    assert "could not fetch transformer-engine 9.9.9" in capsys.readouterr().err
    assert list((tmp_path / "build").iterdir()) == []


def test_what_it_names_is_there() -> None:
    root = Path(__file__).parents[2]
    assert all((root / one).is_file() for one in tool.TESTS)
    assert tool.VARIABLE == stand_in_te.REAL
    oldest = ".".join(map(str, layer_arguments.OLDEST))
    assert tool.VERSIONS[0].startswith(oldest + ".")
