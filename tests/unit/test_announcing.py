"""What a run says of its layers."""

from __future__ import annotations

import pytest

from megatron.zero_bubble.runtime.announcing import announce_split
from megatron.zero_bubble.runtime.layers import SplitReport

REMARK = (
    " (the weight of output_layer embeds as well; --untie-embeddings-and-output-weights splits it)"
)


@pytest.mark.parametrize(
    ("report", "warned"),
    [
        (SplitReport(("a", "b"), ()), []),
        (SplitReport(("a",), ("router",)), ["stage 3: W stays in B for router"]),
        # Under MXFP8 an output layer is Transformer Engine's, and embeds nothing.
        (SplitReport(("a",), ("output_layer",)), ["stage 3: W stays in B for output_layer"]),
        (
            SplitReport(("a",), ("router", "output_layer"), ("output_layer",)),
            [f"stage 3: W stays in B for router, output_layer{REMARK}"],
        ),
    ],
)
def test_layers_that_are_not_split_are_named_with_the_reason(
    caplog: pytest.LogCaptureFixture, report: SplitReport, warned: list[str]
) -> None:
    caplog.set_level("INFO")
    announce_split(3, report)
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == warned
    assert caplog.records[0].message == (
        f"stage 3: {len(report.split)} linear layers give B and W apart"
    )
