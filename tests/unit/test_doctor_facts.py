"""How the doctor looks at packages and drivers that are broken: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.processes import is_running
from zero_bubble.cli import doctor_facts

ROOT = Path(__file__).parents[2]
PATIENT = """
from zero_bubble.cli import doctor_facts
from zero_bubble.cli.interrupt import stop_on_interrupt

stop_on_interrupt()
doctor_facts._ask_child(["apex"])
"""
"""What the command does of it."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import time; time.sleep(60)", "it took more than 1 s"),
        ("import os; os._exit(3)", "ended with code 3: it said nothing"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("print('{}', end='')", None),
        ("import os; os.write(2, b'caf\\xe9'); os._exit(3)", "ended with code 3: caf\ufffd"),
        # In a process of the command's own, which has it blocked.
        (
            "import signal; signal.raise_signal(signal.SIGINT); raise ValueError('deaf')",
            "KeyboardInterrupt",
        ),
    ],
)
def test_imports_happen_elsewhere(
    text: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "patient.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    told = doctor_facts._ask_child(["patient"], seconds=1 if "sleep" in text else 60)
    assert "patient" not in sys.modules
    assert (said is None) == (told["errors"] == {})
    assert said is None or said in told["errors"]["patient"]


def test_one_that_ends_the_process_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fatal.py").write_text("import os; os._exit(7)")
    (tmp_path / "broken.py").write_text("raise OSError('no library')")
    (tmp_path / "whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor_facts._ask_child(["whole", "fatal", "broken"])["errors"] == {
        "fatal": "the process ended with code 7: it said nothing",
        "broken": "OSError: no library",
    }


TORCH = """
class version: cuda = "13.0"
class distributed:
    is_available = staticmethod(lambda: False)
class cuda:
    @staticmethod
    def is_available():
        {does}
"""


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("import os; os._exit(7)", "the process ended with code 7: it said nothing"),
        pytest.param(
            "import time; time.sleep(60)", "it took more than 3 s", marks=pytest.mark.slow
        ),
        ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    ],
)
def test_a_driver_that_crashes_or_hangs_is_no_broken_torch(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(does=does))
    # Asked again, it is imported again, in as much time as before.
    (tmp_path / "slow.py").write_text("import time, torch; time.sleep(1.5)")
    monkeypatch.syspath_prepend(tmp_path)
    told = doctor_facts._ask_child(["torch", "slow"], seconds=3)
    assert told["errors"] == {"CUDA devices": said}
    assert told["found"]["cuda"] == "13.0"


@pytest.mark.parametrize("output", [b"\xff\xfe 535.1\n", b""])
def test_a_driver_that_prints_anything(
    output: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"#!/bin/sh\nprintf '%s' '" + output.strip() + b"'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    shown = doctor_facts._driver()
    assert (shown is None) == (not output)


def test_ctrl_c_leaves_no_importing_process(tmp_path: Path) -> None:
    package = tmp_path / "apex"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(100)"
    )
    command = subprocess.Popen(
        [sys.executable, "-c", PATIENT], env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    end = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    while is_running(int((tmp_path / "pid").read_text())):
        assert time.monotonic() < end
        time.sleep(0.01)
