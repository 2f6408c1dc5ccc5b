# SPDX-License-Identifier: Apache-2.0
"""The paper's two corpora, WikiText-103 by article and its subset of PG-19, from a folder or from the Hub.

Each function gives the splits there are. Books of PG-19 are checked against published sizes and SHA-256 where a list
of those is given; without one, nothing here claims that a folder of books is PG-19.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from . import hub, texts
from .texts import SPLITS, Corpus, Splits, Text

logger = logging.getLogger(__name__)

# The paper's PG-19: the first 1250 training books, the first 15,000 tokens of each validation book, all of test.
_TRAIN_BOOKS = 1250
_VALIDATION_TOKENS = 15_000
_PG19_HUB = "emozilla/pg19"  # a copy as Parquet; `url` ends in a book's number
_WIKITEXT_HUB = ("Salesforce/wikitext", "wikitext-103-raw-v1")
_PUBLISHED = {"train": 28_602, "validation": 50, "test": 100}


def wikitext(folder: Path) -> Splits:
    def corpus(split: str, file: Path) -> Corpus:
        digest = partial(texts.digest, folder, [file.name])
        return Corpus("wikitext-103", split, lambda: texts.articles(texts.lines(file)), digest, texts.size(file))

    files = {split: folder / f"wiki.{'valid' if split == 'validation' else split}.raw" for split in SPLITS}
    return {split: partial(corpus, split, file) for split, file in files.items() if file.is_file()}


def hub_wikitext() -> Splits:
    path, config = _WIKITEXT_HUB

    def corpus(split: str) -> Corpus:
        rows = hub.load(path, config, split, "text")
        lines = lambda: (row["text"] or " \n" for row in rows)  # noqa: E731  # blank lines have been emptied there
        digest = partial(hub.digest, rows, path, config, split)
        return Corpus("wikitext-103", split, lambda: texts.articles(lines()), digest, hub.size(rows, split))

    return {split: partial(corpus, split) for split in SPLITS}


def pg19(folder: Path, checksums: Path | None) -> Splits:
    def corpus(split: str) -> Corpus:
        present = {name for name in texts.text_files(folder / split) if name.removesuffix(".txt").isdigit()}
        names, listed = _pg19_books(present, split, checksums)

        def books() -> Iterator[Text]:
            for name in names:
                raw = texts.read_bytes(folder / split / name)
                if listed:
                    _check(name, listed[name], raw)
                # as in the copy on the Hub, so that both give the same tokens
                yield Text(name, texts.decode(raw, folder / split / name).replace("\r\n", "\n"))

        files = [f"{split}/{name}" for name in names]
        digest = partial(texts.digest, folder, files, [listed[name] for name in names] if listed else None)
        return _pg19_corpus(split, books, digest, sum(texts.size(folder / file) for file in files))

    return {split: partial(corpus, split) for split in SPLITS if (folder / split).is_dir()}


def hub_pg19(checksums: Path | None) -> Splits:
    def corpus(split: str) -> Corpus:
        rows = hub.load(_PG19_HUB, None, split, "text")
        row_of = {str(url).rstrip("/").rsplit("/", 1)[-1] + ".txt": i for i, url in enumerate(rows["url"])}
        names, listed = _pg19_books(row_of, split, checksums)

        def books() -> Iterator[Text]:
            for name in names:
                text = rows[row_of[name]]["text"]
                if listed:
                    # The copy was made from lines, so the files' CR LF are LF in it.
                    _check(name, listed[name], text.encode(), text.replace("\n", "\r\n").encode())
                yield Text(name, text.removeprefix("\ufeff"))

        expected = [listed[name] for name in names] if listed else None
        return _pg19_corpus(split, books, partial(hub.digest, rows, _PG19_HUB, split, expected), None)

    return {split: partial(corpus, split) for split in SPLITS}


def _pg19_corpus(
    split: str, books: Callable[[], Iterator[Text]], digest: Callable[[], str], size: int | None
) -> Corpus:
    return Corpus("pg19", split, books, digest, size, _VALIDATION_TOKENS if split == "validation" else None)


def _pg19_books(
    present: Collection[str], split: str, checksums: Path | None
) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """The books to use, by file name in the order of strings, and the published size and SHA-256 of each listed one."""
    listed = {}
    if checksums is not None:
        for line in texts.lines(Path(checksums) / f"{split}_bytes_sha256.tsv"):
            try:
                name, size, digest = line.split("\t")
                listed[name.removeprefix(f"{split}/")] = (int(size), digest.strip())
            except ValueError as error:
                raise ValueError(
                    f"checksums={str(checksums)!r}: {line!r} in {split}_bytes_sha256.tsv is not name, bytes and "
                    "SHA-256 with tabs between them."
                ) from error
    elif len(present) != _PUBLISHED[split]:
        logger.warning(
            "pg19: %d books in %s where %d are published: figures on them are not PG-19's. Give checksums to find out "
            "which are missing.", len(present), split, _PUBLISHED[split],
        )  # fmt: skip
    names = sorted(listed or present)[: _TRAIN_BOOKS if split == "train" else None]
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(
            f"pg19: {len(missing)} of the {len(names)} books of {split} are missing, the first of them "
            f"{split}/{missing[0]}. Fetch them again, or leave out checksums to use what there is."
        )
    if not names:
        raise ValueError(f"pg19: there are no books in {split}. Expected are files NUMBER.txt.")
    return names, listed


def _check(name: str, expected: tuple[int, str], *forms: bytes) -> None:
    """Refuse a book none of whose forms is the published one."""
    if not any((len(raw), sha256(raw).hexdigest()) == expected for raw in forms):
        raise ValueError(
            f"pg19: {name} is not the published book: it has {len(forms[0]):,} bytes and SHA-256 "
            f"{sha256(forms[0]).hexdigest()[:12]}..., published are {expected[0]:,} and {expected[1][:12]}... "
            "Fetch it again, or leave out checksums."
        )
