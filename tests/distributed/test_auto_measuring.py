"""What measuring costs a job, and what it is good for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.zero_bubble.local_job import run_ranks
from tests.distributed.configs import Config
from tests.distributed.harness import Result
from zero_bubble.builders import BUILDERS, build
from zero_bubble.export.json_io import load_file
from zero_bubble.profile.profile import load_profile
from zero_bubble.simulate import simulate

RANK = Path(__file__).with_name("auto_measuring_rank.py")
ROOT = RANK.parents[2]
KEPT = re.compile(r"measuring keeps (\d+) bytes a pass")
AUTO = (
    *("--pipeline-schedule", "auto", "--zero-bubble-memory-limit", "2p"),
    *("--zero-bubble-effort", "quick", "--zero-bubble-wait-for-search"),
    *("--zero-bubble-drift-interval", "0"),
)


def test_auto_schedule_measures_without_waits_and_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Iterations 4 and 5 are timed, 2 and 6 are not; all four run the same schedule."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config, record = Config(iterations=8), tmp_path / "calls"
    flags = ("--zero-bubble-profile-iters", "3:5", "--data-cache-path", str(tmp_path / "cache"))
    command = [str(RANK), str(record), *config.flags(), *AUTO, *flags]
    run_ranks(command, config.world_size, logs=tmp_path, time_limit=240)
    for rank in range(config.world_size):
        _, plain, whole, *timed, after, _, _ = json.loads(Path(f"{record}.{rank}").read_text())
        events = [_take_records(step) for step in (plain, whole, *timed, after)]
        # Two or three a pass, and those of the reduction and the step: what measures is on.
        passes = 3 * config.num_microbatches
        assert events[0] == events[4] == 0
        assert all(2 * passes < number <= 3 * passes + 4 for number in events[1:4]), events
        assert timed == [plain, plain]
        assert after == plain
        assert any(name.startswith("isend zero_bubble/") for name in plain)
        waits = [name for name in plain if name.startswith("synchronize zero_bubble/")]
        assert waits == []
        # The count would see messages that measure: the round's first iteration has them.
        assert _number(whole, "isend") > _number(plain, "isend")
    kept = KEPT.search((tmp_path / "rank0.log").read_text())
    assert kept is not None
    with capsys.disabled():
        print(f"\nmeasuring keeps {kept[1]} bytes a pass")
    assert 0 < int(kept[1]) < 2000


def _take_records(step: dict[str, int]) -> int:
    """Take out the marks of events, which wait for nothing; how many there were of ours."""
    names = [name for name in step if name.startswith("record ")]
    return sum(step.pop(name) for name in names if "zero_bubble/" in name)


def _number(step: dict[str, int], call: str) -> int:
    return sum(number for name, number in step.items() if name.split()[0] == call)


@pytest.mark.slow
def test_auto_schedule_is_no_worse_than_any_fixed_one_on_the_times_of_its_own_run(
    train: Callable[..., Result], tmp_path: Path
) -> None:
    """Stage 2 has four layers, the others three. Steps that are validated afterwards have no
    barrier, so that the cost, of each stage from its own start to its end, is what counts."""
    layout = ("--pipeline-model-parallel-layout", "Ettt|ttt|tttt|tttL")
    config = Config(
        pp=4, layers=13, hidden=128, sequence=64, microbatches=6, iterations=10, clip_grad=0.0,
        extra=layout,
    )  # fmt: skip
    flags = ("--zero-bubble-profile-iters", "3:7", "--zero-bubble-cache", str(tmp_path))
    result = train(config, *AUTO[1:], *flags, "--optimizer-post-validation")
    profile, found = load_profile(tmp_path / "profile.json"), load_file(tmp_path / "schedule.json")
    costs, limits = profile.costs, found.memory_limit
    assert found.costs == costs
    assert limits is not None
    # Heavier by count: which stage's times come out longest depends on the machine's other work.
    (m_b, *_), (heavy, *_) = costs.m_b[1], costs.m_b[2]
    assert heavy / m_b == pytest.approx(4 / 3, rel=0.02)
    assert limits == tuple(2 * config.pp * held for (held,) in costs.m_b)
    cost = simulate(found.schedule, costs).cost
    compared = []
    for name, builder in BUILDERS.items():
        if builder.is_linear:
            timeline = simulate(build(name, config.pp, config.num_microbatches), costs)
            if all(
                held <= limit * (1 + 1e-9)
                for held, limit in zip(timeline.peak_memory, limits, strict=True)
            ):
                compared.append(name)
                assert cost <= timeline.cost * (1 + 1e-9), (name, cost, timeline.cost)
    assert {"1f1b", "zb-h1", "zb-h2"} <= set(compared)
    # It is what ran in the end.
    last = result.ranks[0]["runtime"][-1]["executed"]
    assert [one for one in last if re.fullmatch(r"\d[FIWB]\d+", one)] == [
        str(one) for one in found.schedule.passes[0]
    ]
