"""The image, as far as it can be looked at without Docker, and how tools/setup.sh builds it."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT_FROM = ("pyproject.toml", "setup.py", "requirements.txt", "tools/setup.sh")
"""By tools/setup.sh."""


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of each of the Dockerfile's, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = filter(None, re.sub(r"\\\n\s*", "", text).splitlines())
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def only(name: str) -> str:
    (found,) = [rest for one, rest in instructions() if one == name]
    return found


def test_a_release_of_nvidia_s_image_as_argument() -> None:
    name, arguments = instructions()[0]
    assert name == "ARG"
    assert re.fullmatch(r"IMAGE=nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", arguments)
    assert only("FROM") == "${IMAGE}"


def test_what_is_installed_does_not_run_as_root() -> None:
    names = [name for name, _ in instructions()]
    user = names.index("USER")
    assert only("USER") == "${USER_ID}"
    assert any(rest.startswith("USER_ID=") and rest != "USER_ID=0" for _, rest in instructions())
    for name in ("COPY", "HEALTHCHECK", "CMD"):
        assert names.index(name) > user
    assert any("-ne 0" in rest for name, rest in instructions() if name == "RUN")


def test_packages_are_installed_before_files_that_change_are_copied() -> None:
    after = instructions()[[name for name, _ in instructions()].index("USER") :]
    packages, checkout = (i for i, (name, rest) in enumerate(after)
                          if name == "RUN" and "tools/setup.sh" in rest)  # fmt: skip
    assert after[packages][1].startswith("SYSTEM_TORCH=1 ")
    assert after[packages][1].endswith(" --packages")
    copied = {place: rest.split()[1:] for place, (name, rest) in enumerate(after) if name == "COPY"}
    early = [word for place, words in copied.items() if place < packages for word in words]
    assert set(BUILT_FROM) <= set(early)
    assert "." not in early
    assert [words for place, words in copied.items() if packages < place < checkout] == [[".", "."]]


def test_health_is_what_the_doctor_says() -> None:
    command = '["zero-bubble", "doctor"]'
    assert only("CMD") == command
    assert only("HEALTHCHECK").endswith(f"CMD {command}")
    assert "/opt/zero-bubble/.venv/bin:" in " ".join(
        rest for name, rest in instructions() if name == "ENV"
    )
    assert only("WORKDIR") == "/opt/zero-bubble"


def test_what_is_left_out_is_not_needed() -> None:
    patterns = [
        line.removeprefix("**/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert {".git", ".venv"} <= set(patterns)
    needed = (*BUILT_FROM, "README.md", "Makefile", "pretrain_gpt.py", "tools/demo.py", "examples")
    for path in needed:
        for part in Path(path).parts:
            assert not any(fnmatch.fnmatch(part, pattern) for pattern in patterns), path
    for name in (ROOT / ".gitignore").read_text().split():
        assert name.strip("/") in patterns


PYTHON = r"""#!/usr/bin/env bash
# Stands in for a Python with a torch of its own, and for that of the .venv it makes.
here=$(dirname "$0")
case "$*" in
    *"-m venv"*)
        venv=${*: -1}
        mkdir -p "$venv/bin"
        cp "$0" "$venv/bin/python"
        [[ $* != *--system-site-packages* ]] ||
            echo "include-system-site-packages = true" >"$venv/pyvenv.cfg"
        ;;
    *--requirement*)
        cat "${*: -1}" >requirements.log
        cat "${PIP_CONSTRAINT:-/dev/null}" >constraints.log
        echo >>installs.log
        ;;
    *importlib.metadata*) echo "torch==2.10.0a0+nv25.12" ;;
    *ensurepip*) echo 312 ;;
    *--editable*) echo >>editable.log ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in BUILT_FROM:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


def setup(checkout: Path, *words: str, **environment: str) -> None:
    given = {"PATH": "/usr/bin:/bin", "PYTHON": str(checkout / "python3")}
    done = subprocess.run(
        [checkout / "tools/setup.sh", *words],
        env=given | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def installs(checkout: Path) -> int:
    return len((checkout / "installs.log").read_text().splitlines())


def test_the_system_s_torch_stays(checkout: Path) -> None:
    setup(checkout, SYSTEM_TORCH="1", PIP_CONSTRAINT="/etc/pip/constraint.txt")
    wanted = (ROOT / "requirements.txt").read_text()
    pinned = re.search(r"^torch==.*\n", wanted, re.MULTILINE)
    assert pinned is not None
    assert (checkout / "requirements.log").read_text() == wanted.replace(pinned[0], "")
    assert (checkout / "constraints.log").read_text() == "torch==2.10.0a0+nv25.12\n"
    # `make demo` does not know of it, and leaves the environment as it is.
    setup(checkout)
    assert installs(checkout) == 1
    (checkout / "setup.py").write_text("# changed\n")
    setup(checkout)
    assert installs(checkout) == 2
    assert "torch==" not in (checkout / "requirements.log").read_text()


def test_packages_come_without_the_checkout_and_it_later(checkout: Path) -> None:
    setup(checkout, "--packages", SYSTEM_TORCH="1")
    assert (checkout / "requirements.log").exists()
    assert not (checkout / "editable.log").exists()
    environment = (checkout / ".venv/bin/python").stat().st_ino
    setup(checkout)
    assert (checkout / "editable.log").exists()
    assert (checkout / ".venv/bin/python").stat().st_ino == environment, "it was made anew"
    assert "torch==" not in (checkout / "requirements.log").read_text()


def test_without_the_option_all_is_pinned(checkout: Path) -> None:
    setup(checkout)
    assert (checkout / "requirements.log").read_text() == (ROOT / "requirements.txt").read_text()
    assert (checkout / "constraints.log").read_text() == ""
    assert not (checkout / ".venv/pyvenv.cfg").exists()
    setup(checkout)
    assert installs(checkout) == 1
    # Asked for later, it is another environment.
    setup(checkout, SYSTEM_TORCH="1")
    assert installs(checkout) == 2
    assert (checkout / ".venv/pyvenv.cfg").exists()
