"""``zero-bubble partition``: the table, the flag to paste, the saved schedule, what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zero_bubble.check import check
from zero_bubble.cli import main
from zero_bubble.export.json_io import load_file
from zero_bubble.simulate import simulate

SIZE = ["--stages", "2", "--microbatches", "4"]
QUICK = [*SIZE, "--effort", "quick"]
MODEL = {
    "embedding": {"t_f": 0.5, "t_w": 0.5},
    "layers": [{"t_f": 1, "t_b": 1, "t_w": 1, "m_b": 2}, {"t_f": 4, "t_b": 4, "t_w": 4, "m_b": 2}],
    "loss": {"t_f": 1, "t_b": 1, "t_w": 1},
    "t_comm": 0.1,
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def compiled_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the search has to be compiled first depends on the machine."""
    monkeypatch.setattr("zero_bubble.cli.partition.announce_compiling", lambda: None)


def printed(arguments: list[str], capsys: Capture) -> str:
    assert main(["partition", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_the_table_and_the_flag(capsys: Capture) -> None:
    flags = [*QUICK, "--layers", "6", "--loss-t-f", "2", "--memory-limit", "8"]
    out = printed(flags, capsys)
    rows = [re.split(r"\s{2,}", line) for line in out.splitlines()]
    assert rows[1][:-1] == ["0", "0", "embedding + 4", "4", "4", "4", "12", "12"]
    assert rows[2][:-1] == ["1", "1", "2 + loss", "4", "4", "4", "12", "12"]
    assert all(float(row[-1]) <= 8 for row in rows[1:3])
    assert "memory limit of each stage: 8 (--memory-limit 8)\n" in out
    # ZB-H1 on two stages of 4 ms a pass: 4 * 12 of work, and a bubble of T_F + T_B - T_W.
    assert ["this partition", "52", "7.69%"] in rows
    assert "\neven partition " in out
    assert "less time than with the even partition.\nNo partition and schedule costs less " in out
    assert "costs less within the memory limit of 8.\n" in out
    assert "--pipeline-model-parallel-size 2 \\\n" in out
    assert "--pipeline-model-parallel-layout 'Et*4|t*2L'\n\n--output FILE.json saves" in out
    assert "for information" not in out


def test_a_default_limit_lets_layers_that_do_not_divide_run_as_1f1b_could(capsys: Capture) -> None:
    flags = ["--stages", "2", "--microbatches", "8", "--effort", "quick", "--layers", "5"]
    flags += ["--loss-t-f", "1"]
    out = printed(flags, capsys)
    # 3 layers a microbatch, 2 microbatches. ZB-H1: 8 * 9 of work, and T_F + T_B - T_W.
    assert "memory limit of each stage: 6 (1p, the default" in out
    assert "under a partition of least bottleneck)" in out
    assert re.search(r"this partition +75 +4.00%", out)
    less = printed([*flags, "--memory-limit", "0.8p"], capsys)
    assert "memory limit of each stage: 4.8 (--memory-limit 0.8p)" in less
    assert "more memory: with 4.8 more on every stage (twice as much for microbatches)" in less
    assert "2p" not in out


@pytest.mark.parametrize(
    ("limit", "shown", "within"),
    [
        ("inf", "memory limit of each stage: inf (", "costs less.\n"),
        ("8,9", "memory limits of the stages: 8, 9 (", "costs less within these memory limits.\n"),
    ],
)
def test_what_a_verdict_holds_within(limit: str, shown: str, within: str, capsys: Capture) -> None:
    out = printed([*QUICK, "--layers", "4", "--memory-limit", limit], capsys)
    assert shown in out
    assert within in out


def test_amounts_of_memory(capsys: Capture) -> None:
    flags = ["--layers", "4", "--layer-m-b", "3GiB", "--layer-weight-memory", "1024 MiB"]
    out = printed([*QUICK, *flags, "--loss-weight-memory", ".5e1gb"], capsys)
    # Two layers a stage; 1p is two microbatches of 6 GiB, and the weights of the last stage.
    weights = f"{2 + 5e9 / 2**30:.4g} GiB"
    assert (
        f"memory limit of each stage: {12 + 2 + 5e9 / 2**30:.4g} GiB (1p, the default: what" in out
    )
    assert "needs at most under the even partition)" in out
    header, *rows = [re.split(r"\s{2,}", line) for line in out.splitlines()][:3]
    assert header[-2:] == ["peak memory", "of it weights"]
    assert [row[-1] for row in rows] == ["2 GiB", weights]


def test_nothing_idles_and_no_sign_is_printed(capsys: Capture) -> None:
    flags = ["--stages", "1", "--microbatches", "7", "--layers", "3", "--layer-t-f", "0.1"]
    out = printed([*flags, "--effort", "quick"], capsys)
    assert re.search(r"this partition +6.3 +0.00%", out)
    assert "-0" not in out


def test_without_a_head_it_is_the_even_partition(capsys: Capture) -> None:
    out = printed([*QUICK, "--layers", "4"], capsys)
    assert "This is the even partition.\nNo partition and schedule costs less within" in out


def test_every_flag_reaches_the_model(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    layer = {"t_f": 1, "t_b": 2, "t_w": 3, "m_b": 40, "m_w": 5}
    embedding = {"t_f": 0.25, "t_b": 0.125, "t_w": 0.5, "m_b": 6, "m_w": 4}
    loss = {"t_f": 3, "t_b": 4, "t_w": 5, "m_b": 8, "m_w": 7}
    flags = [*QUICK, "--layers", "2", "--t-comm", "0.75", "--output", str(path)]
    for name, values in (("layer", layer), ("embedding", embedding), ("loss", loss)):
        for field, value in values.items():
            flags += [f"--{name}-{field.replace('_', '-')}", str(value)]
    flags += ["--loss-weight-memory", "60", "--memory-limit", "200,250"]
    out = printed(flags, capsys)
    found = load_file(path)
    assert found.costs is not None
    assert f"'Et*2|L' \\\n--pipeline-schedule {path}\n" in out
    for field in layer:
        table = getattr(found.costs, field)
        assert table == ((embedding[field] + 2 * layer[field],), (loss[field],))
    assert found.costs.t_comm == 0.75
    assert found.memory_limit == (200, 190)
    assert check(found.schedule, costs=found.costs, memory_limit=found.memory_limit) == []


def test_a_model_file(capsys: Capture, tmp_path: Path) -> None:
    file, saved = tmp_path / "model.json", tmp_path / "found.json"
    file.write_text(json.dumps(MODEL))
    out = printed([*QUICK, "--model", str(file), "--output", str(saved)], capsys)
    assert "'Et|tL'" in out
    found = load_file(saved)
    assert found.costs is not None
    assert (found.costs.t_f, found.costs.t_comm) == (((1.5,), (5,)), 0.1)
    # 1p: two stages, each with one of the two layers.
    assert found.memory_limit == (4, 4)
    assert f"{simulate(found.schedule, found.costs).cost:.6g}" in out


def test_a_v_is_not_what_megatron_makes_of_the_flag(capsys: Capture) -> None:
    flags = ["--stages", "2", "--microbatches", "2", "--effort", "quick", "--layers", "3"]
    out = printed([*flags, "--placement", "v"], capsys)
    assert "3 transformer layers do not divide into 4 chunks" in out
    assert "\nlayout: E" in out
    assert "Megatron cannot run schedules of v placement yet" in out
    assert "--pipeline" not in out


def test_an_even_partition_without_room(capsys: Capture) -> None:
    flags = ["--layers", "4", "--loss-weight-memory", "7", "--memory-limit", "8"]
    out = printed([*QUICK, *flags], capsys)
    assert "'Et*3|tL'" in out
    assert "There is no even partition: it does not fit the memory limit." in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--layers N or --model FILE.json is needed"),
        (["--layers", "0"], "--layers 0: at least 1 transformer layer is needed"),
        (["--layers", "4", "--model", "x"], "--layers and --model exclude each other"),
        (["--model", "x", "--loss-m-b", "1"], "--loss-m-b and --model exclude each other"),
        (["--model", "/no/file"], "/no/file: No such file or directory"),
        (["--layers", "4", "--loss-t-f", "-1"], "--loss-...: t_f of the loss layer must be a"),
        (["--layers", "4", "--layer-m-w", "2"], "--layer-...: m_w of the transformer layer is 2"),
        (["--layers", "4", "--t-comm", "nan"], "t_comm must be a finite number"),
        (["--layers", "4", "--effort", "none"], "invalid choice: 'none'"),
        (["--layers", "4", "--stages", "7"], "6 layers (embedding and loss included) for 7 chunks"),
        (["--layers", "4", "--microbatches", "0"], "--microbatches 0: at least 1 is needed"),
        (["--layers", "4", "--memory-limit", "1"], "no partition fits a memory limit of 1 a stage"),
        (["--layers", "4", "--memory-limit", "x"], "--memory-limit 'x': expected a limit such as"),
        (["--layers", "4", "--memory-limit", "1GiB"], "1GiB is in bytes, but the model is not"),
        (["--layers", "4", "--layer-m-b", "3GB", "--memory-limit", "1.5GiB"], "limit of 1.5 GiB"),
        (
            ["--layers", "4", "--layer-m-b", "3 feet"],
            "--layer-m-b: '3 feet' is no amount of memory",
        ),
        (["--layers", "4", "--loss-m-w", "inf"], "m_w of the loss layer must be a finite number"),
        (
            ["--layers", "4", "--loss-m-b", "-1"],
            "m_b of the loss layer must be a finite number, at least 0, not -1",
        ),
        (["--layers", "4", "--output", "/no/x.json"], "--output /no/x.json: there is no directory"),
        (["--layers", "4", "--chunks", "2"], "--chunks 2 needs --placement interleaved"),
    ],
)
def test_a_user_s_error(flags: list[str], message: str, capsys: Capture) -> None:
    assert main(["partition", *SIZE, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("zero-bubble: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON: "),
        ("[]", "expected an object with embedding, layers, loss, t_comm, not []"),
        (json.dumps({**MODEL, "layers": []}), "at least one transformer layer"),
        (json.dumps({**MODEL, "loss": {"t_x": 1}}), "field 'loss': unknown field 't_x'; known: "),
    ],
)
def test_a_file_that_is_no_model(text: str, message: str, capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    assert main(["partition", *SIZE, "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"zero-bubble: --model {path}: ")
    assert message in error
    assert error.count("\n") == 1
