"""Which microbatch size is best, with 1F1B and without a bubble."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.profile.compare import main
from zero_bubble.costs import Costs
from zero_bubble.placement import linear
from zero_bubble.profile.microbatch_size import trade
from zero_bubble.profile.profile import Profile, Scalar, save_profile
from zero_bubble.profile.whatif import Limit

GIB = 2.0**30
Capture = pytest.CaptureFixture[str]


def fixed(*memory: float, name: str = "own") -> Limit:
    return Limit(name, lambda placement, costs: memory, "--memory-limit own")


def sized(size: int, whole_pass: float, **fields: object) -> tuple[str, Profile]:
    """Four stages whose F, B and W take ``whole_pass`` ms each, a GiB a sample."""
    t = whole_pass
    costs = Costs.uniform(linear(4), t, t, t, m_b=size * GIB, m_w=size * GIB / 2)
    job: dict[str, Scalar] = {
        "micro_batch_size": size,
        "global_batch_size": 32,
        "data_parallel_size": 1,
        "seq_length": 1000,
    }
    profile = Profile(placement=linear(4), costs=costs, job=job, **fields)  # type: ignore[arg-type]
    return f"size-{size}.json", profile


def two_stages() -> tuple[str, Profile]:
    profile = sized(1, 1.0)[1]
    costs = Costs.uniform(linear(2), 1, 1, 1)
    return "two.json", Profile(placement=linear(2), costs=costs, job=profile.job)


TWO = [sized(2, 1.9), sized(1, 1.0)]


def test_with_a_zero_bubble_the_larger_microbatch_wins() -> None:
    """1F1B costs (m + 3) 3 t: 105 ms for size 1, 108.3 for size 2, whose work is 91.2, not 96.

    With 2p of size 2 in memory ZB-H2 has no bubble at either, so that only the work counts.
    """
    found = trade(TWO, limit=fixed(*[16 * GIB] * 4))
    costs = {(one.size, one.family): one.outcome.cost for one in found.choices}
    assert costs == pytest.approx(
        {
            (1, "1F1B"): 105.0,
            (2, "1F1B"): 108.3,
            (1, "zero bubble"): 96.0,
            (2, "zero bubble"): 91.2,
            (1, "zero bubble, V"): 96.0,
            (2, "zero bubble, V"): 91.2,
        }
    )
    assert [(one.size, one.batch.microbatches) for one in found.choices[::3]] == [(1, 32), (2, 16)]
    assert (found.best.size, found.best.outcome.estimated) == (2, False)
    assert found.best_1f1b is not None
    assert found.best_1f1b.size == 1
    assert found.conclusion() == (
        "best: size 2 with zb-h2 (91.20 ms); of another size: size 1 with zb-h2 (96.00 ms), "
        "5.3% more; best 1F1B: size 1 with 1f1b (105.00 ms), 15.1% more"
    )


def test_at_the_memory_of_1f1b_the_bubble_decides() -> None:
    """1p of size 2 is 2p of size 1: no bubble there, but 3 (t + t - t) = 5.7 ms with size 2."""
    found = trade(TWO)
    assert found.memory == (8 * GIB,) * 4
    costs = {(one.size, one.family): one.outcome.cost for one in found.choices}
    assert costs[1, "zero bubble"] == pytest.approx(96.0)
    assert costs[2, "zero bubble"] == pytest.approx(91.2 + 5.7)
    measured = found.best_measured
    assert measured is not None
    assert (measured.size, measured.outcome.name) == (1, "zb-h2")
    # A V has no bubble in this memory, if its halves are half as long.
    assert (found.best.size, found.best.family) == (2, "zero bubble, V")
    assert "size 2 with zb-v (91.20 ms, estimated)" in found.conclusion()


def test_the_least_of_limit_and_rooms_counts() -> None:
    rooms = [
        sized(1, 1.0, room=(20 * GIB, None, 9 * GIB, 20 * GIB)),
        sized(2, 1.9, room=(18 * GIB, 30 * GIB, 20 * GIB, None)),
    ]
    found = trade(rooms, limit=fixed(*[19 * GIB] * 4))
    assert found.memory == (18 * GIB, 19 * GIB, 9 * GIB, 19 * GIB)
    assert found.memory_origin == "--memory-limit own and the room of the profiles"
    for one in found.choices:
        peaks = zip(one.outcome.timeline.peak_memory, found.memory, strict=True)
        assert all(peak <= most for peak, most in peaks), one


def test_a_room_of_one_profile_counts_for_all() -> None:
    found = trade([TWO[0], sized(1, 1.0, room=(8 * GIB,) * 4)], global_batch_size=4)
    assert found.memory == (8 * GIB,) * 4
    assert found.memory_origin == "the room of one of the profiles"


def test_what_does_not_fit_is_told() -> None:
    """3 GiB: less than the 4 microbatches of 1F1B's first stage, and than two of size 2."""
    found = trade(TWO, limit=fixed(*[3 * GIB] * 4), global_batch_size=8)
    assert found.left_out == ((1, "1F1B"), (2, "1F1B"))
    assert found.conclusion().endswith("1F1B does not fit at any size")
    found = trade(TWO, limit=fixed(*[1.5 * GIB] * 4), global_batch_size=4)
    assert {one.size for one in found.choices} == {1}
    assert (2, "zero bubble") in found.left_out
    nothing = r"^--memory-limit own: at no microbatch size .* with size 1 it takes up to 1 GiB on"
    with pytest.raises(ValueError, match=nothing):
        trade(TWO, limit=fixed(*[0.5 * GIB] * 4))


def test_a_cheap_fused_backward_is_1f1b_s_alone() -> None:
    """1F1B takes (m + 3) 2 ms with a fused backward of 1 ms, and what splits it at least 3 m."""
    fused = []
    for name, one in TWO:
        costs = Costs.from_dict({**one.costs.to_dict(), "t_bw": [[1.0]] * 4})
        fused.append((name, Profile(placement=one.placement, costs=costs, job=one.job)))
    found = trade(fused, global_batch_size=16)
    times = {(one.size, one.family): one.outcome.cost for one in found.choices}
    assert times[1, "1F1B"] == pytest.approx(38)
    assert times[1, "zero bubble"] >= 48
    assert found.best.family == "1F1B"
    assert found.conclusion().endswith(f"1F1B's best size is {found.best.size}")


def changed(profile: tuple[str, Profile], **job: Scalar) -> tuple[str, Profile]:
    name, one = profile
    return name, Profile(placement=one.placement, costs=one.costs, job={**one.job, **job})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            changed(TWO[1], seq_length=2000),
            "seq_length 1000 in size-2.json, 2000 in size-1.json: only micro_batch_size may differ",
        ),
        (
            changed(TWO[1], global_batch_size=64),
            "global_batch_size 32 in size-2.json, 64 in size-1.json: only micro_batch_size may "
            "differ, or give --global-batch-size",
        ),
        (
            # What people choose comes before what follows from it, and before the alphabet.
            changed(
                TWO[1], activation="gelu", bf16=True, hidden_size=64, num_layers=8, swiglu=True
            ),
            "num_layers nothing in size-2.json, 8 in size-1.json; hidden_size nothing in "
            "size-2.json, 64 in size-1.json; activation nothing in size-2.json, gelu in "
            "size-1.json; bf16 nothing in size-2.json, True in size-1.json and 1 more: only "
            "micro_batch_size may differ",
        ),
        (
            changed(TWO[1], global_batch_size=64, hidden_size=64),
            "global_batch_size 32 in size-2.json, 64 in size-1.json; hidden_size nothing in "
            "size-2.json, 64 in size-1.json: only micro_batch_size may differ",
        ),
        (TWO[0], "size-2.json and size-2.json: both have micro_batch_size 2"),
        (changed(TWO[1], micro_batch_size=None), "size-1.json: field 'job' has no micro_batch"),
        (changed(TWO[1], micro_batch_size="1"), "size-1.json: micro_batch_size: expected a number"),
        (changed(TWO[1], micro_batch_size=5), "size-1.json: the profile's global_batch_size 32:"),
        (two_stages(), "two.json: placement linear of 2 stages, not linear of 4"),
    ],
)
def test_only_the_microbatch_size_may_differ(other: tuple[str, Profile], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}(?!, or)"):
        trade([TWO[0], other])


def test_a_batch_size_that_is_given_may_differ_in_the_jobs() -> None:
    found = trade([TWO[0], changed(TWO[1], global_batch_size=64)], global_batch_size=8)
    assert found.global_batch_size == 8
    assert {(one.size, one.batch.microbatches) for one in found.choices} == {(1, 8), (2, 4)}


def test_the_trade_s_table(tmp_path: Path, capsys: Capture) -> None:
    """2p counts in the M_B of the larger microbatch, in whichever order they come."""
    for name, profile in TWO:
        save_profile(profile, tmp_path / name)
    files = [str(tmp_path / name) for name, _ in TWO]
    written = tmp_path / "trade.json"
    flags = ["--memory-limit", "2p", "--global-batch-size", "16", "--json", str(written)]
    assert main([*files, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "linear, 4 stages, global batch size 16",
        "limit: --memory-limit 2p = 16 GiB on every stage",
    ]
    plain = next(line for line in lines if line.split()[:3] == ["1", "16", "1F1B"])
    # 16 * 3 of work and 3 * 3 of bubble; 16 samples of 1000 tokens.
    assert plain.split()[3:] == [
        *("1f1b", "measured", "48.00", "57.00", "15.79%", "4", "GiB"),
        f"{16000 / 0.057:.0f}",
    ]
    data = json.loads(written.read_text())
    assert data["memory"] == [16 * GIB] * 4
    assert [one["micro_batch_size"] for one in data["choices"]] == [1, 1, 1, 2, 2, 2]
    assert lines[-1] == data["conclusion"]
