"""Recomputation where it is shown and asked for: drawings, traces, PyTorch's CSV, the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.orders import parse
from zero_bubble.builders import build
from zero_bubble.builders.recomputing import with_recomputation
from zero_bubble.cli import main
from zero_bubble.compare import paper_bubble
from zero_bubble.costs import Costs
from zero_bubble.export import svg, text
from zero_bubble.export.chrome_trace import trace
from zero_bubble.export.json_io import load_file
from zero_bubble.export.pytorch_csv import save_csv
from zero_bubble.period import period_behind_barrier, period_with_run_ahead
from zero_bubble.placement import linear, v_shape
from zero_bubble.profile.rearrange import rearranged
from zero_bubble.simulate import simulate

Capture = pytest.CaptureFixture[str]
SIZE = ["--stages", "4", "--microbatches", "6"]
COSTS = Costs.uniform(linear(1), 2, 3, 1, m_b=10, m_w=4, t_r=2, m_r=1)
ONE = parse(linear(1), 2, "0F0 0F1 0R0 0I0 0R1 0W0 0I1 0W1")


def test_text_names_and_colours_r() -> None:
    drawn = text.draw(simulate(ONE, COSTS), width=32)
    assert drawn == "stage 0  F0  F1  R0  B0    R1  W0B1    W1"
    assert "\x1b[30;105mR" in text.draw(simulate(ONE, COSTS), width=32, colour=True)


def test_a_picture_has_r_in_its_legend_only_if_there_is_some() -> None:
    assert "R: the forward again" in svg.draw(simulate(ONE, COSTS))
    assert ">stage 0, 0R1: 9 to 11 ms<" in svg.draw(simulate(ONE, COSTS))
    plain = svg.draw(simulate(build("1f1b", 2, 2), Costs.uniform(linear(2), 1, 1, 1)))
    assert "R: the forward again" not in plain


def test_a_fused_backward_shows_recomputation_as_part_of_b() -> None:
    fused = parse(linear(1), 1, "0F0 0B0")
    costs = Costs.uniform(linear(1), 2, 3, 1, t_r=2, m_r=0.1)
    drawn = text.draw(simulate(fused, costs), width=8, colour=True)
    # F takes 2 columns, B with recomputation 5 of the other 6.
    assert drawn.endswith("\x1b[30;106mBW0  \x1b[30;102m \x1b[0m")


def test_a_trace_counts_what_r_takes() -> None:
    events = trace(simulate(ONE, COSTS))["traceEvents"]
    held = [(one["ts"] / 1000, one["args"]["held"]) for one in events if one["ph"] == "C"]
    wanted = [(0, 1), (2, 2), (4, 11), (9, 5), (9, 14), (12, 10), (15, 4), (16, 0)]
    assert held == wanted
    assert max(amount for _, amount in wanted) == simulate(ONE, COSTS).peak_memory[0]
    within = parse(linear(1), 1, "0F0 0I0 0W0")
    events = trace(simulate(within, COSTS))["traceEvents"]
    held = [(one["ts"] / 1000, one["args"]["held"]) for one in events if one["ph"] == "C"]
    assert held == [(0, 1), (2, 10), (7, 4), (8, 0)]


def test_r_sends_no_message() -> None:
    costs = Costs.uniform(linear(2), 1, 1, 1, t_r=1, m_r=0.5)
    events = trace(simulate(with_recomputation(build("zb-h1", 2, 3)), costs))["traceEvents"]
    assert sum(one["ph"] == "s" for one in events) == 2 * 3


def test_pytorch_has_no_r(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"recomputes \(R\).*torch.utils.checkpoint"):
        save_csv(with_recomputation(build("zb-h1", 2, 2)), tmp_path / "one.csv")
    assert not (tmp_path / "one.csv").exists()


def test_a_period_counts_recomputation_in_b_and_as_a_pass() -> None:
    costs = Costs.uniform(linear(2), 2, 3, 1, t_r=2, m_r=0.5)
    for schedule in (build("1f1b", 2, 3), with_recomputation(build("1f1b", 2, 3))):
        # One batch behind a barrier is one simulated; with a long step nothing can run ahead of it.
        alone = max(row[-1].end for row in simulate(schedule, costs).spans)
        assert period_behind_barrier(schedule, costs) == pytest.approx(alone)
        assert period_with_run_ahead(schedule, costs) <= alone + 1e-9
    within, apart = (
        period_with_run_ahead(one, costs)
        for one in (build("1f1b", 2, 3), with_recomputation(build("1f1b", 2, 3)))
    )
    # The last stage never waits for a gradient; the first saves the R's that it waits through.
    assert apart < within


def test_costs_of_another_placement_keep_recomputation() -> None:
    costs = Costs.uniform(linear(2), 2, 2, 2, t_r=2, m_r=0.5)
    found = rearranged(costs, linear(2), v_shape(2))
    assert found.t_r == ((1.0, 1.0), (1.0, 1.0))
    assert found.m_r == ((0.25, 0.25), (0.25, 0.25))


def test_the_papers_formulas_know_no_recomputation() -> None:
    costs = Costs.uniform(linear(2), 2, 2, 2, t_r=2, m_r=0.5)
    assert paper_bubble("1f1b", 4, costs) is None
    assert paper_bubble("1f1b", 4, costs.without_recomputation()) == 6


def test_auto_makes_r_unless_told_otherwise(capsys: Capture, tmp_path: Path) -> None:
    apart, within = tmp_path / "apart.json", tmp_path / "within.json"
    flags = ["schedule", "auto", *SIZE, "--m-r", "0.1", "--memory-limit", "0.5p"]
    assert main([*flags, "--effort", "quick", "--output", str(apart)]) == 0
    assert "0R0" in capsys.readouterr().out
    flags += ["--recompute", "in-backward"]
    assert main([*flags, "--effort", "quick", "--output", str(within)]) == 0
    assert "0R0" not in capsys.readouterr().out
    found = load_file(str(apart))
    assert found.costs is not None
    assert found.costs.t_r == ((1.0,),) * 4  # as F
    assert found.costs.m_r == ((0.1,),) * 4
    assert main(["check", str(apart)]) == 0
    assert "limit 2" in capsys.readouterr().out


def test_named_schedules_recompute_in_a_pass_unless_told_otherwise(capsys: Capture) -> None:
    flags = ["schedule", "1f1b", "--stages", "2", "--microbatches", "2", "--m-r", "0.1"]
    assert main([*flags, "--t-r", "2", "--recompute", "in-backward"]) == 0
    # F F, then 1f1b's last stage: F (R B W) twice, and (R B W) of the first.
    within = capsys.readouterr().out
    assert "cost 15 ms" in within
    assert main([*flags, "--t-r", "2"]) == 0
    out = capsys.readouterr().out
    assert "0F0 0F1 0R0 0B0 0R1 0B1" in out
    assert "cost 13 ms" in out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["schedule", "auto", *SIZE, "--t-r", "2"], "--t-r 2 needs --m-r"),
        (
            ["schedule", "1f1b", *SIZE, "--recompute", "pass"],
            "--recompute pass needs costs of recomputation: --m-r and --t-r",
        ),
        (
            ["schedule", "auto", *SIZE, "--m-r", "0.1", "--method", "paper"],
            "--method paper knows no recomputation",
        ),
        (["schedule", "auto", *SIZE, "--m-r", "2"], "m_r of stage 0, chunk 0, is 2"),
    ],
)
def test_what_does_not_go_together_is_refused(capsys: Capture, flags: list[str], said: str) -> None:
    assert main(flags) == 2
    assert said in capsys.readouterr().err


def test_a_file_has_r_or_not(capsys: Capture, tmp_path: Path) -> None:
    file = str(tmp_path / "one.json")
    assert main(["schedule", "1f1b", *SIZE, "--m-r", "0.1", "--output", file]) == 0
    capsys.readouterr()
    assert main(["draw", file, "--recompute", "pass"]) == 2
    assert "--recompute pass is for names such as 1f1b" in capsys.readouterr().err
    # A name beside it takes the file's costs, and R's if asked for.
    assert main(["draw", file, "zb-h1", "--recompute", "pass"]) == 0
    assert "R5" in capsys.readouterr().out


def test_compare_and_simulate_take_costs_of_recomputation(capsys: Capture) -> None:
    assert main(["compare", *SIZE, "--m-r", "0.1", "--recompute", "pass"]) == 0
    assert "zb-h1" in capsys.readouterr().out
    flags = ["simulate", "zb-h1", *SIZE, "--m-r", "0.1", "--jitter", "0", "--repeats", "2"]
    costs = Costs.uniform(linear(4), 1, 1, 1, t_r=1, m_r=0.1)
    for more, schedule in (
        (["--recompute", "in-backward"], build("zb-h1", 4, 6)),
        ([], with_recomputation(build("zb-h1", 4, 6))),
    ):
        assert main([*flags, *more]) == 0
        assert f"{simulate(schedule, costs).cost:.6g}" in capsys.readouterr().out
