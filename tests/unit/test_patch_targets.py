"""Each patch finds what it changes in the Megatron at hand: of each version, in test_versions."""

from __future__ import annotations

from pathlib import Path

from tests.unit.cpu_mode import checks_of

check = checks_of("tests.unit.patch_target_checks")
PATCHES = Path(__file__).parents[2] / "megatron/zero_bubble/patches"


def test_each_patch_finds_its_target() -> None:
    found = check("targets")
    files = {path.stem for path in PATCHES.glob("*.py") if "Patch(" in path.read_text()}
    assert found.keys() == files
    for module, targets in found.items():
        assert targets, f"{module} installs nothing"
        for name, wrong in targets.items():
            assert not wrong, f"{name} of {module}: {wrong}"
