"""Text goes into Megatron's indexed data set and comes out the same."""

from pathlib import Path

import pytest

from tools import prepare_text
from tools.prepare_text import END_OF_DOCUMENT, find_files, main, read_documents

TEXTS = {"a.txt": b"one", "b/c.md": "zwei, drei: äöü".encode(), "b/d.py": b"print(4)\n"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for name, text in {**TEXTS, "b/empty.txt": b"", "b/picture.png": b"\x00\xff"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    return root


def test_megatron_reads_back_the_bytes_of_every_file(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    indexed_dataset = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    prefix = tmp_path / "new" / "text"
    assert main([str(source), "--output-prefix", str(prefix)]) == 0
    dataset = indexed_dataset.IndexedDataset(str(prefix))
    assert [list(tokens) for tokens in dataset] == [
        [*text, END_OF_DOCUMENT] for text in TEXTS.values()
    ]
    assert len(dataset.document_indices) == len(TEXTS) + 1
    printed = capsys.readouterr().out
    size = sum(map(len, TEXTS.values()))
    assert f"3 documents, {size} bytes, {size + 3} tokens" in printed
    assert f"--data-path {prefix}" in printed
    assert "--tokenizer-type NullTokenizer --vocab-size 257" in printed


def test_files_come_in_one_order_and_once(source: Path) -> None:
    files = find_files([source / "b" / "d.py", source])
    names = [file.relative_to(source).as_posix() for file in files]
    assert names == ["b/d.py", "a.txt", "b/c.md", "b/empty.txt"]


def test_a_named_file_needs_no_known_suffix(source: Path) -> None:
    assert find_files([source / "b" / "picture.png"]) == [source / "b" / "picture.png"]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [b"o"]), (3, [b"one"]), (5, [b"one", b"zw"]), (10_000, [*TEXTS.values()])],
)
def test_the_limit_cuts_the_last_document(source: Path, limit: int, expected: list[bytes]) -> None:
    assert list(read_documents(find_files([source]), limit)) == expected


def test_few_documents_are_not_split() -> None:
    assert "--split 1,0,0 --eval-iters 0" in prepare_text.megatron_flags(Path("x"), 3)
    assert "--split 90,5,5" in prepare_text.megatron_flags(Path("x"), 1000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{source}/nowhere"], "nowhere is neither a file nor a directory"),
        (["{source}", "--suffix", ".rst"], "no file ending in .rst"),
        (["{source}/b/empty.txt"], "the inputs hold no text"),
        (["{source}", "--output-prefix", "{source}/a.txt/text"], "a.txt"),
    ],
)
def test_mistakes_are_named(
    source: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    arguments = [argument.format(source=source) for argument in arguments]
    if "--output-prefix" not in arguments:
        arguments += ["--output-prefix", str(source / "out" / "text")]
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_an_existing_data_set_is_kept_unless_told(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("megatron.core")
    indices = tmp_path / "text" / "cache" / "GPTDataset_indices"  # where Megatron 0.19 has them
    indices.mkdir(parents=True)
    command = [str(source), "--output-prefix", str(tmp_path / "text")]
    (tmp_path / "text.bin").write_bytes(b"precious")
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "text.bin").read_bytes() == b"precious"
    assert main([*command, "--overwrite"]) == 0
    # What Megatron had computed for the old contents would be wrong for the new.
    assert not indices.exists()
    # So it would be where the old data set was deleted by hand.
    indices.mkdir(parents=True)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text{suffix}").unlink()
    assert main(command) == 0
    assert not indices.exists()


def test_a_limit_below_one_byte_is_refused(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([str(source), "--output-prefix", "x", "--max-bytes", "0"])
    assert "--max-bytes 0" in capsys.readouterr().err
