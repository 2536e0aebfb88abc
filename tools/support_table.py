"""Write docs/support.md: what is tested to work with which schedule, from the tests' own registry.

.venv/bin/python tools/support_table.py           # write
.venv/bin/python tools/support_table.py --check   # exit 1 if the file is not what this writes
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from megatron.zero_bubble.patches.patching import TESTED_VERSIONS  # noqa: E402
from tests.distributed.feature import SCHEDULES, Feature, Promise, typed  # noqa: E402
from tests.distributed.features import DEFAULT, FEATURES  # noqa: E402
from tests.distributed.harness import ROUNDING  # noqa: E402

__all__ = ["FILE", "main", "table"]

FILE = ROOT / "docs" / "support.md"
COMMAND = "make support-table"

HEAD = f"""# What works with what

Made by `{COMMAND}` from the registry that `tests/distributed/test_features.py` runs; CI checks
that it is up to date. Each cell but "not run here" is a test:

    .venv/bin/python -m pytest tests/distributed -k features

- **bit-identical**: losses, gradient norms, parameters and optimizer state are equal in every bit
  to those of Megatron's own 1F1B schedule under the same flags. A V (zb-v) has its layers on other
  ranks, so that both runs start from one checkpoint, without dropout, and without clipping, whose
  norm is added in another order. With `--optimizer-post-validation` the other run is that of the
  same schedule which steps synchronously and adds the norm alike (`--canonical-grad-norm`); for
  auto it is Megatron's, without clipping.
- **to {ROUNDING:g}**: equal but for the order in which a sum is added, relatively.
- **rejected**: the run ends before it begins, with a message that names the flag and what would
  work.
- **not run here**: needs a GPU or Transformer Engine. The tests run on CPUs, over gloo.

Cells with * are in the default tier (`make test`); `make test-full` runs all of them. The rows run
with megatron-core {{versions}}.
"""


def table() -> str:
    """The whole page."""
    parts = [HEAD.format(versions=", ".join(TESTED_VERSIONS))]
    rows = FEATURES.items()
    for group, features in itertools.groupby(rows, key=lambda one: one[1].group):
        parts.append(f"## {group}\n\n" + "\n".join(_group(dict(features))) + "\n")
    return "\n".join(parts)


def _group(features: dict[str, Feature]) -> Iterator[str]:
    yield "| | Flags | " + " | ".join(SCHEDULES) + " |"
    yield "| --- " * (2 + len(SCHEDULES)) + "|"
    for name, feature in features.items():
        cells = (_cell(name, schedule) for schedule in SCHEDULES)
        note = f". {feature.note}" if feature.note else ""
        yield f"| {feature.title}{note} | {_flags(feature)} | " + " | ".join(cells) + " |"


def _cell(name: str, schedule: str) -> str:
    mark = " *" if (name, schedule) in DEFAULT else ""
    return _said(FEATURES[name].promise(schedule)) + mark


def _said(promise: Promise) -> str:
    match promise.kind:
        case "identical":
            return "bit-identical"
        case "tolerance":
            return f"to {ROUNDING:g}: {promise.why}"
        case "rejected":
            return f"rejected: {promise.why}"
        case "untested":
            return promise.why


def _flags(feature: Feature) -> str:
    words = [feature.flags_as_typed or typed(feature.config), *feature.ours]
    text = " ".join(filter(None, words)).replace(
        "|", "\\|"
    )  # a layout has them, and so has a table
    if feature.config.frozen:
        text = "requires_grad_(False)"  # Megatron has no flag for it
    return f"`{text}`" if text else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args(arguments).check:
        if FILE.exists() and FILE.read_text(encoding="utf-8") == table():
            return 0
        print(f"{FILE.relative_to(ROOT)} is not what the tests say: run `{COMMAND}`")
        return 1
    FILE.write_text(table(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
