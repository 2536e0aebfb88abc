"""The paper's profiled configurations: what is read from them gives what the paper published."""

from __future__ import annotations

import pytest

from zero_bubble.builders import build
from zero_bubble.costs import Costs, paper_profiles, paper_v_profiles
from zero_bubble.placement import linear, v_shape
from zero_bubble.simulate import simulate


def test_the_rows_of_table_8() -> None:
    rows = paper_v_profiles()
    assert [(row.stages, row.microbatches) for row in rows] == [
        *((16, 48), (16, 64), (16, 128)),
        *((24, 72), (24, 96), (24, 192)),
        *((32, 96), (32, 128), (32, 256)),
    ]
    for row in rows:
        row.costs.require(v_shape(row.stages))


def test_two_chunks_hold_what_a_stage_holds() -> None:
    """6.2B: h = 4096, a = 32, s = 1024, so M_W / M_B = 32h / (34h + 5as) = 131072 / 303104."""
    costs = paper_v_profiles()[0].costs
    for stage in range(16):
        assert sum(costs.m_b[stage]) == 1
        assert sum(costs.m_w[stage]) == pytest.approx(131072 / 303104)


@pytest.mark.parametrize("row", range(9))
def test_rates_of_table_8(row: int) -> None:
    """Two chunks are a stage: the schedules of one chunk have the published rates."""
    profile = paper_v_profiles()[row]
    chunk = profile.costs
    t_f, t_b, t_w = (2 * table[0][0] for table in (chunk.t_f, chunk.t_b, chunk.t_w))
    costs = Costs.uniform(linear(profile.stages), t_f, t_b, t_w, chunk.t_comm)
    for name in ("1f1b", "zb-h1", "zb-h2"):
        rate = simulate(build(name, profile.stages, profile.microbatches), costs).bubble_rate
        assert f"{rate:.4f}" == f"{profile.bubble_rates[name]:.4f}", name


def test_layers_of_a_stage() -> None:
    """The first and last stage have one layer fewer, so two more would make all equal."""
    for profile in (*paper_profiles(), *paper_v_profiles()):
        assert profile.layers_per_stage * profile.stages == profile.layers + 2
    assert [row.layers_per_stage for row in paper_profiles()[::3]] == [3, 4, 3, 2]
    assert {row.layers_per_stage for row in paper_v_profiles()} == {2}
