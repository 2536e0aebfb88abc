"""The pages for users: links lead somewhere, flags and defaults are the parser's, and messages are
those of the code."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron.zero_bubble import arguments, post_validation_arguments
from megatron.zero_bubble.patches import cpu, patching
from zero_bubble.builders import BUILDERS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FLAGS, TROUBLE = ROOT / "docs/flags.md", ROOT / "docs/troubleshooting.md"
MESSAGE, MEGATRONS_MESSAGE = "Message", "Message of Megatron"
HOLE = "\0"
"""A value that a message is filled in with."""
LEAST = 10  # characters; a shorter piece of a message is found anywhere


# Links


def lines_of_prose(page: Path) -> Iterator[str]:
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield line


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    found: dict[str, int] = {}
    for line in lines_of_prose(page):
        if (heading := re.match(r"#+ +(.*?) *$", line)) is None:
            continue
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def broken_links(page: Path) -> list[str]:
    broken = []
    for line in lines_of_prose(page):
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", line)):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = page.parent / path if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(target)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# The `page`, first\n## Twice\n## Twice\n```\n# No heading\n[x](none.md)\n```\n"
        "[a](page.md#the-page-first) [b](#twice-1) [c](https://example.org/#x) `[d](none.md)`\n"
        "[e](none.md) [f](#no-heading) [g](page.md#twice-2)\n"
    )
    assert broken_links(page) == ["none.md", "#no-heading", "page.md#twice-2"]


# Tables


def tables(page: Path) -> Iterator[tuple[str, list[str]]]:
    """(first cell of the table's head, cells) of each row."""
    head = ""
    for line in lines_of_prose(page):
        if not line.startswith("|"):
            head = ""
            continue
        cells = [
            cell.strip().replace(HOLE, "|")
            for cell in line.replace("\\|", HOLE).strip().strip("|").split("|")
        ]
        if not head:
            head = cells[0]
        elif not set(line) <= set("|- "):
            yield head, cells


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# Flags


def parser() -> argparse.ArgumentParser:
    return arguments.add_arguments(argparse.ArgumentParser(add_help=False))


def rows_of_flags() -> dict[str, list[str]]:
    """Cells of each of our flags; one that is listed under two names is there twice."""
    return {
        words.split()[0]: cells
        for head, cells in tables(FLAGS)
        if head == "Flag" and len(cells) == 5
        for words in code(cells[0])
    }


def as_validated() -> argparse.Namespace:
    """A job that gives nothing of which the unset value is asked for."""
    args = parser().parse_args([])
    job: dict[str, Any] = {
        "pipeline_schedule": "auto",
        "optimizer_post_validation": True,
        "zero_bubble_trace": "traces",
        "recompute_granularity": "full",
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "world_size": 2,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "transformer_impl": "local",
        "num_layers": 4,
    }
    vars(args).update(job)
    arguments.validate(args)
    args.zero_bubble_trace = None
    return args


def test_every_flag_is_documented_with_its_choices() -> None:
    rows = rows_of_flags()
    assert set(rows) == {name for one in parser()._actions for name in one.option_strings}
    for action in parser()._actions:
        for choice in action.choices or ():
            assert str(choice) in re.split(r"[ |]", code(rows[action.option_strings[0]][0])[0])
    schedules = code(" ".join(rows["--pipeline-schedule"]))
    assert {"megatron", "auto", "auto-v", *BUILDERS} <= set(schedules)


def test_defaults_are_those_of_the_parser_and_of_validation() -> None:
    args, rows = as_validated(), rows_of_flags()
    for action in parser()._actions:
        default, value = rows[action.option_strings[0]][1], getattr(args, action.dest)
        if action.nargs == 0:
            assert default == "off", action.option_strings
            assert action.default is not action.const
        elif action.dest == "pipeline_schedule":
            assert default == f"`{arguments.MEGATRON}`"
        elif value is None:  # left open, so that it needs a word and not a value
            assert default
            assert re.fullmatch(r"`[^`]*`", default) is None, action.option_strings
        else:
            text = ":".join(map(str, value)) if isinstance(value, tuple) else str(value)
            assert code(default)[:1] == [text], action.option_strings


def section(title: str) -> str:
    return FLAGS.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_refused_flags_are_listed() -> None:
    post = post_validation_arguments
    for title, rules in (
        ("Refused with a schedule of ours", arguments._RULES),
        ("Refused with post-validation", (*post._RULES, *post._INPLACE_RULES)),
    ):
        for rule in rules:
            assert f"`{rule.flag}" in section(title), rule.flag
    for name in cpu.ALLOWED:
        flag = cpu.FLAGS.get(name, "--" + name.replace("_", "-"))
        assert f"`{flag}`" in section("Refused in CPU mode"), flag


# Messages


def readings(node: ast.AST) -> list[str]:
    """What an expression may give, with holes for what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return [re.sub(r"%[-#.0-9]*[sdgfr]", HOLE, text).replace("%%", "%")]
        case ast.JoinedStr(values=values):
            return ["".join(one for part in values for one in readings(part))]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ["".join(pair) for pair in product(readings(left), readings(right))]
        case ast.IfExp(body=body, orelse=other):
            return [*readings(body), *readings(other)]
        case _:
            return [HOLE]


def strings(sources: list[Path]) -> str:
    """All strings of the sources, a line each."""
    found = set()
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                found.update(readings(node))
    return "\n".join(" ".join(one.split()) for one in sorted(found))


@cache
def our_strings() -> str:
    folders = (ROOT / "megatron/zero_bubble", ROOT / "zero_bubble/profile")
    return strings([one for folder in folders for one in sorted(folder.rglob("*.py"))])


def is_in(message: str, lines: str) -> bool:
    """Whether one of the lines is the message, or a part of it that is, with ... for holes."""
    pieces = [re.escape(piece) for piece in message.split("...")]
    return re.search("[^\n]*".join(pieces), lines) is not None


def messages(head: str) -> list[str]:
    return [one for table, cells in tables(TROUBLE) if table == head for one in code(cells[0])]


def test_messages_are_those_of_the_code() -> None:
    quoted = messages(MESSAGE)
    assert len(quoted) > 90
    assert [one for one in quoted if max(map(len, one.split("..."))) < LEAST] == []
    assert [one for one in quoted if not is_in(one, our_strings())] == []


def test_another_message_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        "what = 'is stuck' if late else 'has ended'\n"
        "error = (f'stage {stage} ' + ('is stuck' if late else 'has ended')) + f'; wait {ms} ms'\n"
        "log('%s takes %.1f%% of it', 1, 2)\n"
    )
    lines = strings([source])
    for fine in ("stage ... has ended; wait ... ms", "is stuck; wait", "... takes ...% of it"):
        assert is_in(fine, lines), fine
    for wrong in ("stage 1 has ended", "stage ... has gone", "ms ... stage", "takes ... % of it"):
        assert not is_in(wrong, lines), wrong


def test_messages_of_megatron_are_those_of_the_version_we_name() -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    megatron = Path(spec.origin).parent.parent  # found, and not imported
    version = patching.TESTED_VERSIONS[-1]
    if not (megatron.parent / f"megatron_core-{version}.dist-info").is_dir():
        pytest.skip(f"not megatron-core {version}")
    places = (
        "core/tensor_parallel/layers.py",
        "core/transformer/torch_norm.py",
        "training/arguments.py",
    )
    lines = strings([megatron / place for place in places])
    quoted = messages(MEGATRONS_MESSAGE)
    assert quoted
    assert [one for one in quoted if not is_in(one, lines)] == []
