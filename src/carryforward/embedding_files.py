# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward embed`: JSON lines in, a file of vectors out, for corpora larger than memory.

Vectors are written in parts beside the output, each whole or not there, and put together at the end; the same command
again goes on behind the last part. The parts note how many lines they cover, so every line is embedded once.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import console
from .embedding import TokenVectors, encode
from .loading import load_recurrent

FORMATS = (".parquet", ".npy", ".safetensors")
DOCUMENTS_PER_PART = 64


@dataclass(frozen=True)
class Line:
    """One document: its line, from 1, its id and its text."""

    number: int
    id: str
    text: str


def embed(
    name: str,
    source: Path,
    out: Path,
    *,
    output: str = "document",
    pooling: str = "mean",
    window: int | None = None,
    overlap: int | None = None,
    use_state: bool = True,
    text_field: str = "text",
    id_field: str = "id",
    on_error: str = "stop",
    batch_size: int = 8,
    device: str | None = None,
) -> dict[str, Any]:
    """Embed every document of a JSON lines file. Gives back how many there were, and which lines were skipped.

    Args:
        name: a recurrent model, or a plain encoder, which is then read in windows that stand alone.
        out: .parquet takes everything; .npy and .safetensors document vectors, with ids in a .ids.json beside them.
        output, pooling: as for `encode`.
        on_error: what to do with a line that cannot be read: "stop" or "skip".
    """
    _check(out, output, on_error)
    if not source.is_file():
        raise ValueError(f"{source} is not there: give a file of JSON lines with a {text_field!r} field.")
    settings = {
        "model": name, "source": [str(source.resolve()), source.stat().st_size], "output": output, "pooling": pooling,
        "window": window, "overlap": overlap, "use_state": use_state, "text_field": text_field, "id_field": id_field,
    }  # fmt: skip
    parts = out.with_name(out.name + ".parts")
    done = _begin(parts, settings)
    loaded = load_recurrent(name, window=window, device=device)
    use_state = use_state and not loaded.untrained
    skipped: list[int] = list(done["skipped"])
    with console.Bar(f"embedding {source.name}", source.stat().st_size, "bytes", done=done["bytes"]) as bar:
        for chunk, bad, lines, size in _chunks(source, done, text_field, id_field, on_error):
            skipped += bad
            texts = [line.text for line in chunk]
            vectors = encode(
                loaded.model, texts, loaded.tokenizer, output=output, pooling=pooling, overlap=overlap,
                use_state=use_state, batch_size=batch_size,
            )  # fmt: skip
            note = {"lines": lines, "bytes": size, "skipped": skipped, "ids": [line.id for line in chunk]}
            _write_part(parts, vectors, output, note)
            bar.set(size)
    total = _put_together(parts, out)
    shutil.rmtree(parts)
    return {"documents": total, "skipped": skipped, "out": str(out)}


def _check(out: Path, output: str, on_error: str) -> None:
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: the name must end in {', '.join(FORMATS)}.")
    if out.suffix != ".parquet" and output != "document":
        raise ValueError(f"--out {out}: {out.suffix} takes one vector per document; for {output} use .parquet.")
    if out.exists():
        raise ValueError(f"--out {out} exists already. Use another name, or delete it.")
    if on_error not in ("stop", "skip"):
        raise ValueError(f"--on-error {on_error}: it must be stop or skip.")
    if out.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("a .parquet file needs pyarrow: pip install carryforward[parquet]") from error
    return pyarrow


# --- lines in ------------------------------------------------------------------------------------------------------


def _chunks(
    source: Path, done: dict[str, Any], text_field: str, id_field: str, on_error: str
) -> Iterator[tuple[list[Line], list[int], int, int]]:
    """Documents to embed together, the lines left out, and how many lines and bytes have been read so far."""
    chunk: list[Line] = []
    bad: list[int] = []
    number, size = done["lines"], done["bytes"]
    with source.open("rb") as file:
        file.seek(size)
        for raw in file:
            number, size = number + 1, size + len(raw)
            if not raw.strip():
                continue
            try:
                chunk.append(_parse(raw, number, text_field, id_field))
            except ValueError as error:
                if on_error == "stop":
                    raise ValueError(f"{source}, line {number}: {error} Mend it, or use --on-error skip.") from error
                console.note(f"{source}, line {number} is skipped: {error}")
                bad.append(number)
            if len(chunk) == DOCUMENTS_PER_PART:
                yield chunk, bad, number, size
                chunk, bad = [], []
    if chunk or bad:
        yield chunk, bad, number, size


def _parse(raw: bytes, number: int, text_field: str, id_field: str) -> Line:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error}).") from error
    if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
        fields = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"it has no text in {text_field!r} (it has: {fields}).")
    return Line(number, str(row.get(id_field, f"line-{number}")), row[text_field])


# --- parts out -----------------------------------------------------------------------------------------------------


def _begin(parts: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Make the folder of parts, or find out where an earlier run stopped."""
    note = parts / "settings.json"
    if note.exists() and json.loads(note.read_text()) != settings:
        raise ValueError(f"{parts} was begun with another model, source or settings. Delete it, or use another --out.")
    parts.mkdir(parents=True, exist_ok=True)
    _replace(note, json.dumps(settings).encode())
    last = _notes(parts)[-1:]
    return json.loads(last[0].read_text()) if last else {"lines": 0, "bytes": 0, "skipped": []}


def _notes(parts: Path) -> list[Path]:
    """The parts there are, in order. A part is there when its note is: that is written last."""
    return sorted(parts.glob("part-*.json"))


def _write_part(parts: Path, vectors: Any, output: str, note: dict[str, Any]) -> None:
    name = f"part-{len(_notes(parts)):08d}"
    if output == "document":
        arrays = {"vectors": vectors}
    else:
        rows = [row.vectors if isinstance(row, TokenVectors) else row for row in vectors]
        arrays = {f"vectors-{i}": row for i, row in enumerate(rows)}
        arrays |= {f"offsets-{i}": row.offsets for i, row in enumerate(vectors) if isinstance(row, TokenVectors)}
    beside = parts / f".{name}.npz"
    with beside.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(beside, parts / f"{name}.npz")
    _replace(parts / f"{name}.json", json.dumps(note).encode())


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.tmp")
    beside.write_bytes(content)
    os.replace(beside, path)


def _put_together(parts: Path, out: Path) -> int:
    """All parts as one file, a part in memory at a time; how many documents it holds."""
    notes = [(path.with_suffix(".npz"), json.loads(path.read_text())["ids"]) for path in _notes(parts)]
    total = sum(len(ids) for _, ids in notes)
    if not total:
        raise ValueError(f"nothing to embed: {parts.name.removesuffix('.parts')} would be empty.")
    beside = out.with_name(f".{out.name}.tmp")
    if out.suffix == ".parquet":
        _as_parquet(notes, beside)
    else:
        _as_array(notes, beside, total, out.suffix)
        _replace(out.with_suffix(".ids.json"), json.dumps([i for _, ids in notes for i in ids]).encode())
    os.replace(beside, out)
    return total


def _as_parquet(notes: list[tuple[Path, list[str]]], beside: Path) -> None:
    arrow = _pyarrow()
    writer = None
    for path, ids in notes:
        with np.load(path) as part:
            columns: dict[str, list] = {"id": ids}
            if "vectors" in part:
                columns["vector"] = list(part["vectors"])
            else:
                columns["vectors"] = [part[f"vectors-{i}"].reshape(-1).tolist() for i in range(len(ids))]
                columns["shape"] = [list(part[f"vectors-{i}"].shape) for i in range(len(ids))]
                if "offsets-0" in part:
                    columns["offsets"] = [part[f"offsets-{i}"].tolist() for i in range(len(ids))]
        table = arrow.table({name: _column(arrow, name, values) for name, values in columns.items()})
        writer = writer or arrow.parquet.ParquetWriter(beside, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def _column(arrow: Any, name: str, values: Any) -> Any:
    types = {
        "id": arrow.string(),
        "vector": arrow.list_(arrow.float32()),
        "vectors": arrow.list_(arrow.float32()),
        "shape": arrow.list_(arrow.int64()),
        "offsets": arrow.list_(arrow.list_(arrow.int64())),
    }
    return arrow.array(values, type=types[name])


def _as_array(notes: list[tuple[Path, list[str]]], beside: Path, total: int, suffix: str) -> None:
    with np.load(notes[0][0]) as part:
        width = part["vectors"].shape[1]
    array = np.lib.format.open_memmap(beside, mode="w+", dtype=np.float32, shape=(total, width))
    start = 0
    for path, ids in notes:
        with np.load(path) as part:
            array[start : start + len(ids)] = part["vectors"]
        start += len(ids)
    array.flush()
    if suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({"vectors": np.ascontiguousarray(array)}, f"{beside}.2")
        os.replace(f"{beside}.2", beside)
