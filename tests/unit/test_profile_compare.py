"""What each schedule would give for a profile: the outcomes, and the tool that prints them."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.cheapest import cheapest as cheapest_order
from tools.profile.compare import main, parser
from zero_bubble.costs import Costs, Table, paper_profiles
from zero_bubble.placement import Placement, linear, v_shape
from zero_bubble.profile.batch import Batch
from zero_bubble.profile.profile import Profile, Scalar, save_profile
from zero_bubble.profile.whatif import Case, Limit, cases, named, room_limit, searched, what_if
from zero_bubble.search.problem import Problem

ROOT = Path(__file__).parents[2]
GIB = 2.0**30
JOB: dict[str, Scalar] = {
    "micro_batch_size": 2,
    "global_batch_size": 32,
    "data_parallel_size": 2,
    "seq_length": 100,
}
Capture = pytest.CaptureFixture[str]


def equal_stages(stages: int = 4, **job: Scalar) -> Profile:
    costs = Costs.uniform(linear(stages), 1, 1, 1, m_b=GIB, m_w=GIB / 2)
    return Profile(placement=linear(stages), costs=costs, job={**JOB, **job})


def fixed(*memory: float, name: str = "own") -> Limit:
    return Limit(name, lambda placement, costs: memory, "--memory-limit own")


def test_a_placement_of_one_s_own_has_no_estimates() -> None:
    custom = Placement(((0, 1), (2,)))
    found, left_out = cases(Profile(placement=custom, costs=Costs.uniform(custom, 1, 1, 1)))
    assert [one.placement for one in found] == [custom]
    names = [name for name, _ in left_out]
    assert names == ["placement linear", "placement interleaved", "placement v"]


def test_a_placement_needs_a_layer_for_each_chunk() -> None:
    found, left_out = cases(equal_stages(4, num_layers=7))
    assert [one.placement.name for one in found] == ["linear"]
    assert ("placement v", "7 layers cannot be cut into 8 chunks") in left_out
    assert len(cases(equal_stages(4, num_layers=8))[0]) == 3


# The table of schedules.


@pytest.mark.parametrize("row", [0, 9])
def test_rates_of_table_5(row: int) -> None:
    paper = paper_profiles()[row]
    case = Case(linear(paper.stages), paper.costs)
    rates = {one.name: one.timeline.bubble_rate for one in named(case, paper.microbatches)}
    for name in ("1f1b", "zb-h1", "zb-h2"):
        assert f"{rates[name]:.4f}" == f"{paper.bubble_rates[name]:.4f}", name


def test_the_search_is_as_good_as_table_5() -> None:
    paper = paper_profiles()[0]
    case = Case(linear(paper.stages), paper.costs)
    for factor in (1, 2):
        limit = fixed(*[float(factor * paper.stages)] * paper.stages, name=f"{factor}p")
        found = searched(case, paper.microbatches, limit, "quick")
        assert found.name == f"auto-linear-{factor}p"
        assert found.timeline.bubble_rate < paper.bubble_rates[f"zb-{factor}p"] + 5e-5
        assert found.bound <= found.cost * (1 + 1e-9)
        assert found.peak <= factor * paper.stages


def test_equal_stages_by_the_paper_s_formulas() -> None:
    """Work 8 * 3 = 24; bubbles 3 (1+1+1), 3 (1+1-1) and 3 (1+1-2); the V has none at 1p."""
    found = what_if(equal_stages(), 8, fixed(*[4 * GIB] * 4))
    by_name = {one.name: one for one in found.outcomes}
    assert [*by_name] == [
        *("gpipe", "1f1b", "zb-h1", "zb-h2"),
        *("interleaved", "zb-interleaved", "zb-v", "v-half", "v-min"),
        *("auto-linear-1p", "auto-linear-2p"),
        *("auto-interleaved-1p", "auto-interleaved-2p", "auto-v-1p", "auto-v-2p"),
    ]  # the limit is 1p: it is not searched again
    for name, cost, peak, fits in [
        ("1f1b", 33, 4, True),
        ("zb-h1", 27, 4, True),
        ("zb-h2", 24, 7, False),
        ("gpipe", 33, 8, False),
        ("zb-v", 24, 4, True),
    ]:
        one = by_name[name]
        assert (one.cost, one.peak / GIB, one.fits) == (cost, peak, fits), name
    assert by_name["1f1b"].bound == by_name["zb-h1"].bound == by_name["auto-linear-1p"].cost == 27
    assert by_name["auto-linear-2p"].cost == by_name["auto-v-1p"].cost == 24
    assert {one.name for one in found.outcomes if one.estimated} == {
        name for name in by_name if "v" in name.split("-") or "interleaved" in name
    }
    assert found.best is not None
    assert (found.best.cost, found.best.estimated) == (24, True)
    assert found.left_out == ()


def test_what_is_measured_is_preferred_to_what_is_estimated() -> None:
    """Without a limit ZB-H2 has no bubble either, though it needs more memory than the V."""
    best = what_if(equal_stages(), 8).best
    assert best is not None
    assert best.cost == 24
    assert not best.estimated
    assert best.fits is None


def test_a_v_s_profile_shows_linear_schedules_as_estimates() -> None:
    costs = Costs.uniform(v_shape(4), 0.5, 0.5, 0.5, m_b=GIB / 2)
    found = what_if(Profile(placement=v_shape(4), costs=costs), 8)
    by_name = {one.name: one for one in found.outcomes}
    assert (by_name["1f1b"].cost, by_name["1f1b"].estimated) == (33, True)
    assert (by_name["zb-v"].cost, by_name["zb-v"].estimated) == (24, False)


def test_what_cannot_be_is_left_out_with_its_reason() -> None:
    """A V's second stage holds half of the first one's 8: more than a limit of 1."""
    table: Table = ((1.0,), (1.0,))
    costs = Costs(t_f=table, t_b=table, t_w=table, m_b=((8.0,), (1.0,)), m_w=table)
    found = what_if(Profile(placement=linear(2), costs=costs), 3, fixed(16, 1))
    reasons = dict(found.left_out)
    assert {*reasons} == {"auto-interleaved-own", "auto-v-own"}
    assert (
        "memory limit 1 of stage 1 cannot be met: one microbatch takes 4.5"
        in (reasons["auto-v-own"])
    )
    assert {one.name: one.fits for one in found.outcomes if one.name.endswith(("own", "1p"))} == {
        "auto-linear-own": True,
        "auto-linear-1p": False,
        "auto-interleaved-1p": False,
        "auto-v-1p": False,
    }


times = st.integers(1, 9)


@settings(max_examples=12)
@given(times, times, times, st.floats(0.3, 1.2), st.integers(1, 4))
def test_no_schedule_is_below_its_bound(t_f: int, t_b: int, t_w: int, fused: float, m: int) -> None:
    """Also where the fused backward takes less than B and W."""
    costs = Costs.uniform(linear(3), t_f, t_b, t_w, 0.5, t_bw=fused * (t_b + t_w))
    for one in named(Case(linear(3), costs), m):
        assert one.bound <= one.cost * (1 + 1e-9), one.name


@settings(max_examples=4)
@given(times, times, times)
def test_a_bound_holds_for_every_order_with_that_memory(t_f: int, t_b: int, t_w: int) -> None:
    costs = Costs.uniform(linear(2), t_f, t_b, t_w)
    for one in named(Case(linear(2), costs), 2):
        problem = Problem.of(linear(2), costs, 2, one.peak)
        assert one.bound <= cheapest_order(problem) * (1 + 1e-9), one.name


def test_room_is_a_limit_where_it_is_known() -> None:
    profile = equal_stages(2)
    assert room_limit(profile) is None
    known = Profile(placement=profile.placement, costs=profile.costs, room=(None, GIB))
    limit = room_limit(known)
    assert limit is not None
    assert [*limit.of(known.placement, known.costs)] == [float("inf"), GIB]
    fits = {one.name: one.fits for one in what_if(known, 4, limit).outcomes}
    assert (fits["1f1b"], fits["gpipe"]) == (True, False)


# The batch.


def test_microbatches_of_the_job() -> None:
    """32 samples over 2 replicas in microbatches of 2; 100 tokens a sample, in 0.5 s."""
    batch = Batch.of(equal_stages())
    assert batch == Batch(microbatches=8, samples=32, tokens=3200)
    assert (batch.unit, batch.rate(500.0)) == ("tokens/s", 6400.0)
    assert Batch.of(equal_stages(), global_batch_size=8).microbatches == 2
    assert Batch.of(equal_stages(), microbatches=3).samples == 12
    no_length = Batch.of(equal_stages(seq_length=None))
    assert (no_length.unit, no_length.rate(500.0)) == ("samples/s", 64.0)
    unknown = Batch.of(equal_stages(data_parallel_size=None), microbatches=5)
    assert (unknown.microbatches, unknown.unit, unknown.rate(1.0)) == (5, None, None)


# The tool.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Holds the files that the examples of ``--help`` name; it is where they run."""
    save_profile(equal_stages(2), tmp_path / "profile.json")
    for size in (1, 2):
        save_profile(equal_stages(2, micro_batch_size=size), tmp_path / f"size-{size}.json")
    save_profile(equal_stages(4), tmp_path / "four.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_examples_of_the_help_work(folder: Path, capsys: Capture) -> None:
    examples = parser().format_help().split("examples:\n")[1].strip().splitlines()
    assert len(examples) >= 4
    for line in examples:
        words = shlex.split(line)
        assert words[0] == "tools/profile/compare.py"
        assert (ROOT / words[0]).is_file()
        assert main(words[1:]) == 0, line
        assert "best" in capsys.readouterr().out
    data = json.loads((folder / "compared.json").read_text())
    assert data["microbatches"] == 16
    rows = {row["schedule"]: row for row in data["schedules"]}
    # 16 microbatches of 3 ms, and 3 more; 16 * 2 * 2 samples of 100 tokens.
    assert rows["1f1b"]["pipeline_ms"] == 51
    assert rows["1f1b"]["tokens/s"] == pytest.approx(6400 / 0.051)
    assert rows["1f1b"]["peak_memory"] == [2 * GIB, GIB]
    assert rows["zb-v"]["costs"] == "estimated"


def test_the_table(folder: Path, capsys: Capture) -> None:
    assert main(["profile.json", "--memory-limit", "2GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "profile.json: linear, 2 stages, 8 microbatches",
        "limit: 2 GiB on every stage",
    ]
    rows = {line.split()[0]: line.split() for line in lines[4:] if line}
    # 8 * 3 + 3 ms; by the bound ZB-H1's bubble of 1 is the least.
    head = ["1f1b", "measured", "27.00", "11.11%", "25.00", "2", "GiB", "yes"]
    assert rows["1f1b"] == [*head, f"{3200 / 0.027:.0f}"]
    head = ["zb-h2", "measured", "24.00", "0.00%", "24.00", "3", "GiB", "no"]
    assert rows["zb-h2"] == [*head, f"{3200 / 0.024:.0f}"]
    assert lines[-1].startswith("best that fits: ")


def test_columns_of_what_is_not_known_are_left_out(folder: Path, capsys: Capture) -> None:
    bare = Profile(placement=linear(2), costs=Costs.uniform(linear(2), 1, 1, 1))
    save_profile(bare, folder / "bare.json")
    assert main(["bare.json", "--microbatches", "2"]) == 0
    header = capsys.readouterr().out.splitlines()[2]
    assert header.split("  ")[-1] == "peak memory"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("none.json", "none.json: No such file"),
        (".", ".: Is a directory"),
        ("costs.json", "costs.json: field 'format': expected 'zero-bubble profile', not None"),
        ("profile.json --microbatches 0", "profile.json: --microbatches 0: at least 1"),
        ("profile.json --microbatches 9999999", "--stages 2 and --microbatches 9999999:"),
        (
            "profile.json --global-batch-size 9",
            "profile.json: --global-batch-size 9: expected a multiple of 4 (micro_batch_size 2 "
            "times data_parallel_size 2), such as 8",
        ),
        (
            "bare.json",
            "bare.json: the profile's job has no global_batch_size, micro_batch_size, "
            "data_parallel_size, so the number of microbatches is not known: give --microbatches",
        ),
        (
            "profile.json --memory-limit 100KiB",  # 2**30 bytes
            "--memory-limit 100KiB: memory limit 100 KiB of stage 0 cannot be met: one microbatch "
            "takes 1 GiB there, the least that works\n",
        ),
        ("profile.json --memory-limit 1GiB,1", "--memory-limit 1GiB,1: memory limit 1 B of stage"),
        (
            "profile.json --memory-limit auto",
            "--memory-limit 'auto': expected a limit such as 1.5p, 12GiB, 7.5 or inf\n",
        ),
        (
            "room.json --memory-limit auto",
            "--memory-limit 'auto': expected a limit such as 1.5p, 12GiB, 7.5 or inf; leave the "
            "flag out for the profile's room\n",
        ),
        (
            "size-1.json room.json --memory-limit 9foo --global-batch-size 8",
            "--memory-limit 9foo: unknown unit 'foo'; known: p, B, KiB, MiB, GiB, TiB, KB, MB, GB, "
            "TB; leave the flag out for the room of the profiles\n",
        ),
        ("profile.json --memory-limit all", "--memory-limit 'all': expected a limit such as"),
        ("profile.json --json none/x.json", "--json none/x.json: there is no directory none"),
        ("profile.json --effort hard", "argument --effort: invalid choice: 'hard'"),
        ("size-1.json size-2.json --microbatches 4", "--microbatches 4 is for one profile:"),
        ("size-1.json four.json", "four.json: placement linear of 4 stages, not linear of 2"),
        ("size-1.json size-2.json --memory-limit 9foo", "--memory-limit 9foo: unknown unit"),
        ("", "the following arguments are required: PROFILE.json"),
    ],
)
def test_errors(arguments: str, message: str, folder: Path, capsys: Capture) -> None:
    profile = equal_stages(2)
    (folder / "costs.json").write_text(json.dumps(profile.costs.to_dict()))
    save_profile(Profile(placement=linear(2), costs=profile.costs), folder / "bare.json")
    save_profile(replace(profile, room=(GIB, None)), folder / "room.json")
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"compare.py: {message}")
    assert captured.err.count("\n") == 1


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tools.profile.compare, zero_bubble.profile.microbatch_size; "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120)
    assert done.returncode == 0
