"""What must hold in every run of ours apart from its bits, by what the runtime says it did.

`watch.RuntimeWatch` listens in the ranks, `check_runtime` judges in pytest's process.
"""

from __future__ import annotations

from tests.distributed.harness import Result
from zero_bubble.costs import Costs
from zero_bubble.lower import lower
from zero_bubble.schedule import Kind, Schedule
from zero_bubble.simulate import simulate

__all__ = ["check_runtime"]


def check_runtime(result: Result, schedule: Schedule, *, runs_ahead: bool = False) -> None:
    """Every rank executed the schedule's own program, and W ran in W passes only.

    The schedule is lowered here anew, so that the runtime is not asked what it meant to do.
    AssertionError says which rank and batch did something else. A stage that ``runs_ahead`` posts
    some of its receives later; passes and sends keep their order, and receives theirs.
    """
    config = result.config
    program = lower(schedule)
    store_peak = simulate(schedule, Costs.uniform(schedule.placement, 1, 1, 1)).peak_weight_store
    for rank, record in enumerate(result.ranks):
        batches = record["runtime"]
        assert len(batches) == config.iterations, f"rank {rank} ran {len(batches)} batches of ours"
        for index, batch in enumerate(batches):
            where, stage = f"rank {rank}, iteration {index}", batch["stage"]
            expected = list(map(str, program.instructions[stage]))
            executed = batch["executed"]
            if runs_ahead:
                executed, expected = _receives_last(executed), _receives_last(expected)
            assert executed == expected, f"{where}: executed another program"
            assert batch["weight_store_peak"] == store_peak[stage], f"{where}: pending W's"
            computed = {kind for kind, count in batch["weights_in"].items() if count}
            splits = any(True for _ in schedule.order(stage, (Kind.W,)))
            by_w = {"W"} if batch["linears"] else set()
            assert computed == (by_w if splits else set()), f"{where}: W ran in {computed}"
            # The runtime's own count is one witness, the gradients themselves are another.
            moved = {kind for kind, count in batch["moved_in"].items() if count}
            assert moved == (by_w if splits else {"BW"}), f"{where}: main_grad moved in {moved}"


def _receives_last(instructions: list[str]) -> list[str]:
    return sorted(instructions, key=lambda one: "RECV" in one)
