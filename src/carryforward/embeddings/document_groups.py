# SPDX-License-Identifier: Apache-2.0
"""Read a file of JSON lines, or of Parquet, in groups of documents. Rows of Parquet are turned into lines.

A group records how many lines and bytes were read up to its end, and a digest of them: so it is known whether the part
that an earlier run has written of it still belongs to it.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..data.row_files import FORMATS, parquet_columns, read_parquet_rows
from ..data.tokenization import check_text
from ..settings.commands import EmbedSettings
from ..utils import console
from .chunks import check_spans

DOCUMENTS_PER_GROUP = 64
# by output; the vectors of a group are in memory together, and token vectors take thousands of times the space of text
CHARACTERS_PER_GROUP = {"document": 8_000_000, "windows": 8_000_000, "chunks": 1_000_000, "tokens": 250_000}


@dataclass
class DocumentGroup:
    """Documents whose vectors are written as one part.

    Attributes:
        ids, texts: of the documents.
        spans: of each document's chunks, if the file has them.
        skipped: the numbers of skipped lines, counted from 1.
        lines, bytes, digest: of the source, from its start to the end of this group.
    """

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    spans: list[list[tuple[int, int]]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0
    digest: str = ""

    def metadata(self) -> dict[str, Any]:
        """All fields but the texts and spans, which the digest covers."""
        return {name: value for name, value in vars(self).items() if name not in ("texts", "spans")}


def read_groups(source: Path, settings: EmbedSettings, max_characters: int) -> Iterator[DocumentGroup]:
    """Yield the documents in groups. The same lines give the same groups. The last one may have no documents.

    Args:
        max_characters: a group ends with the document that reaches this number.
    """
    number = size = length = done = 0
    group, digest = DocumentGroup(), blake2b(digest_size=16)
    with _open_lines(source, settings) as lines:
        for raw in lines:
            number, size = number + 1, size + len(raw)
            digest.update(raw)
            if not raw.strip():
                continue
            try:
                document_id, text, spans = _parse(raw, number, settings)
            except ValueError as error:
                if settings.on_error == "stop":
                    raise ValueError(f"{source}, line {number}: {error} Correct it, or use --on-error skip.") from error
                console.note(f"{source}, line {number} is skipped: {error}")
                group.skipped.append(number)
                continue
            group.ids.append(document_id)
            group.texts.append(text)
            group.spans.append(spans)
            length += len(text)
            if len(group.ids) == DOCUMENTS_PER_GROUP or length >= max_characters:
                group.lines, group.bytes, group.digest = number, size, digest.hexdigest()
                yield group
                group, length, done = DocumentGroup(), 0, size
    if size > done:
        group.lines, group.bytes, group.digest = number, size, digest.hexdigest()
        yield group


@contextlib.contextmanager
def _open_lines(source: Path, settings: EmbedSettings) -> Iterator[Iterable[bytes]]:
    """The lines of a source."""
    if source.suffix.lower() == ".parquet":
        yield _parquet_lines(source, settings)
        return
    with source.open("rb") as file:
        yield file


def _parquet_lines(source: Path, settings: EmbedSettings) -> Iterator[bytes]:
    """The ids, texts and spans of a Parquet file as JSON lines."""
    fields = [settings.text_field]
    columns = parquet_columns(source)
    fields += [name for name in (settings.id_field, settings.chunks_field) if name in columns]
    for number, row in enumerate(read_parquet_rows(source, fields)):
        values = {settings.id_field: f"row-{number}", **dict(zip(fields, row, strict=True))}
        yield json.dumps(values, default=str).encode() + b"\n"


def source_size(source: Path, settings: EmbedSettings) -> int:
    """The bytes of a source's lines, for a progress bar; of a Parquet file, about."""
    if source.suffix.lower() == ".parquet":
        return FORMATS[".parquet"].size(source, settings.text_field)
    return source.stat().st_size


def digest_source(source: Path, settings: EmbedSettings) -> dict[str, Any]:
    """The bytes and the digest of a whole source, as its last group has them."""
    size, digest = 0, blake2b(digest_size=16)
    with _open_lines(source, settings) as lines:
        for raw in lines:
            size += len(raw)
            digest.update(raw)
    return {"bytes": size, "digest": digest.hexdigest()}


def _parse(raw: bytes, number: int, settings: EmbedSettings) -> tuple[str, str, list[tuple[int, int]]]:
    """The id, the text, and the spans of a line."""
    text_field, id_field, chunks_field = settings.text_field, settings.id_field, settings.chunks_field
    try:
        row = json.loads(raw.decode("utf-8-sig"))  # the first line may begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error}).") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply.") from error
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        fields = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"it has no text in {text_field!r} (it has: {fields}).")
    document_id = row.get(id_field)
    document_id = f"line-{number}" if document_id is None else document_id
    if isinstance(document_id, bool) or not isinstance(document_id, str | int | float):
        raise ValueError(f"its {id_field!r} is of type {type(document_id).__name__}: use text or a number.")
    check_text(f"its {id_field!r}", str(document_id))
    check_text(f"its {text_field!r}", row[text_field])
    if chunks_field is None:
        return str(document_id), row[text_field], []
    check_spans(row.get(chunks_field), len(row[text_field]), f"its {chunks_field!r}")
    return str(document_id), row[text_field], row[chunks_field]
