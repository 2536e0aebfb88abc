"""What can be wrong with shares of W's is found, and nothing else."""

from __future__ import annotations

import pytest

from zero_bubble.check import Rule
from zero_bubble.check_program import check_program
from zero_bubble.check_shares import check_shares, whole_passes
from zero_bubble.placement import linear
from zero_bubble.program import Finalize, Program, Run
from zero_bubble.schedule import Pass


def runs(text: str) -> list[Run]:
    """Passes, shares as ``0W3.1/4``."""
    found = []
    for one in text.split():
        what, _, share = one.partition(".")
        part, _, parts = share.partition("/")
        found.append(Run(Pass.parse(what), int(part or 0), int(parts or 1)))
    return found


def program(text: str, microbatches: int = 2) -> Program:
    return Program(linear(1), microbatches, ((*runs(text), Finalize()),))


BEGIN = "0F0 0F1 0I0 "


@pytest.mark.parametrize(
    "text",
    [
        "0I1 0W0.0/2 0W1.0/2 0W0.1/2 0W1.1/2",
        "0W0.0/2 0I1 0W0.1/2 0W1.0/2 0W1.1/2",
        "0W0.1/2 0I1 0W1.1/2 0W0.0/2 0W1.0/2",
        "0W0.0/2 0I1 0W0.1/2 0W1",
    ],
)
def test_shares_that_add_up_are_accepted(text: str) -> None:
    assert check_program(program(BEGIN + text)) == []


@pytest.mark.parametrize(
    ("text", "rule", "detail"),
    [
        ("0I1 0W0.0/2 0W1.0/2 0W1.1/2", Rule.COUNT, "0W0.1/2: RULE: runs 0 times, not once"),
        ("0I1 0W0.0/2 0W0.0/2 0W0.1/2 0W1", Rule.COUNT, "0W0.0/2: RULE: runs 2 times, not once"),
        ("0I1 0W0.0/2 0W0.1/2 0W0.2/2 0W1", Rule.RANGE, "0W0.2/2: RULE: is not a share of 2"),
        (
            "0I1 0W0.0/3 0W0.0/2 0W0.1/3 0W0.2/3 0W1",
            Rule.RANGE,
            "0W0.0/2: RULE: is not a share of 3",
        ),
        ("0I1 0W0.0/2 0W0.1/2 0W0 0W1", Rule.COUNT, "0W0: RULE: runs 2 times, not once"),
        ("0W0.0/2 0W1.0/2 0I1 0W0.1/2 0W1.1/2", Rule.ORDER, "0W1: RULE: runs before 0I1"),
        (
            "0I1 0W0.0/2 0W1.0/2 0W1.1/2 0W0.1/2",
            Rule.ORDER,
            "0W0.1/2: RULE: runs after that of 0W1",
        ),
        ("0I1 0W0.0/2 0W1 0W0.1/2", Rule.ORDER, "0W0.1/2: RULE: runs after that of 0W1"),
    ],
)
def test_shares_that_do_not_add_up_are_refused(text: str, rule: Rule, detail: str) -> None:
    found = check_program(program(BEGIN + text))
    assert [one.rule for one in found][:1] == [rule]
    assert detail.replace("RULE", rule) in str(found[0])


def test_only_a_w_is_cut_into_shares() -> None:
    found = list(check_shares(0, runs("0F0 0I0.0/2 0I0.1/2 0W0")))
    assert [str(one.what) for one in found] == ["0I0"]


def test_a_w_stands_where_its_first_share_runs() -> None:
    row = runs("0F0 0I0 0W0.0/2 0F1 0I1 0W0.1/2 0W1")
    assert " ".join(map(str, whole_passes(row))) == "0F0 0I0 0W0 0F1 0I1 0W1"
