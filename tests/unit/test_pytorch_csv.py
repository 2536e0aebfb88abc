"""PyTorch's CSV files: what they hold, that they come back, and how wrong ones are answered.

That PyTorch's runtime reads them and trains is in tests/distributed/test_pytorch_runtime.py.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.orders import all_forwards_first, parse, random_order
from zero_bubble.builders import build
from zero_bubble.export.pytorch_csv import FORMS, Form, has_losses_in_order, load_csv, save_csv
from zero_bubble.placement import Placement, interleaved, linear, v_shape

PLACEMENTS = [linear(1), linear(3), v_shape(1), v_shape(3), interleaved(2, 3), interleaved(3, 2)]

seeds = st.integers(0, 10**6)
placements = st.sampled_from([*PLACEMENTS, Placement(((0, 2, 3), (1, 4)))])


def cells(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


@given(seed=seeds, placement=placements, form=st.sampled_from(FORMS))
def test_csv_brings_the_same_schedule_back(
    tmp_path_factory: pytest.TempPathFactory, seed: int, placement: Placement, form: Form
) -> None:
    schedule = random_order(placement, 3, seed)
    path = tmp_path_factory.getbasetemp() / "one.csv"
    save_csv(schedule, path, form)
    assert load_csv(path) == schedule


def test_cells_name_the_position_in_the_model(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    save_csv(all_forwards_first(v_shape(2), 1, split=True), path)
    assert path.read_text() == "0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2I0,2W0,1I0,1W0\n"


def test_fused_backwards_are_pytorch_s_b(tmp_path: Path) -> None:
    path = tmp_path / "1f1b.csv"
    save_csv(build("1f1b", 2, 2), path)
    assert path.read_text() == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def test_messages_and_reductions(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    save_csv(all_forwards_first(v_shape(2), 1, split=True), path, "compute_comms")
    assert [" ".join(row) for row in cells(path)] == [
        "0F0 0SEND_F0 3RECV_F0 3F0 3I0 3SEND_B0 3W0 0RECV_B0 0I0 0W0 0REDUCE_GRAD 3REDUCE_GRAD",
        "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2I0 2W0 1I0 1SEND_B0 1W0 1REDUCE_GRAD 2REDUCE_GRAD",
    ]


@given(seed=seeds, placement=placements)
def test_messages_run_one_at_a_time_over_one_line_between_two_ranks(
    tmp_path_factory: pytest.TempPathFactory, seed: int, placement: Placement
) -> None:
    """The strictest transport there is: a SEND and its RECV must be the next of both ranks."""
    path = tmp_path_factory.getbasetemp() / "one.csv"
    save_csv(random_order(placement, 3, seed), path, "compute_comms")
    rows = [row[::-1] for row in cells(path)]
    moved = True
    while moved:
        moved = False
        for row in rows:
            while row and re.fullmatch(r"\d+([FIWB]\d+|REDUCE_GRAD)", row[-1]):
                row.pop()
                moved = True
            if not row or "SEND" not in row[-1]:
                continue
            match = re.fullmatch(r"(\d+)SEND_([FB])(\d+)", row[-1])
            assert match is not None
            reader = int(match[1]) + (1 if match[2] == "F" else -1)
            other = next(
                (one for one in rows if one and one[-1] == f"{reader}RECV_{match[2]}{match[3]}"),
                None,
            )
            if other is not None:
                row.pop()
                other.pop()
                moved = True
    assert not any(rows)


def test_idle_time_steps_and_what_fsdp_adds_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("0UNSHARD,0F0,,0B0,0REDUCE_GRAD,0RESHARD\r\n, 1F0 ,1B0,\r\n\r\n")
    assert load_csv(path) == build("1f1b", 2, 1)
    assert load_csv(path).name == "one"


def test_an_illegal_schedule_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    with pytest.raises(ValueError, match="is illegal: stage 0, 0I0: order: runs before 0F0"):
        save_csv(parse(linear(1), 1, "0I0 0F0 0W0"), path)
    with pytest.raises(ValueError, match="form 'json': expected compute_only or compute_comms"):
        save_csv(build("1f1b", 2, 2), path, "json")  # type: ignore[arg-type]
    assert not path.exists()


def test_the_order_that_pytorch_needs_for_its_losses() -> None:
    assert has_losses_in_order(build("zb-h2", 3, 7))
    v = all_forwards_first(v_shape(2), 2, split=False)
    assert has_losses_in_order(v)
    last_first = str(v).replace("1F0 1F1", "1F1 1F0", 1)  # position 3, on stage 0
    assert not has_losses_in_order(parse(v_shape(2), 2, last_first))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2 (rank 1), column 2: unknown cell '1X0': expected stage, one"),
        ("0F0,0B0,F\n", "row 1 (rank 0), column 3: unknown cell 'F'"),
        ("0F-1,0B0\n", "row 1 (rank 0), column 1: unknown cell '0F-1'"),
        ("0F0,0B0,0SEND_W0\n", "row 1 (rank 0), column 3: unknown cell '0SEND_W0'"),
        ("(0F1;0B0)OVERLAP_F_B\n", "row 1 (rank 0), column 1: unknown cell '(0F1;0B0)OVERLAP"),
        (f"0F{'9' * 5000}", "row 1 (rank 0), column 1: unknown cell '0F999"),
        ("stage,pass\n", "row 1 (rank 0), column 1: unknown cell 'stage'"),
        ("", "empty: expected a row of cells"),
        (",,\n\n", "empty: expected a row of cells"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2 (rank 1) has no pass"),
        ("0F0,0B0\n0F1,0B1\n", "row 2 (rank 1) has 0F1, but stage 0 also runs in row 1"),
        ("0F0,0B0\n2F0,2B0\n", "no row has a pass of stage 1, though stage 2 is there"),
        (
            "0F0,0B999999999\n",
            "row 1 (rank 0), column 2: 0B999999999 is of microbatch 999999999, but no pass is of "
            "microbatch 1: microbatches count from 0",
        ),
        ("0F1,0B1\n", "row 1 (rank 0), column 1: 0F1 is of microbatch 1, but no pass is of micro"),
        # 0F2 mistyped, far away and next to the highest.
        (
            "0F0,0F1,0B0, 0F7 ,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n",
            "row 1 (rank 0), column 4: 0F7 is of microbatch 7, but no pass is of microbatch 3",
        ),
        (
            "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,,1F1,1B1,1F3,1B2\n",
            "row 2 (rank 1), column 6: 1F3 is the only pass of microbatch 3: each has a forward",
        ),
    ],
)
def test_a_wrong_file_is_answered_with_file_row_and_cell(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "one.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        load_csv(path)


def test_what_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match=re.escape(f"{path}: not a CSV file in UTF-8")):
        load_csv(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("0SEND_F0,", ""), "row 1 (rank 0): 0SEND_F0 is missing"),
        (("1RECV_F1,", ""), "row 2 (rank 1): 1RECV_F1 is missing"),
        (("1RECV_F0,1F0", "1F0,1RECV_F0"), "row 2 (rank 1): 1F0 comes before its 1RECV_F0"),
        (("0F0,0SEND_F0", "0SEND_F0,0F0"), "row 1 (rank 0): 0SEND_F0 comes before the pass"),
        (("0F0,", "0F0,0SEND_B0,"), "row 1 (rank 0): 0SEND_B0 is there 1 times, of which 0"),
        (("0F0,", "0F0,0SEND_F0,"), "row 1 (rank 0): 0SEND_F0 is there 2 times, of which 1"),
        (("1RECV_F0,", "1RECV_F1,1RECV_F0,"), "row 2 (rank 1): 1RECV_F1 is there 2 times"),
    ],
)
def test_messages_that_do_not_fit_the_passes(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "one.csv"
    save_csv(build("1f1b", 2, 3), path, "compute_comms")
    assert change[0] in path.read_text()
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(ValueError, match=re.escape(f"{path}: {message}")):
        load_csv(path)


def test_messages_in_different_orders_on_the_two_sides(tmp_path: Path) -> None:
    """Rank 1 of a V takes the activation and the gradient of rank 0 the wrong way round."""
    path = tmp_path / "one.csv"
    schedule = parse(
        v_shape(2), 2, "0F0 1F0 1B0 0F1 0B0 1F1 1B1 0B1\n0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"
    )
    save_csv(schedule, path, "compute_comms")
    assert load_csv(path) == schedule
    first, second = path.read_text().splitlines()
    row = second.split(",")
    row.remove("1RECV_F1")
    row.insert(0, "1RECV_F1")
    path.write_text(f"{first}\n{','.join(row)}\n")
    with pytest.raises(ValueError, match="rank 0 has 0SEND_F0 where rank 1 has 1RECV_F1"):
        load_csv(path)


def test_every_message_is_there_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    save_csv(build("zb-h1", 4, 5), path, "compute_comms")
    found: dict[str, int] = defaultdict(int)
    for row in cells(path):
        for cell in row:
            found[re.sub(r"\d", "", cell)] += 1
    # 3 borders between 4 stages, 5 microbatches.
    assert {found[name] for name in ("SEND_F", "RECV_F", "SEND_B", "RECV_B")} == {15}
    assert found["REDUCE_GRAD"] == 4
