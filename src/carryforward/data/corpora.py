# SPDX-License-Identifier: Apache-2.0
"""Where text comes from: `open_corpus` finds out what a source is and streams the documents of one split.

A source is WikiText-103 or PG-19 (with the paper's cuts and subsets), the documentation of this Python, a folder or
file of one's own, or any data set of the Hugging Face Hub. A corpus never holds more than one document. It knows
nothing of tokens but how many of a document's first ones its protocol uses.
"""

import dataclasses
import heapq
import logging
import re
from array import array
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from ..settings import PYTHON_DOCS
from . import hub, paper_corpora, python_docs, texts
from .texts import SPLITS, Corpus, Splits, Text

logger = logging.getLogger(__name__)

ALL = "all"  # every document of a source that has no splits of its own
_VALIDATION = ("validation", "valid", "val", "dev")  # what the folder or file of that split may be called
_HUB_NAME = re.compile(r"(?P<path>\w[\w.-]*(/\w[\w.-]*)?)(:(?P<config>[^/\\]+))?")
_ACCEPTED = (
    "wiki.{train,valid,test}.raw, folders train/ validation/ test/ of .txt files, .txt files, or "
    "{train,validation,test}.jsonl"
)


def open_corpus(source: str, split: str, *, text_field: str = "text", checksums: Path | None = None) -> Corpus:
    """One split of a source.

    Args:
        source: what to read, recognised in this order:

            * ``wikitext-103`` (from the Hub), ``wikitext-103=FOLDER`` or a folder with ``wiki.*.raw``: its articles;
            * ``pg19`` (from the Hub) or ``pg19=FOLDER``: the paper's subset of its books;
            * ``python-docs``: the documentation that this Python installation carries;
            * a folder with ``train/``, ``validation/``, ``test/`` of .txt files, a document each;
            * a folder with ``{train,validation,test}.jsonl``, or one .jsonl file: a JSON object a line;
            * a folder with ``{train,validation,test}.txt`` and nothing else: one document each;
            * a folder of .txt files, a document each;
            * one .txt file: one document;
            * a data set of the Hub: ``name``, ``owner/name`` or ``owner/name:config``.
        split: "train", "validation" or "test". Sources without splits of their own are cut by a hash of the
            documents' names: 5 % validation, 5 % test, at least one document each; "all" is all of them.
        text_field: the field of JSON lines and Hub rows that holds the text.
        checksums: a folder with ``{split}_bytes_sha256.tsv`` to check the books of PG-19 against.
    """
    splits = _splits(source, text_field, checksums)
    found = _one_of(splits, _VALIDATION if split in _VALIDATION and split not in splits else (split,))
    if found is None:
        has = ", ".join(map(repr, (name for name in splits if name != ALL)))
        raise ValueError(f"{source} has no split {split!r}, only {has}. Choose one of these with --split.")
    return dataclasses.replace(splits[found](), source=source)


def available_splits(source: str) -> tuple[str, ...]:
    """The splits `open_corpus` can open, beside `ALL`."""
    return tuple(name for name in _splits(source, "text", None) if name != ALL)


def has_own_splits(source: str) -> bool:
    """Whether what is for training is said by the source, and not decided here."""
    return ALL not in _splits(source, "text", None)


def usual_split(source: str, usual: str) -> str:
    """The split to read where none was asked for: the usual one, or all of a single text."""
    path = Path(source).expanduser()
    return ALL if path.suffix.lower() == ".txt" and path.is_file() else usual


def _splits(source: str, field: str, checksums: Path | None) -> Splits:
    name, _, folder = source.partition("=")
    if checksums is not None and name != "pg19":
        raise ValueError(
            f"checksums={str(checksums)!r} are for pg19 and pg19=FOLDER, not for {source!r}: leave it out."
        )
    if name in ("wikitext-103", "pg19") and (folder or "=" not in source):
        if not folder:
            return paper_corpora.hub_wikitext() if name == "wikitext-103" else paper_corpora.hub_pg19(checksums)
        path = Path(folder).expanduser()
        if not path.is_dir():
            raise ValueError(f"{source}: {path} is not a folder.")
        found = paper_corpora.wikitext(path) if name == "wikitext-103" else paper_corpora.pg19(path, checksums)
        if not found:
            expected = (
                "wiki.{train,valid,test}.raw" if name == "wikitext-103" else "train/ validation/ test/ of NUMBER.txt"
            )
            raise ValueError(f"{source}: {path} holds none of {expected}. Give the folder in which they lie.")
        return found
    if source == PYTHON_DOCS:
        return python_docs.splits()
    path = Path(source).expanduser()
    if path.is_dir():
        found = (
            paper_corpora.wikitext(path)
            or _split_folders(path)
            or _jsonl_folder(path, field)
            or _split_files(path)
            or _flat_folder(path)
        )
        if not found:
            raise ValueError(f"{source}: there is no text in this folder. Accepted: {_ACCEPTED}.")
        return found
    if path.suffix == ".jsonl" and path.is_file():
        return _jsonl_file(path, field)
    if path.suffix.lower() == ".txt" and path.is_file():
        return {split: partial(_files, path.stem, split, path.parent, [path.name]) for split in ("train", ALL)}
    if path.exists():
        raise ValueError(
            f"{source} is neither a folder nor a .txt or .jsonl file. Accepted: these, or a folder with {_ACCEPTED}."
        )
    match = _HUB_NAME.fullmatch(source)
    if match is None or path.suffix.lower() in (".txt", ".jsonl", ".json", ".raw"):
        raise ValueError(f"{source}: no such file or folder. Check the path, seen from {Path.cwd()}.")
    return _hub(match["path"], match["config"], field)


# --- folders and files


def _files(name: str, split: str, root: Path, files: list[str]) -> Corpus:
    return Corpus(
        name,
        split,
        lambda: (Text(file, texts.read(root / file)) for file in files),
        partial(texts.digest, root, files),
        sum(texts.size(root / file) for file in files),
    )


def _split_folders(folder: Path) -> Splits:
    found = {}
    for split in SPLITS:
        present = [name for name in _names(split) if (folder / name).is_dir() and texts.text_files(folder / name)]
        if len(present) > 1:
            raise ValueError(
                f"{folder}: both {present[0]}/ and {present[1]}/ hold the validation split. Keep one of them."
            )
        if present:
            found[split] = present[0]
    if found and (loose := sum(path.suffix.lower() == ".txt" for path in folder.iterdir())):
        logger.warning(
            "%s: %d .txt files beside the folders %s/ belong to no split.", folder, loose, "/ ".join(found.values())
        )

    def corpus(split: str) -> Corpus:
        files = [f"{found[split]}/{file}" for file in texts.text_files(folder / found[split])]
        return _files(_short(folder), split, folder, files)

    return {split: partial(corpus, split) for split in found}


def _split_files(folder: Path) -> Splits:
    """Files that are called as splits are, where there are no others."""
    present = texts.text_files(folder)
    found = _by_split(present, ".txt")
    if len(found) < 2 or len(found) < len(present):
        return {}
    return {split: partial(_files, _short(folder), split, folder, [file]) for split, file in found.items()}


def _flat_folder(folder: Path) -> Splits:
    files = texts.text_files(folder)
    parts = _cut(files, len(files))
    return {
        split: partial(_files, _short(folder), split, folder, [file for i, file in enumerate(files) if belongs(i)])
        for split, belongs in parts.items()
    }


def _jsonl_folder(folder: Path, field: str) -> Splits:
    def corpus(split: str, file: str) -> Corpus:
        digest = partial(texts.digest, folder, [file], field)
        return Corpus(
            _short(folder), split, lambda: texts.json_lines(folder / file, field), digest, texts.size(folder / file)
        )

    present = {path.name for path in folder.glob("*.jsonl")}
    return {split: partial(corpus, split, file) for split, file in _by_split(present, ".jsonl").items()}


def _jsonl_file(path: Path, field: str) -> Splits:
    numbers = array("q", (number for number, line in enumerate(texts.lines(path), 1) if line.strip()))
    if not numbers:
        raise ValueError(f"{path} is empty: there is no document in it.")

    def corpus(split: str, belongs: Callable[[int], bool]) -> Corpus:
        digest = partial(texts.digest, path.parent, [path.name], field, split)
        return Corpus(path.stem, split, lambda: texts.json_lines(path, field, belongs), digest, texts.size(path))

    parts = _cut((f"line-{number}" for number in numbers), len(numbers), numbers)
    return {split: partial(corpus, split, belongs) for split, belongs in parts.items()}


def _cut(names: Iterable[str], count: int, ids: Sequence[int] | None = None) -> dict[str, Callable[[int], bool]]:
    """The fixed rule for sources without splits: for each split, whether it has a document, by index (or id)."""
    if count < 3:
        return {split: lambda i: True for split in ("train", ALL)} if count else {}
    ids = range(count) if ids is None else ids
    part = max(1, count // 20)
    ranked = heapq.nsmallest(
        2 * part,
        ((blake2b(name.encode("utf-8", "surrogateescape")).digest(), i) for name, i in zip(names, ids, strict=True)),
    )
    validation, test = ({i for _, i in some} for some in (ranked[:part], ranked[part:]))
    return {
        "train": lambda i: i not in validation and i not in test,
        "validation": validation.__contains__,
        "test": test.__contains__,
        ALL: lambda i: True,
    }


def _by_split(present: Container[str], ending: str) -> dict[str, str]:
    """The files of each split, by their names."""
    files = {split: _one_of(present, [f"{name}{ending}" for name in _names(split)]) for split in SPLITS}
    return {split: file for split, file in files.items() if file}


def _names(split: str) -> tuple[str, ...]:
    return _VALIDATION if split == "validation" else (split,)


def _one_of(present: Container[str], names: Iterable[str]) -> str | None:
    return next((name for name in names if name in present), None)


def _short(path: Path) -> str:
    return path.resolve().name


# --- other data sets of the Hub


def _hub(path: str, config: str | None, field: str) -> Splits:
    def corpus(split: str) -> Corpus:
        rows = hub.load(path, config, split, field)
        name = f"{path}:{config}" if config else path
        digest = partial(hub.digest, rows, path, config, split, field)
        return Corpus(name, split, lambda: hub.documents(path, rows, field), digest, hub.size(rows, split))

    return {split: partial(corpus, split) for split in hub.split_names(path, config)}
