# SPDX-License-Identifier: Apache-2.0
"""The paper's two corpora, WikiText-103 by article and its subset of PG-19, from a folder or from the Hub.

Books of PG-19 are verified if a list of their published sizes and SHA-256 is given. Otherwise, a folder of books is not
known to be PG-19.
"""

import logging
from collections.abc import Callable, Collection, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path

from . import hub, texts
from .texts import SPLITS, Corpus, Splits, Text

logger = logging.getLogger(__name__)

# The paper uses the first 1250 training books, the first 15,000 tokens of each validation book, and all of test.
_TRAIN_BOOKS = 1250
_VALIDATION_TOKENS = 15_000
_PG19_HUB = "emozilla/pg19"  # a copy in Parquet; `url` ends in a book's number
_WIKITEXT_HUB = ("Salesforce/wikitext", "wikitext-103-raw-v1")
_PUBLISHED_BOOKS = {"train": 28_602, "validation": 50, "test": 100}


def wikitext(folder: Path) -> Splits:
    """Return the splits of WikiText-103 in a folder."""

    def corpus(split: str, file: Path) -> Corpus:
        def articles() -> Iterator[Text]:
            return texts.split_articles(texts.read_lines(file))

        digest = partial(texts.digest_files, folder, [file.name])
        return Corpus("wikitext-103", split, articles, digest, texts.file_size(file))

    files = {split: folder / f"wiki.{'valid' if split == 'validation' else split}.raw" for split in SPLITS}
    return {split: partial(corpus, split, file) for split, file in files.items() if file.is_file()}


def hub_wikitext() -> Splits:
    """Return the splits of WikiText-103 on the Hub."""
    path, config = _WIKITEXT_HUB

    def corpus(split: str) -> Corpus:
        rows = hub.load_rows(path, config, split, "text")

        def articles() -> Iterator[Text]:
            return texts.split_articles(row["text"] or " \n" for row in rows)  # this copy has "" for blank lines

        digest = partial(hub.digest_rows, rows, path, config, split)
        return Corpus("wikitext-103", split, articles, digest, hub.size_in_bytes(rows, split))

    return {split: partial(corpus, split) for split in SPLITS}


def pg19(folder: Path, checksums: Path | None) -> Splits:
    """Return the splits of PG-19 in a folder."""

    def corpus(split: str) -> Corpus:
        present = {name for name in texts.list_text_files(folder / split) if name.removesuffix(".txt").isdigit()}
        names, published = _select_books(present, split, checksums)

        def books() -> Iterator[Text]:
            for name in names:
                raw = texts.read_bytes(folder / split / name)
                if published:
                    _verify_book(name, published[name], raw)
                # The copy on the Hub has LF: both must give the same tokens.
                yield Text(name, texts.decode_utf8(raw, folder / split / name).replace("\r\n", "\n"))

        files = [f"{split}/{name}" for name in names]
        expected = [published[name] for name in names] if published else None
        digest = partial(texts.digest_files, folder, files, expected)
        return _pg19_corpus(split, books, digest, sum(texts.file_size(folder / file) for file in files))

    return {split: partial(corpus, split) for split in SPLITS if (folder / split).is_dir()}


def hub_pg19(checksums: Path | None) -> Splits:
    """Return the splits of PG-19 on the Hub."""

    def corpus(split: str) -> Corpus:
        rows = hub.load_rows(_PG19_HUB, None, split, "text")
        row_of = {str(url).rstrip("/").rsplit("/", 1)[-1] + ".txt": i for i, url in enumerate(rows["url"])}
        names, published = _select_books(row_of, split, checksums)

        def books() -> Iterator[Text]:
            for name in names:
                text = rows[row_of[name]]["text"]
                if published:
                    # The published files have CR LF where this copy has LF.
                    _verify_book(name, published[name], text.encode(), text.replace("\n", "\r\n").encode())
                yield Text(name, text.removeprefix("\ufeff"))

        expected = [published[name] for name in names] if published else None
        return _pg19_corpus(split, books, partial(hub.digest_rows, rows, _PG19_HUB, split, expected), None)

    return {split: partial(corpus, split) for split in SPLITS}


def _pg19_corpus(
    split: str, books: Callable[[], Iterator[Text]], digest: Callable[[], str], size: int | None
) -> Corpus:
    return Corpus("pg19", split, books, digest, size, _VALIDATION_TOKENS if split == "validation" else None)


def _select_books(
    present: Collection[str], split: str, checksums: Path | None
) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """Return the books to use, sorted by file name, and the published size and SHA-256 of each."""
    published = {}
    if checksums is not None:
        for line in texts.read_lines(Path(checksums) / f"{split}_bytes_sha256.tsv"):
            try:
                name, size, digest = line.split("\t")
                published[name.removeprefix(f"{split}/")] = (int(size), digest.strip())
            except ValueError as error:
                raise ValueError(
                    f"checksums={str(checksums)!r}: {line!r} in {split}_bytes_sha256.tsv is not name, bytes and "
                    "SHA-256 separated by tabs."
                ) from error
    elif len(present) != _PUBLISHED_BOOKS[split]:
        logger.warning(
            "pg19: %d books in %s where %d are published: results are not comparable with PG-19. Give checksums to "
            "find out which books are missing.", len(present), split, _PUBLISHED_BOOKS[split],
        )  # fmt: skip
    names = sorted(published or present)[: _TRAIN_BOOKS if split == "train" else None]
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(
            f"pg19: {len(missing)} of the {len(names)} books of {split} are missing, the first of them "
            f"{split}/{missing[0]}. Download them again, or leave out checksums to use the others."
        )
    if not names:
        raise ValueError(f"pg19: there are no books in {split}. Expected are files named NUMBER.txt.")
    return names, published


def _verify_book(name: str, expected: tuple[int, str], *encodings: bytes) -> None:
    """Raise a ValueError if none of a book's possible encodings has the published size and SHA-256."""
    if not any((len(raw), sha256(raw).hexdigest()) == expected for raw in encodings):
        raise ValueError(
            f"pg19: {name} is not the published book: it has {len(encodings[0]):,} bytes and SHA-256 "
            f"{sha256(encodings[0]).hexdigest()[:12]}..., published are {expected[0]:,} and {expected[1][:12]}... "
            "Download it again, or leave out checksums."
        )
