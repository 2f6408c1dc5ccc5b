# SPDX-License-Identifier: Apache-2.0
"""Reading texts from files: UTF-8, JSON lines, the articles of WikiText; and `Corpus`, a stream of texts.

A text is exactly its file's bytes, decoded: line ends are not translated and only a byte order mark is removed, so that
counts of bytes, words and line ends are exact.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, pairwise
from pathlib import Path

from ..utils.parsing import parse_json

_TITLE = re.compile(r"= (?!=)(.+)(?<!=) =")  # one "=" on each side; the title may contain others
SPLITS = ("train", "validation", "test")
_BLOCK = 1 << 20
_COUNTED = 1 << 16  # characters whose words are counted at once
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Text:
    """One document as text."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """A stream of the documents of one split, which can be iterated several times.

    Attributes:
        name: a short name, for results.
        split: "train", "validation" or "test" (or the name in a Hub data set).
        texts: returns an iterator over the documents.
        fingerprint: returns a digest of the content.
        size: bytes of the files or rows, for a progress bar: about the bytes of all texts, or None if it is unknown.
        max_tokens: truncate documents to so many tokens, as the corpus's protocol requires; None for no limit.
        source: the `source` that was given to `open_corpus`, for messages.
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
            blank = blank and (not text.text or text.text.isspace())
            yield text
        if blank:
            raise ValueError(
                f"{self.source or self.name}, split {self.split!r}: every document is empty or only white space. "
                "Give a source that contains text."
            )


Splits = dict[str, Callable[[], Corpus]]  # functions that open the splits of a source


def read_bytes(path: Path) -> bytes:
    """Return the content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise _read_error(path, error) from error


def file_size(path: Path) -> int:
    """Return the size of a file in bytes."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise _read_error(path, error) from error


def decode_utf8(raw: bytes, path: Path | str, offset: int = 0) -> str:
    """Decode bytes that start at `offset` of the file `path`; a byte order mark at its start is removed."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        utf16 = offset == 0 and raw[:2] in (b"\xff\xfe", b"\xfe\xff")
        guess, encoding = ("; it looks like UTF-16", "UTF-16") if utf16 else ("", "ENCODING")
        raise ValueError(
            f"{path} is not UTF-8 (byte 0x{raw[error.start]:02x} at offset {offset + error.start}){guess}. Convert it: "
            f"iconv -f {encoding} -t UTF-8 OLD > NEW"
        ) from error
    return text.removeprefix("\ufeff") if offset == 0 else text


def read_text(path: Path) -> str:
    """Return the text of a whole file."""
    return decode_utf8(read_bytes(path), path)


def read_file_or_stdin(source: str | Path) -> tuple[str, str]:
    """Return a name for a text and the text itself, from a file or, for "-", from standard input."""
    if str(source) == "-":
        return "standard input", decode_utf8(sys.stdin.buffer.read(), "standard input")
    return Path(source).name, read_text(Path(source))


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their line ends. Only a line feed ends a line."""
    offset = 0
    try:
        with path.open("rb") as file:
            for raw in file:
                yield decode_utf8(raw, path, offset)
                offset += len(raw)
    except OSError as error:
        raise _read_error(path, error) from error


def read_json_lines(path: Path, field: str, belongs: Callable[[int], bool] = lambda number: True) -> Iterator[Text]:
    """Yield the text of each JSON object, one per line. Blank lines are skipped, and those whose number, counted from
    1, does not `belong`."""
    for number, row, where in read_json_rows(path, belongs):
        yield Text(f"line-{number}", get_text(row, field, where))


def read_json_rows(path: Path, belongs: Callable[[int], bool] = lambda number: True) -> Iterator[tuple[int, dict, str]]:
    """Yield the number of each line, its JSON object, and the place to name in messages. Lines as `read_json_lines`."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or not belongs(number):
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line, where)
        except ValueError as error:
            raise ValueError(f"{error} Put one object on each line.") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is not a JSON object but {type(row).__name__}. Put one object on each line.")
        yield number, row, where


def get_text(row: dict, field: str, where: str) -> str:
    """Return the text of a row; raise a ValueError if there is none, or if it cannot be encoded as UTF-8."""
    if field not in row:
        raise ValueError(f"{where} has no field {field!r}: set text_field to one of {', '.join(map(repr, row))}.")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: text_field={field!r} must be a string, not {type(text).__name__}.")
    if (index := find_surrogate(text)) is not None:
        raise ValueError(f"{where}: half a surrogate pair at character {index} of {field!r}; fix it.")
    return text


def find_surrogate(text: str) -> int | None:
    """Return the index of the first half of a surrogate pair, which cannot be encoded as UTF-8; None if there is none.

    JSON may contain them, where texts were truncated in the middle of a character.
    """
    match = None if text.isascii() else _SURROGATE.search(text)
    return match and match.start()


def count_text(text: str, start: int = 0, stop: int | None = None) -> tuple[int, int, int]:
    """Return the number of words that begin in text[start:stop], as `str.split` separates them, of its UTF-8 bytes and
    of its line ends. It is counted in blocks: a list of all words of a long text would take several times its memory.

    >>> text = "one two\\n"
    >>> count_text(text), count_text(text, 0, 2), count_text(text, 2)
    ((2, 8, 1), (1, 2, 0), (1, 6, 1))
    """
    words = size = line_ends = 0
    stop = len(text) if stop is None else stop
    for begin in range(start, stop, _COUNTED):
        block = text[begin : min(begin + _COUNTED, stop)]
        words += len(block.split())
        if begin and not block[0].isspace() and not text[begin - 1].isspace():
            words -= 1  # the word began before the block
        size += len(block) if block.isascii() else len(block.encode())
        line_ends += block.count("\n")
    return words, size, line_ends


def split_articles(lines: Iterable[str]) -> Iterator[Text]:
    """Split WikiText into articles; one starts at a ` = Title = ` between blank lines. No character is lost.

    >>> lines = [" = A = \\n", " \\n", " a \\n", " \\n", " = = B = = \\n", " \\n", " = C = \\n"]
    >>> [article.name for article in split_articles(lines)]
    ['A', 'C']
    """
    name, article, before = "untitled", list[str](), ""
    for line, after in pairwise(chain(lines, [""])):
        title = _TITLE.fullmatch(line.strip())
        if title and not before.strip() and not after.strip():
            if any(map(str.strip, article)):  # blank lines before the first title belong to its article
                yield Text(name, "".join(article))
                article = []
            name = title[1]
        article.append(line)
        before = line
    if article:
        yield Text(name, "".join(article))


def list_text_files(folder: Path) -> list[str]:
    """Return the paths of all .txt files under a folder, relative to it and sorted as strings, without hidden ones."""
    paths: list[str] = []
    seen: set[str] = set()

    def fail(error: OSError) -> None:
        raise _read_error(Path(error.filename or folder), error) from error

    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:  # a symbolic link to a parent folder
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        names = [name for name in files if name.lower().endswith(".txt") and not name.startswith(".")]
        paths += [Path(root, name).relative_to(folder).as_posix() for name in names]
    return sorted(paths)


def digest_files(root: Path, names: Sequence[str], *settings: object) -> str:
    """Return a digest of files, by their names and bytes, and of the settings they are read with."""
    total = blake2b(repr(settings).encode(), digest_size=16)
    for name in names:
        total.update(f"\0{name}\0{file_size(root / name)}\0".encode("utf-8", "surrogateescape"))
        try:
            with (root / name).open("rb") as file:
                while block := file.read(_BLOCK):
                    total.update(block)
        except OSError as error:
            raise _read_error(root / name, error) from error
    return total.hexdigest()


def _read_error(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path} cannot be read ({error.strerror or error}). Check the path and its permissions.")
