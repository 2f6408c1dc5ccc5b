# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward embed`: JSON lines in, a file of vectors out, for corpora larger than memory.

Vectors are written in parts beside the output, each whole or not there, and put together at the end; the same command
again goes on behind the last part. The parts note how many lines they cover, so every line is embedded once, and a
digest of these lines: what follows them may still be mended or grow.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..data.tokenization import check_text
from ..models.loading import load_recurrent, version_of
from ..settings import EmbedSettings
from ..utils import console
from ..utils.files import atomic_write, write_json
from .encode import TokenVectors, check_choices, encode, needs_state

FORMATS = (".parquet", ".npy", ".safetensors")
DOCUMENTS_PER_PART = 64
# a part is in memory at once; token vectors take thousands of times the room of their text
CHARACTERS_PER_PART = {"document": 8_000_000, "windows": 8_000_000, "tokens": 250_000}


@dataclass
class Chunk:
    """Documents that become one part.

    Attributes:
        ids, texts: of the documents.
        skipped: the numbers of lines that could not be read, from 1.
        lines, bytes, digest: how far the source has been read, this chunk included.
    """

    ids: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0
    digest: str = ""

    def note(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "texts"}


def embed(name: str, source: Path, out: Path, settings: EmbedSettings, *, device: str | None = None) -> dict[str, Any]:
    """Embed every document of a JSON lines file. Gives back how many there were, and which lines were skipped.

    Args:
        name: a recurrent model, or a plain encoder, which is then read in windows that stand alone.
        out: .parquet takes everything; .npy and .safetensors document vectors, with ids in a .ids.json beside them.
    """
    output: Any = settings.what
    parts = out.with_name(out.name + ".parts")
    _check(out, parts, output, settings.pooling)
    if not source.is_file():
        raise ValueError(f"{source} is not there: give a file of JSON lines with a {settings.text_field!r} field.")
    loaded = load_recurrent(name, window=settings.window, device=device)
    if loaded.untrained and needs_state(output, settings.pooling):
        instead = "--what document or tokens" if output == "windows" else "--pooling mean"
        raise ValueError(f"{name} is a plain model: its recurrence is untrained, so it has no state. Use {instead}.")
    arguments: dict[str, Any] = {"output": output, "use_state": settings.state and not loaded.untrained}
    arguments |= {one: getattr(settings, one) for one in ("pooling", "overlap", "batch_size")}
    encode(loaded.model, [], loaded.tokenizer, **arguments)  # whatever it refuses, before a folder is made
    same = ("pooling", "window", "overlap", "text_field", "id_field")  # or parts of it would not go together
    asked = {"model": name, "fingerprint": version_of(name), "output": output, "use_state": settings.state,
             **{one: getattr(settings, one) for one in same}}  # fmt: skip
    done = _begin(parts, asked)
    last = done[-1] if done else Chunk().note()
    chunks = _chunks(source, last, settings, CHARACTERS_PER_PART[output])
    documents = sum(len(note["ids"]) for note in done)
    skipped = [number for note in done for number in note["skipped"]]
    with console.Bar(f"embedding {source.name}", source.stat().st_size, "bytes", done=last["bytes"]) as bar:
        for number, chunk in enumerate(chunks, start=len(done)):
            skipped += chunk.skipped
            if not chunk.ids:
                continue  # only lines that are skipped: the source ends here
            progress = partial(_move, bar, bar.done, chunk.bytes)
            vectors = encode(loaded.model, chunk.texts, loaded.tokenizer, progress=progress, **arguments)
            _write_part(parts / f"part-{number:08d}", vectors, output, chunk.note())
            documents += len(chunk.ids)
            bar.set(chunk.bytes)
    if documents:
        _put_together(parts, out, documents)
    shutil.rmtree(parts)
    if not documents:
        raise ValueError(f"nothing to embed: {out.name} would be empty.")
    return {"documents": documents, "skipped": skipped, "out": str(out)}


def _move(bar: console.Bar, begin: int, end: int, read: int, total: int) -> None:
    """A share of a chunk's tokens is that share of its bytes."""
    bar.set(begin + (end - begin) * read // total)


def _check(out: Path, parts: Path, output: str, pooling: str) -> None:
    check_choices(output, pooling)
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: the name must end in {', '.join(FORMATS)}.")
    if out.suffix != ".parquet" and output != "document":
        raise ValueError(f"--out {out}: {out.suffix} takes one vector per document; for {output} use .parquet.")
    if out.exists():
        raise ValueError(f"--out {out} exists already. Use another name, or delete it.")
    if out.suffix != ".parquet" and _ids_file(out).exists() and not parts.exists():  # else a stopped run wrote it
        raise ValueError(f"--out {out}: {_ids_file(out)} exists already. Use another name, or delete it.")
    if out.suffix == ".parquet":
        _pyarrow()


def _ids_file(out: Path) -> Path:
    return out.with_name(out.name + ".ids.json")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("a .parquet file needs pyarrow: pip install carryforward[parquet]") from error
    return pyarrow


# --- lines in ------------------------------------------------------------------------------------------------------


def _chunks(source: Path, done: dict[str, Any], settings: EmbedSettings, characters: int) -> Iterator[Chunk]:
    """Documents to embed together, from where an earlier run stopped."""
    number, size, length = done["lines"], done["bytes"], 0
    chunk = Chunk()
    with source.open("rb") as file:
        digest = _digest(file, size)
        if size and digest.hexdigest() != done["digest"]:
            raise ValueError(
                f"{source} has changed in lines that were embedded already. Use another --out, or delete its .parts "
                "folder to begin anew."
            )
        for raw in file:
            number, size = number + 1, size + len(raw)
            digest.update(raw)
            if not raw.strip():
                continue
            try:
                document, text = _parse(raw, number, settings.text_field, settings.id_field)
            except ValueError as error:
                if settings.on_error == "stop":
                    raise ValueError(f"{source}, line {number}: {error} Mend it, or use --on-error skip.") from error
                console.note(f"{source}, line {number} is skipped: {error}")
                chunk.skipped.append(number)
                continue
            chunk.ids.append(document)
            chunk.texts.append(text)
            length += len(text)
            if len(chunk.ids) == DOCUMENTS_PER_PART or length >= characters:
                chunk.lines, chunk.bytes, chunk.digest = number, size, digest.hexdigest()
                yield chunk
                chunk, length = Chunk(), 0
    if chunk.ids or chunk.skipped:
        chunk.lines, chunk.bytes, chunk.digest = number, size, digest.hexdigest()
        yield chunk


def _digest(file: BinaryIO, size: int) -> Any:
    """Of a file's first bytes, and the file stands behind them."""
    digest = blake2b(digest_size=16)
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        digest.update(piece)
        size -= len(piece)
    return digest


def _parse(raw: bytes, number: int, text_field: str, id_field: str) -> tuple[str, str]:
    """A line's id and text."""
    try:
        row = json.loads(raw.decode("utf-8-sig"))  # a file's first line may begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error}).") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply.") from error
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        fields = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"it has no text in {text_field!r} (it has: {fields}).")
    name = row.get(id_field)
    name = f"line-{number}" if name is None else name
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise ValueError(f"its {id_field!r} is of type {type(name).__name__}: use text or a number.")
    check_text(f"its {id_field!r}", str(name))
    check_text(f"its {text_field!r}", row[text_field])
    return str(name), row[text_field]


# --- parts out -----------------------------------------------------------------------------------------------------


def _begin(parts: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Make the folder of parts, or find out where an earlier run stopped: the notes of its parts."""
    settings_file = parts / "settings.json"
    notes = [json.loads(path.read_text()) for path in _notes(parts)]
    if notes and json.loads(settings_file.read_text()) != settings:
        raise ValueError(f"{parts} was begun with another model or other settings. Delete it, or use another --out.")
    parts.mkdir(parents=True, exist_ok=True)
    write_json(settings_file, settings)
    return notes


def _notes(parts: Path) -> list[Path]:
    """The parts there are, in order. A part is there when its note is: that is written last."""
    return sorted(parts.glob("part-*.json"))


def _write_part(path: Path, vectors: Any, output: str, note: dict[str, Any]) -> None:
    if output == "document":
        arrays = {"vectors": vectors}
    else:
        rows = [row.vectors if isinstance(row, TokenVectors) else row for row in vectors]
        arrays = {f"vectors-{i}": row for i, row in enumerate(rows)}
        arrays |= {f"offsets-{i}": row.offsets for i, row in enumerate(vectors) if isinstance(row, TokenVectors)}
    with atomic_write(path.with_suffix(".npz")) as beside:
        np.savez(beside, **arrays)
    write_json(path.with_suffix(".json"), note)


def _put_together(parts: Path, out: Path, documents: int) -> None:
    """All parts as one file, a part in memory at a time."""
    notes = [(path.with_suffix(".npz"), json.loads(path.read_text())["ids"]) for path in _notes(parts)]
    with atomic_write(out) as beside:
        if out.suffix == ".parquet":
            _as_parquet(notes, beside)
        else:
            _as_array(notes, beside, documents, out.suffix)
            write_json(_ids_file(out), [i for _, ids in notes for i in ids])


def _as_parquet(notes: list[tuple[Path, list[str]]], beside: Path) -> None:
    arrow = _pyarrow()
    tables = _tables(arrow, notes)
    first = next(tables)
    with arrow.parquet.ParquetWriter(beside, first.schema) as writer:
        for table in chain([first], tables):  # each is a row group
            writer.write_table(table)


def _tables(arrow: Any, notes: list[tuple[Path, list[str]]]) -> Iterator[Any]:
    """Document vectors part by part; of tokens and windows, which are many, one document at a time."""
    for path, ids in notes:
        with np.load(path) as part:
            if "vectors" in part:
                yield arrow.table({"id": arrow.array(ids), "vector": _lists(arrow, part["vectors"])})
                continue
            for i, name in enumerate(ids):
                vectors = part[f"vectors-{i}"]
                columns = {
                    "id": arrow.array([name]),
                    "vectors": _lists(arrow, vectors.reshape(1, -1)),
                    "shape": _lists(arrow, np.array([vectors.shape])),
                }
                if f"offsets-{i}" in part:
                    pairs = _lists(arrow, part[f"offsets-{i}"])
                    columns["offsets"] = arrow.LargeListArray.from_arrays([0, len(pairs)], pairs)
                yield arrow.table(columns)


def _lists(arrow: Any, rows: np.ndarray) -> Any:
    """Rows of a matrix as an Arrow column, without a Python object for each number."""
    borders = np.arange(len(rows) + 1) * rows.shape[1]  # of a book's tokens beyond 32 bits: hence large lists
    return arrow.LargeListArray.from_arrays(borders, rows.reshape(-1))


def _as_array(notes: list[tuple[Path, list[str]]], beside: Path, documents: int, suffix: str) -> None:
    """A header, and then the vectors of one part after the other."""
    with np.load(notes[0][0]) as part:
        shape = documents, part["vectors"].shape[1]
    with beside.open("wb") as file:
        if suffix == ".npy":
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        else:
            entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}
            header = json.dumps({"vectors": entry}).encode()
            header += b" " * (-len(header) % 8)
            file.write(len(header).to_bytes(8, "little") + header)
        for path, _ in notes:
            with np.load(path) as part:
                file.write(part["vectors"].astype("<f4").tobytes())
