"""The table of memory in docs/cluster.md: by formulas, from the paper's sizes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
VOCABULARY = 50304
"""50257 padded to a multiple of 128."""


def rows() -> dict[str, list[float]]:
    text = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
    table = text.split("| | Weights and optimizer |")[1].split("\n\n")[0]
    found = re.findall(r"^\| ([\d.]+B) \| (.*) \|$", table, re.MULTILINE)
    return {model: [float(cell) for cell in cells.split(" | ")] for model, cells in found}


@pytest.mark.parametrize("model", ["1.5B", "6.2B", "14.6B", "28.3B"])
def test_memory_of_the_fullest_gpu(model: str) -> None:
    table = json.loads((ROOT / "zero_bubble/data/paper_table5.json").read_text())["rows"]
    size = next(one for one in table if one["model"] == model)
    s, b, h, a = (size[one] for one in ("seq", "microbatch_size", "hidden", "heads"))
    stages = size["stages"]
    layers = (size["layers"] + 2) // stages  # the embedding and the head count as one each
    of_layer, of_embedding = 12 * h * h, VOCABULARY * h
    # Stage 0 embeds, and has a layer less and a microbatch more than stage 1.
    weights = 18 * max(of_layer * layers, of_layer * (layers - 1) + of_embedding)
    one = s * b * h * (34 + 5 * a * s / h)
    activations = one * max((layers - 1) * stages, layers * (stages - 1))
    checkpoint = 14 * (of_layer * size["layers"] + of_embedding)
    in_gib = [value / GIB for value in (weights, activations, 2 * activations, checkpoint)]
    assert rows()[model] == pytest.approx(in_gib, abs=0.5, rel=0.01)
