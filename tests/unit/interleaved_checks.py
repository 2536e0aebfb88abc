"""What test_interleaved.py asks of Megatron, in a process in CPU mode."""

from __future__ import annotations

from types import SimpleNamespace

Numbers = tuple[list[int], list[tuple[int, int]]]


def numbers_of_megatron(sizes: list[tuple[int, int, int, int]]) -> list[Numbers]:
    """For each (stages, chunks, microbatches, group): what Megatron's interleaved schedule reads.

    The number of warm-up forwards of each stage, and the (microbatch, chunk) of each forward.
    """
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    def warm_up(stage: int, stages: int, chunks: int, microbatches: int, group: int) -> int:
        place = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
        communicator = SimpleNamespace(
            pp_group=place, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
        )
        numbers = get_pp_rank_microbatches(
            microbatches, chunks, group, p2p_communicator=communicator
        )
        return int(numbers[2])

    return [
        (
            [warm_up(stage, stages, chunks, microbatches, group) for stage in range(stages)],
            get_schedule_table(microbatches, chunks, group),
        )
        for stages, chunks, microbatches, group in sizes
    ]
