"""What test_partition.py asks of Megatron, in a process in CPU mode."""

from __future__ import annotations


def kinds_by_rank(layout: str, stages: int, num_layers: int) -> list[list[list[str]]]:
    """``[rank][virtual stage]``: the layers there, if Megatron takes the layout for valid."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    parsed = PipelineParallelLayerLayout.from_str(layout, stages)
    parsed.validate_layer_layout(num_layers, 0)
    names = {"decoder": "transformer"}
    return [
        [[names.get(layer.name, layer.name) for layer in part] for part in rank]
        for rank in parsed.layout
    ]
