# SPDX-License-Identifier: Apache-2.0
"""Sources of text: `open_corpus` recognises what a source is and streams the documents of one split.

A source is WikiText-103 or PG-19 (with the paper's subsets), the documentation of the running Python, a local folder or
file, or a data set of the Hugging Face Hub. At most one document is in memory at a time.
"""

import dataclasses
import heapq
import logging
import re
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from ..settings.recurrence import PYTHON_DOCS
from . import hub, paper_corpora, python_docs, row_files, texts
from .texts import SPLITS, Corpus, Splits, Text

logger = logging.getLogger(__name__)

ALL = "all"  # every document of a source that has no splits of its own
_VALIDATION = ("validation", "valid", "val", "dev")  # accepted names of the validation split
_HUB_NAME = re.compile(r"(?P<path>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[^/\\]+))?")
_ACCEPTED = (
    "wiki.{train,valid,test}.raw, folders train/ validation/ test/ of .txt files, .txt files, or "
    "{train,validation,test}.jsonl, .parquet or .json"
)


def open_corpus(source: str, split: str, *, text_field: str = "text", checksums: Path | str | None = None) -> Corpus:
    """Open one split of a source.

    Args:
        source: what to read, recognised in this order:

            * ``wikitext-103`` (from the Hub), ``wikitext-103=FOLDER`` or a folder with ``wiki.*.raw``: its articles;
            * ``pg19`` (from the Hub) or ``pg19=FOLDER``: the paper's subset of its books;
            * ``python-docs``: the documentation that comes with the running Python;
            * a folder with ``train/``, ``validation/``, ``test/`` of .txt files, one document each;
            * a folder with ``{train,validation,test}.jsonl``, or one .jsonl file: one JSON object per line;
            * the same with ``.parquet``: one document per row; or with ``.json``: a list of objects;
            * a folder with ``{train,validation,test}.txt`` and no other .txt files: one document each;
            * a folder of .txt files, one document each;
            * one .txt file: one document;
            * a data set of the Hub: ``name``, ``owner/name`` or ``owner/name:config``.
        split: "train", "validation" or "test". Sources without splits of their own are divided by a hash of the
            documents' names: 5 % validation, 5 % test, at least one document each; "all" is all of them.
        text_field: the field of JSON objects, or the column of Parquet files and Hub rows, that holds the text.
        checksums: a folder with ``{split}_bytes_sha256.tsv``, to verify the books of PG-19.
    """
    splits = _find_splits(source, text_field, None if checksums is None else Path(checksums))
    name = _first_present(splits, _VALIDATION if split in _VALIDATION and split not in splits else (split,))
    if name is None:
        available = ", ".join(map(repr, (name for name in splits if name != ALL)))
        raise ValueError(f"{source} has no split {split!r}, only {available}. Choose one of these with --split.")
    return dataclasses.replace(splits[name](), source=source)


def available_splits(source: str) -> tuple[str, ...]:
    """Return the splits that `open_corpus` can open, except `ALL`."""
    return tuple(name for name in _find_splits(source, "text", None) if name != ALL)


def has_own_splits(source: str) -> bool:
    """Whether the source itself has splits; otherwise `open_corpus` divides its documents."""
    return ALL not in _find_splits(source, "text", None)


def default_split(source: str, preferred: str) -> str:
    """Return the split to read if the user chose none: the preferred one, or `ALL` of a single .txt file."""
    path = Path(source).expanduser()
    return ALL if path.suffix.lower() == ".txt" and path.is_file() else preferred


def _find_splits(source: str, field: str, checksums: Path | None) -> Splits:
    if not source.strip():
        raise ValueError("the name of the corpus is empty: give a folder, a file or a name.")
    name, _, folder = source.partition("=")
    if checksums is not None and name != "pg19":
        raise ValueError(
            f"checksums={str(checksums)!r} are for pg19 and pg19=FOLDER, not for {source!r}: leave it out."
        )
    if name in ("wikitext-103", "pg19") and (folder or "=" not in source):
        return _paper_splits(source, name, folder, checksums)
    if source == PYTHON_DOCS:
        return python_docs.splits()
    path = Path(source).expanduser()
    if path.exists():
        return _local_splits(source, path, field)
    match = _HUB_NAME.fullmatch(source)
    if match is None or path.suffix.lower() in (".txt", ".raw", *row_files.FORMATS):
        raise ValueError(f"{source}: no such file or folder. Check the path; the current folder is {Path.cwd()}.")
    return _hub_splits(match["path"], match["config"], field)


def _paper_splits(source: str, name: str, folder: str, checksums: Path | None) -> Splits:
    if not folder:
        return paper_corpora.hub_wikitext() if name == "wikitext-103" else paper_corpora.hub_pg19(checksums)
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(f"{source}: {path} is not a folder.")
    splits = paper_corpora.wikitext(path) if name == "wikitext-103" else paper_corpora.pg19(path, checksums)
    if not splits:
        expected = "wiki.{train,valid,test}.raw" if name == "wikitext-103" else "train/ validation/ test/ of NUMBER.txt"
        raise ValueError(f"{source}: {path} contains none of {expected}. Give the folder that contains them.")
    return splits


# --- folders and files


def _local_splits(source: str, path: Path, field: str) -> Splits:
    if path.is_dir():
        splits = (
            paper_corpora.wikitext(path)
            or _split_folders(path)
            or _row_corpora(path, field)
            or _split_files(path)
            or _flat_folder(path)
        )
        if not splits:
            raise ValueError(f"{source}: there is no text in this folder. Accepted: {_ACCEPTED}.")
        return splits
    if path.suffix.lower() in row_files.FORMATS and path.is_file():
        return _row_corpora(path, field)
    if path.suffix.lower() == ".txt" and path.is_file():
        return {split: partial(_text_corpus, path.stem, split, path.parent, [path.name]) for split in ("train", ALL)}
    raise ValueError(
        f"{source} is neither a folder nor a .txt, .jsonl, .json or .parquet file. Accepted: these, or a folder with "
        f"{_ACCEPTED}."
    )


def _text_corpus(name: str, split: str, root: Path, files: list[str]) -> Corpus:
    """Return a corpus of text files, one document each."""
    return Corpus(
        name,
        split,
        lambda: (Text(file, texts.read_text(root / file)) for file in files),
        partial(texts.digest_files, root, files),
        sum(texts.file_size(root / file) for file in files),
    )


def _split_folders(folder: Path) -> Splits:
    """Return the splits of a folder with a sub-folder per split."""
    folders = {}
    for split in SPLITS:
        present = [
            name for name in _split_names(split) if (folder / name).is_dir() and texts.list_text_files(folder / name)
        ]
        if len(present) > 1:
            raise ValueError(
                f"{folder}: both {present[0]}/ and {present[1]}/ hold the validation split. Keep one of them."
            )
        if present:
            folders[split] = present[0]
    if folders and (loose := sum(path.suffix.lower() == ".txt" for path in folder.iterdir())):
        logger.warning(
            "%s: %d .txt files beside the folders %s/ belong to no split.", folder, loose, "/ ".join(folders.values())
        )

    def corpus(split: str) -> Corpus:
        files = [f"{folders[split]}/{file}" for file in texts.list_text_files(folder / folders[split])]
        return _text_corpus(_folder_name(folder), split, folder, files)

    return {split: partial(corpus, split) for split in folders}


def _split_files(folder: Path) -> Splits:
    """Return the splits of a folder with a .txt file per split and no other .txt files."""
    present = texts.list_text_files(folder)
    files = _match_splits(present, ".txt")
    if len(files) < 2 or len(files) < len(present):
        return {}
    return {split: partial(_text_corpus, _folder_name(folder), split, folder, [file]) for split, file in files.items()}


def _flat_folder(folder: Path) -> Splits:
    files = texts.list_text_files(folder)
    return {
        split: partial(
            _text_corpus, _folder_name(folder), split, folder, [file for i, file in enumerate(files) if belongs(i)]
        )
        for split, belongs in _hash_splits(files, len(files)).items()
    }


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """The rows of a file that are a split.

    Attributes:
        name: of the source, for results.
        belongs: whether a row, by its number, belongs to the split; None if the whole file does.
    """

    name: str
    split: str
    path: Path
    belongs: row_files.Belongs | None = None


def find_rows(path: Path, suffixes: Iterable[str] = tuple(row_files.FORMATS)) -> dict[str, RowSplit]:
    """Return the splits of a folder with a file of rows per split, or of a single file of rows; none of other files.

    Args:
        suffixes: of the files to look at.
    """
    if path.is_dir():
        for suffix in suffixes:
            files = _match_splits({file.name for file in path.glob(f"*{suffix}")}, suffix)
            if files:
                return {split: RowSplit(_folder_name(path), split, path / file) for split, file in files.items()}
    if path.suffix.lower() not in suffixes or not path.is_file():
        return {}
    form = row_files.FORMATS[path.suffix.lower()]
    numbers = form.numbers(path)
    if not numbers:
        raise ValueError(f"{path} is empty: there is no document in it.")
    splits = _hash_splits(map(form.name, numbers), len(numbers), numbers)
    return {split: RowSplit(path.stem, split, path, belongs) for split, belongs in splits.items()}


def _row_corpora(path: Path, field: str) -> Splits:
    return {split: partial(_row_corpus, rows, field) for split, rows in find_rows(path).items()}


def _row_corpus(rows: RowSplit, field: str) -> Corpus:
    """Return a corpus of the rows of a split."""
    form = row_files.FORMATS[rows.path.suffix.lower()]
    settings = (field,) if rows.belongs is None else (field, rows.split)
    digest = partial(texts.digest_files, rows.path.parent, [rows.path.name], *settings)
    read = partial(form.read, rows.path, field, rows.belongs or (lambda number: True))
    return Corpus(rows.name, rows.split, read, digest, form.size(rows.path, field))


def _hash_splits(
    names: Iterable[str], count: int, ids: Sequence[int] | None = None
) -> dict[str, Callable[[int], bool]]:
    """Divide documents by a hash of their names: return, for each split, whether a document belongs to it.

    Args:
        ids: the documents' ids, by which it is then asked; by default, their indices.
    """
    if count < 3:
        return {split: lambda i: True for split in ("train", ALL)} if count else {}
    ids = range(count) if ids is None else ids
    size = max(1, count // 20)
    smallest = heapq.nsmallest(
        2 * size,
        ((blake2b(name.encode("utf-8", "surrogateescape")).digest(), i) for name, i in zip(names, ids, strict=True)),
    )
    validation, test = ({i for _, i in part} for part in (smallest[:size], smallest[size:]))
    return {
        "train": lambda i: i not in validation and i not in test,
        "validation": validation.__contains__,
        "test": test.__contains__,
        ALL: lambda i: True,
    }


def _match_splits(present: Container[str], suffix: str) -> dict[str, str]:
    """Return the file of each split, by its name."""
    files = {split: _first_present(present, [f"{name}{suffix}" for name in _split_names(split)]) for split in SPLITS}
    return {split: file for split, file in files.items() if file}


def _split_names(split: str) -> tuple[str, ...]:
    return _VALIDATION if split == "validation" else (split,)


def _first_present(present: Container[str], names: Iterable[str]) -> str | None:
    return next((name for name in names if name in present), None)


def _folder_name(path: Path) -> str:
    return path.resolve().name


# --- other data sets of the Hub


def _hub_splits(path: str, config: str | None, field: str) -> Splits:
    def corpus(split: str) -> Corpus:
        rows = hub.load_rows(path, config, split, field)
        name = f"{path}:{config}" if config else path
        digest = partial(hub.digest_rows, rows, path, config, split, field)
        return Corpus(name, split, partial(hub.read_texts, path, rows, field), digest, hub.size_in_bytes(rows, split))

    return {split: partial(corpus, split) for split in hub.split_names(path, config)}
