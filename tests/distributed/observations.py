"""What must hold in every run of ours apart from its bits, by what the runtime says it did.

`watch.RuntimeWatch` listens in the ranks, `check_runtime` judges in pytest's process.
"""

from __future__ import annotations

from tests.distributed.harness import Result
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.simulate import simulate
from zero_bubble.tail import reorder_row

__all__ = ["check_runtime"]


def check_runtime(result: Result, schedule: Schedule, *, runs_ahead: bool = False) -> None:
    """Every rank executed the schedule's own program, and W ran in W passes only.

    The schedule is lowered here anew, so that the runtime is not asked what it meant to do.
    AssertionError says which rank and batch did something else. A stage that ``runs_ahead`` posts
    some of its receives later; passes and sends keep their order, and receives theirs. Where
    reductions overlap, the last W's of a batch but the first may run by parameter.
    """
    config = result.config
    overlaps = config.dp * config.cp > 1 and "--overlap-grad-reduce" in config.extra
    program = lower(schedule)
    store_peak = simulate(schedule, _any_costs(schedule)).peak_weight_store
    for rank, record in enumerate(result.ranks):
        batches = record["runtime"]
        assert len(batches) == config.iterations, f"rank {rank} ran {len(batches)} batches of ours"
        for index, batch in enumerate(batches):
            where, stage = f"rank {rank}, iteration {index}", batch["stage"]
            executed = batch["executed"]
            row = program.instructions[stage]
            if index and overlaps:
                row = reorder_row(row, _shares(executed))
            expected = list(map(str, row))
            if runs_ahead:
                executed, expected = _receives_last(executed), _receives_last(expected)
            assert executed == expected, f"{where}: executed another program"
            assert batch["weight_store_peak"] == store_peak[stage], f"{where}: pending W's"
            computed = {kind for kind, count in batch["weights_in"].items() if count}
            splits = any(True for _ in schedule.order(stage, (Kind.W,)))
            least = {"W"} if batch["linears"] else set()
            # W's hide the reductions of tensor-parallel B's.
            most = least | {"B"} if config.tp > 1 else least
            if splits:
                assert least <= computed <= most, f"{where}: W ran in {computed}"
            else:
                assert not computed, f"{where}: W ran in {computed}"
                least = most = {"BW"} if batch["linears"] else set()
            # The runtime's own count is one witness, the gradients themselves are another.
            moved = {kind for kind, count in batch["moved_in"].items() if count}
            if overlaps and splits and len(schedule.placement.positions[stage]) > 1:
                most = most | {"B"}  # one chunk's gradients are reduced while others run B
            assert least <= moved <= most, f"{where}: main_grad moved in {moved}"


def _any_costs(schedule: Schedule) -> Costs:
    """How many bundles wait for W is a matter of the order alone."""
    recomputes = any(schedule.chunks_with(Kind.R))
    of_r = {"t_r": 1.0, "m_r": 0.5} if recomputes else {}
    return Costs.uniform(schedule.placement, 1, 1, 1, **of_r)


def _shares(executed: list[str]) -> int:
    """Into how many shares W's were cut; only the model tells."""
    return max((int(one.partition("/")[2] or 1) for one in executed), default=1)


def _receives_last(instructions: list[str]) -> list[str]:
    return sorted(instructions, key=lambda one: "RECV" in one)
