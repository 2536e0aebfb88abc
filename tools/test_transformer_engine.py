"""Run the tests of Transformer Engine's layers over its real Python, on a CPU.

    tools/test_transformer_engine.py
    tools/test_transformer_engine.py --versions 2.20.2 -- tests/unit/test_delayed_layers.py -x

The package `transformer-engine` on PyPI is pure Python: all of the library but what is compiled.
It is unpacked in build/ with the packages that it imports. The tests then run over it instead of
tests/unit/stand_in_te.py. Real are the layers, their store of delayed weight gradients and what
they do to parameters; stood in for is the compiled part (tests/unit/compiled_te.py), in plain torch
and without FP8. What has been downloaded once needs no network again. Exit code 1 if a test of any
version failed, 2 if a version could not be had.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
VARIABLE = "ZERO_BUBBLE_TEST_ENGINE"
"""What tests/unit/stand_in_te.py asks for the directory."""
VERSIONS = ("2.8.0", "2.14.1", "2.20.2")
"""The oldest that is supported, one between, and the newest that was read."""
TESTS = ("tests/unit/test_delayed_layers.py", "tests/distributed/test_engine.py")
# What its Python imports besides, and the environment lacks.
COMPANIONS = (
    "annotated-types==0.8.0",
    "einops==0.8.2",
    "pydantic==2.14.4",
    "pydantic-core==2.50.5",
    "typing-inspection==0.4.5",
)


class VersionError(Exception):
    """A version cannot be had."""


def main() -> int:
    """Test the chosen versions, one after the other, and say how each fared."""
    options = _parser().parse_args()
    try:
        failed = [
            version
            for version in options.versions or VERSIONS
            if not _passes(version, _unpacked(version), options.pytest or TESTS)
        ]
    except VersionError as error:
        print(f"test_transformer_engine: error: {error}", file=sys.stderr)
        return 2
    for version in options.versions or VERSIONS:
        print(f"transformer-engine {version}: {'FAILED' if version in failed else 'passed'}")
    return int(bool(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--versions",
        nargs="*",
        default=[],
        metavar="2.N.M",
        help=f"these only; default: {', '.join(VERSIONS)}",
    )
    parser.add_argument("pytest", nargs="*", help="after --: what pytest is to run")
    return parser


def _unpacked(version: str) -> Path:
    """A directory with the version's packages, and with what they import besides."""
    directory = BUILD / f"transformer-engine-{version}"
    if directory.is_dir():
        return directory
    BUILD.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILD) as scratch:
        target = Path(scratch) / "unpacked"
        command = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(target)]
        command += [f"transformer-engine=={version}", *COMPANIONS]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise VersionError(
                f"pip could not fetch transformer-engine {version}: is there a network, and such a "
                "version?"
            )
        target.rename(directory)  # so that what is there is complete
    return directory


def _passes(version: str, packages: Path, tests: Sequence[str]) -> bool:
    print(f"\ntransformer-engine {version}: {packages.relative_to(ROOT)}", flush=True)
    command = [sys.executable, "-m", "pytest", *tests]
    environment = {**os.environ, VARIABLE: str(packages), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
