"""Turn text files into a data set that Megatron reads, with bytes as tokens.

    python tools/prepare_text.py docs src --suffix .md .py --output-prefix data/text

Every file becomes one document: its bytes (0 to 255), then 256 for the end of the document. No
vocabulary is needed, so any text trains at once; Megatron's NullTokenizer knows the same numbers.
"""

import argparse
import logging
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
SUFFIXES = (".txt", ".md", ".py")
# Megatron splits by documents: with fewer, a share of 5% may hold none.
DOCUMENTS_TO_SPLIT = 40


@dataclass(frozen=True, slots=True)
class Written:
    """What went into a data set."""

    documents: int
    bytes: int

    @property
    def tokens(self) -> int:
        """The bytes and one end for each document."""
        return self.bytes + self.documents


def find_files(inputs: Iterable[Path], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """The files to read, always in the same order and each of them once.

    Args:
        inputs: files, taken whatever their name is, and directories, searched to any depth.
        suffixes: the endings a file must have to be taken from a directory.

    Raises:
        FileNotFoundError: an input is neither a file nor a directory.
    """
    found: dict[Path, None] = {}
    for path in inputs:
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.suffix in suffixes and p.is_file())
            found |= dict.fromkeys(sorted(inside, key=lambda p: p.relative_to(path).parts))
        elif path.is_file():
            found[path] = None
        else:
            raise FileNotFoundError(f"{path} is neither a file nor a directory")
    return list({path.resolve(): path for path in found}.values())


def read_documents(files: Iterable[Path], max_bytes: int | None = None) -> Iterator[bytes]:
    """The contents of the files that are not empty, the last one cut at `max_bytes` in all."""
    left = max_bytes
    for file in files:
        if left == 0:
            return
        with file.open("rb") as stream:
            text = stream.read(left)  # all of it when there is no limit
        if not text:
            continue
        if left is not None:
            left -= len(text)
        yield text


def write_dataset(documents: Iterable[bytes], prefix: Path, overwrite: bool = False) -> Written:
    """Write `prefix`.bin and `prefix`.idx, creating the directory where they go.

    Raises:
        FileExistsError: a data set of that name is there and `overwrite` is off.
        ValueError: there is not a single document.
        OSError: the directory cannot be created or written to.
    """
    data, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
    existing = [str(path) for path in (data, index) if path.exists()]
    if existing and not overwrite:
        raise FileExistsError(
            f"{' and '.join(existing)} exist already: choose another --output-prefix, "
            "or replace them with --overwrite"
        )
    documents = iter(documents)
    first = next(documents, None)
    if first is None:
        raise ValueError("the inputs hold no text")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Megatron keeps shuffled indices under the data set's name, whatever its contents: those of an
    # earlier data set, be it replaced now or deleted by hand, would be taken for this one's.
    shutil.rmtree(prefix / "cache" / "GPTDataset_indices", ignore_errors=True)
    index.unlink(missing_ok=True)
    data.touch()  # fails here, and not after the slow import, when the place is not writable

    logging.disable(logging.WARNING)  # about GPUs and packages that no data set needs
    with warnings.catch_warnings(action="ignore"):
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    logging.disable(logging.NOTSET)

    builder = IndexedDatasetBuilder(str(data), dtype=np.uint16)
    count = size = 0
    for document in chain([first], documents):
        tokens = np.empty(len(document) + 1, dtype=np.uint16)
        tokens[:-1] = np.frombuffer(document, dtype=np.uint8)
        tokens[-1] = END_OF_DOCUMENT
        builder.add_document(tokens, [len(tokens)])
        count, size = count + 1, size + len(document)
    builder.finalize(str(index))
    return Written(count, size)


def megatron_flags(prefix: Path, documents: int) -> str:
    """The flags with which Megatron reads the data set."""
    split = (
        "--split 90,5,5"
        if documents >= DOCUMENTS_TO_SPLIT
        else "--split 1,0,0 --eval-iters 0 --eval-interval 1"
    )
    path = shlex.quote(str(prefix))
    return f"--data-path {path} {split} --tokenizer-type NullTokenizer --vocab-size {VOCAB_SIZE}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("inputs", nargs="+", type=Path, help="text files, or directories of them")
    parser.add_argument("--output-prefix", type=Path, required=True, help="PREFIX.bin, PREFIX.idx")
    parser.add_argument(
        "--suffix",
        nargs="+",
        default=SUFFIXES,
        help="endings of the files taken from directories (default: %(default)s)",
    )
    parser.add_argument("--max-bytes", type=int, help="stop after this many bytes of text")
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace an existing data set and drop the indices Megatron cached beside it",
    )
    args = parser.parse_args(arguments)
    if args.max_bytes is not None and args.max_bytes < 1:
        parser.error(f"--max-bytes {args.max_bytes} leaves no text: give at least 1")
    try:
        files = find_files(args.inputs, args.suffix)
        if not files:
            raise ValueError(
                f"no file ending in {' '.join(args.suffix)} in {' '.join(map(str, args.inputs))}: "
                "name the endings with --suffix"
            )
        documents = read_documents(files, args.max_bytes)
        written = write_dataset(documents, args.output_prefix, args.overwrite)
    except (OSError, ValueError) as error:
        print(f"prepare_text.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{written.documents} documents, {written.bytes} bytes, {written.tokens} tokens")
    print(f"Train on it with: {megatron_flags(args.output_prefix, written.documents)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
