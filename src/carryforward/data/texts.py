# SPDX-License-Identifier: Apache-2.0
"""Texts and how files become texts: exact decoding, JSON lines, the articles of WikiText, the digest of files.

A text is exactly its file's bytes, decoded: line ends are not translated, only a byte order mark is dropped, so that
bytes, words and line ends can be counted on it. A `Corpus` streams texts and holds one at a time. Which files make
up a corpus is not decided here, and nothing here knows of tokens.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path

_TITLE = re.compile(r"= (?!=)(.+)(?<!=) =")  # one "=" on each side; a title may have others inside
SPLITS = ("train", "validation", "test")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Text:
    """One document, before it is tokens."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """One split of a source, to be read as often as needed.

    Attributes:
        name: a short name, for results.
        split: "train", "validation" or "test" (or what a Hub data set calls it).
        fingerprint: gives a digest of everything that is read: other content, other fingerprint.
        size: bytes of the files or rows that are read, for a progress bar: near the bytes of all texts, or None if
            that cannot be known without reading them.
        max_tokens: how many of each document's first tokens the corpus's protocol uses; None for all.
        source: what `open_corpus` was asked for, for messages.
    """

    name: str
    split: str
    texts: Callable[[], Iterator[Text]]
    fingerprint: Callable[[], str]
    size: int | None = None
    max_tokens: int | None = None
    source: str = ""

    def __iter__(self) -> Iterator[Text]:
        blank = True
        for text in self.texts():
            blank = blank and not text.text.strip()
            yield text
        if blank:
            raise ValueError(
                f"{self.source or self.name}, split {self.split!r}: every document is empty or only white space. "
                "Give a source with text in it."
            )


Splits = dict[str, Callable[[], Corpus]]  # what a source has; a split is opened only when it is called for


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from error


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def decode(raw: bytes, path: Path | str, offset: int = 0) -> str:
    """Bytes that start at `offset` of a file, as UTF-8."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = offset == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        kind, encoding = ("; it looks like UTF-16", "UTF-16") if utf16 else ("", "ENCODING")
        raise ValueError(
            f"{path} is not UTF-8 (byte 0x{raw[error.start]:02x} at offset {offset + error.start}){kind}. Convert it: "
            f"iconv -f {encoding} -t UTF-8 OLD > NEW"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def read(path: Path) -> str:
    """The whole file as one text."""
    return decode(read_bytes(path), path)


def read_source(source: str | Path) -> tuple[str, str]:
    """What to call a text that the command line names, and the text: a file, or - for standard input."""
    if str(source) == "-":
        return "standard input", decode(sys.stdin.buffer.read(), "standard input")
    return Path(source).name, read(Path(source))


def lines(path: Path) -> Iterator[str]:
    """The lines of a file with their ends. Only a line feed ends a line."""
    offset = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                yield decode(raw, path, offset)
                offset += len(raw)
    except OSError as error:
        raise _unreadable(path, error) from error


def json_lines(path: Path, field: str, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Text]:
    """One JSON object a line. Lines are counted from 1; blank lines and those not `wanted` are passed over."""
    for number, line in enumerate(lines(path), 1):
        if not line.strip() or not wanted(number):
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where} is not valid JSON ({error}). Put one object on each line.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object but {type(row).__name__}. Put one object on each line.")
        yield Text(f"line-{number}", text_of(row, field, where))


def text_of(row: dict, field: str, where: str) -> str:
    """The text of a row, if it has one that can be written as UTF-8."""
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}: set text_field to one of {', '.join(map(repr, row))}.")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: text_field={field!r} must be a string, not {type(text).__name__}.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: half a surrogate pair at character {error.start} of {field!r}; mend it.") from error
    return text


def articles(lines: Iterable[str]) -> Iterator[Text]:
    """Cut WikiText into articles: one starts at a ` = Title = ` between blank lines. No character is lost.

    >>> [a.name for a in articles([" = A = \\n", " \\n", " a \\n", " \\n", " = = B = = \\n", " \\n", " = C = \\n"])]
    ['A', 'C']
    """
    name, held, before = "untitled", list[str](), ""
    for line, after in pairwise(chain(lines, [""])):
        title = _TITLE.fullmatch(line.strip())
        if title and not before.strip() and not after.strip():
            if any(map(str.strip, held)):  # blank lines before the first title belong to its article
                yield Text(name, "".join(held))
                held = []
            name = title[1]
        held.append(line)
        before = line
    if held:
        yield Text(name, "".join(held))


def text_files(folder: Path) -> list[str]:
    """Names of all .txt files under a folder, relative to it, sorted as strings. Hidden ones are left out."""
    found: list[str] = []
    seen: set[str] = set()

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename or folder), error) from error

    for root, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in files if name.lower().endswith(".txt") and not name.startswith(".")]
        found += [Path(root, name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def digest(root: Path, names: Sequence[str], *more: object) -> str:
    """A digest of files, by their names and bytes, and of whatever else decides what is read from them."""
    total = blake2b(repr(more).encode(), digest_size=16)
    for name in names:
        total.update(f"\0{name}\0{size(root / name)}\0".encode("utf-8", "surrogateescape"))
        try:
            with (root / name).open("rb") as file:
                while block := file.read(_BLOCK):
                    total.update(block)
        except OSError as error:
            raise _unreadable(root / name, error) from error
    return total.hexdigest()


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read ({error.strerror or error}). Check the path and its permissions.")
