"""Run the tests against each version of Megatron that this project supports.

    tools/test_versions.py --list
    tools/test_versions.py
    tools/test_versions.py --versions 0.17 0.18 -- tests/unit/test_patching.py -x

A wheel is unpacked beside the environment, in build/, and comes first on the path, so that the
Megatron in the environment stays as it is. What has been downloaded once needs no network again.
By default runs the unit tests that touch Megatron, and of the distributed tests the default tier
of those below. Exit code 1 if a test of any version failed, 2 if a version could not be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.zero_bubble.patches.patching import TESTED_VERSIONS

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
WHEELS = BUILD / "wheels"
DISTRIBUTED = (
    "test_bit_identity.py",
    "test_placements.py",
    "test_features.py",
    "test_features_overlap.py",
    "test_post_validation.py",
    "test_resume.py",
)
# Imported by these versions, and not among what their wheels require.
COMPANIONS = {"0.17": ("pyyaml==6.0.4",), "0.18": ("pyyaml==6.0.4",)}
# What an import would find, without the seconds that it takes.
PROBE = """
from importlib import metadata, util
print(metadata.version("megatron-core"))
for package in ("core", "training", "zero_bubble"):
    print(util.find_spec(f"megatron.{package}").origin)
"""


class VersionError(Exception):
    """A version cannot be had, or would not be what the tests import."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one version."""

    version: str
    passed: bool
    seconds: float
    summary: str
    """The last line of pytest, or what went wrong before."""

    def __str__(self) -> str:
        word = "passed" if self.passed else "FAILED"
        return f"megatron-core {self.version}: {word} in {self.seconds:.0f} s: {self.summary}"


def main() -> int:
    """Test the chosen versions, one after the other, and say how each fared."""
    options = _parser().parse_args()
    if options.list:
        for version in TESTED_VERSIONS:
            print(version, "in the cache" if _unpacked(version).is_dir() else "not in the cache")
        return 0
    try:
        versions = list(map(_pinned, options.versions)) or list(TESTED_VERSIONS)
    except VersionError as error:
        print(f"test_versions: error: {error}", file=sys.stderr)
        return 2
    outcomes = [_outcome(version, options.pytest or _default_tests()) for version in versions]
    print(*outcomes, sep="\n")
    return int(not all(one.passed for one in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--versions", nargs="*", default=[], metavar="0.N", help="these only; default: all"
    )
    parser.add_argument("--list", action="store_true", help="say which there are, and end")
    parser.add_argument("pytest", nargs="*", help="after --: what pytest is to run")
    return parser


def _pinned(wanted: str) -> str:
    """The pin of a minor version, or of a version in full."""
    for version in TESTED_VERSIONS:
        if wanted in (version, _minor(version)):
            return version
    known = ", ".join(map(_minor, TESTED_VERSIONS))
    raise VersionError(f"--versions {wanted}: no such version is tested; give any of {known}")


def _minor(version: str) -> str:
    return version.rpartition(".")[0]


def _default_tests() -> list[str]:
    units = sorted(
        path for path in (ROOT / "tests/unit").glob("test_*.py") if "megatron" in path.read_text()
    )
    distributed = [ROOT / "tests/distributed" / name for name in DISTRIBUTED]
    files = [str(path.relative_to(ROOT)) for path in [*units, *distributed] if path.exists()]
    return ["-m", "not slow", *files]


def _outcome(version: str, tests: Sequence[str]) -> Outcome:
    started = time.monotonic()
    try:
        environment = _environment(_unpack(version))
        print(f"\nmegatron-core {version}: {_probe(version, environment)}", flush=True)
        passed, summary = _run_tests(tests, environment)
    except VersionError as error:
        passed, summary = False, str(error)
    return Outcome(version, passed, time.monotonic() - started, summary)


def _unpacked(version: str) -> Path:
    return BUILD / f"megatron-core-{version}"


def _unpack(version: str) -> Path:
    """A directory with the wheel's packages, and with what they import besides."""
    directory = _unpacked(version)
    if directory.is_dir():
        return directory
    wanted = [f"megatron-core=={version}", *COMPANIONS.get(_minor(version), ())]
    WHEELS.mkdir(parents=True, exist_ok=True)
    missing = [one for one in wanted if not any(_wheels_of(one))]
    if missing:
        # pip compares what it gets with the index's own checksum.
        _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", str(WHEELS), *missing)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        target = Path(scratch) / "unpacked"
        offline = ("--no-index", "--find-links", str(WHEELS))
        _pip("install", "--no-deps", *offline, "--target", str(target), *wanted)
        target.rename(directory)  # so that what is there is complete
    return directory


def _wheels_of(requirement: str) -> Iterator[Path]:
    name, _, version = requirement.partition("==")
    return WHEELS.glob(f"{name.replace('-', '_')}-{version}-*.whl")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode:
        raise VersionError(f"pip {arguments[0]} failed; is there a network?")


def _environment(directory: Path) -> dict[str, str]:
    """Of a process that imports Megatron from this directory, and zero-bubble from here."""
    paths = [str(directory), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }


def _probe(version: str, environment: dict[str, str]) -> str:
    """Where Megatron and zero-bubble come from in that process.

    Raises:
        VersionError: another Megatron would be tested, or another zero-bubble.
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROBE],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise VersionError(f"cannot be imported:\n{done.stderr}")
    found, *files = done.stdout.splitlines()
    wheel = _unpacked(version) / "megatron"
    homes = [wheel / "core", wheel / "training", ROOT / "megatron/zero_bubble"]
    if found != version or [Path(file).parent for file in files] != homes:
        raise VersionError(f"would import {found} from {', '.join(files)}")
    return ", ".join(str(home.relative_to(ROOT)) for home in homes)


def _run_tests(tests: Sequence[str], environment: dict[str, str]) -> tuple[bool, str]:
    """Whether all passed, and the last line of pytest."""
    command = [sys.executable, "-m", "pytest", "--durations", "5", *tests]
    last = ""
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip(" =\n") or last
    return process.returncode == 0, last


if __name__ == "__main__":
    sys.exit(main())
