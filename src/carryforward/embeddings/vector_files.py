# SPDX-License-Identifier: Apache-2.0
"""Files of vectors: parts of an unfinished output, and the .parquet, .npy or .safetensors file they are merged into.

A part is an .npz file of arrays and a .json file of metadata with a digest of the arrays. The metadata is written last,
so a part is complete if its .json file exists.
"""

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.digests import damaged_file, digest_file
from ..utils.files import atomic_write, clear_leftovers, is_leftover, publish, read_sealed_json, write_sealed_json
from ..utils.install import import_pyarrow
from .chunks import ChunkVectors
from .document_groups import DocumentGroup
from .encode import TokenVectors

logger = logging.getLogger(__name__)

FORMATS = (".parquet", ".npy", ".safetensors")
Part = tuple[Path, list[str]]  # the .npz file, and the ids of its documents


def ids_file(out: Path) -> Path:
    """The file of ids beside a .npy or .safetensors file: of each row's document, and the span of a chunk."""
    return out.with_name(out.name + ".ids.json")


def is_parts_folder(folder: Path) -> bool:
    """Whether a folder holds nothing but parts and what killed processes may leave."""
    own = re.compile(r"settings\.json|part-\d{8}\.(npz|json)")
    return all(own.fullmatch(path.name) or is_leftover(path) for path in folder.iterdir())


class Parts:
    """The folder of an unfinished output's parts. A part is used again if it is intact and its documents are unchanged.

    Attributes:
        identity: the model and the settings that all parts share.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]):
        self.folder, self.identity = folder, json.loads(json.dumps(identity))

    def prepare(self) -> None:
        """Clear what killed processes left; raise ValueError if the folder belongs to another model or to other
        settings. To be called once, before any process uses the parts."""
        clear_leftovers(self.folder)
        settings = self._read("settings.json")
        if settings == self.identity:
            return
        if settings is not None and any(self.folder.glob("part-*.json")):
            raise ValueError(
                f"{self.folder} was begun with another model or other settings. Delete it, or use another --out."
            )
        for path in self.folder.glob("part-*"):  # nothing tells what they were made with
            path.unlink()
        write_sealed_json(self.folder / "settings.json", self.identity)

    def has(self, number: int, group: DocumentGroup) -> bool:
        """Whether the part of a group is there and intact."""
        metadata = self._read(f"part-{number:08d}.json")
        if metadata is None:
            return False
        digest = metadata.pop("vectors", "")
        if metadata != group.metadata():
            return False  # its lines have changed
        intact = damaged_file(self.folder, {self.path(number).name: digest}) is None
        if not intact:
            logger.warning("%s is missing or damaged and is made again.", self.path(number))
        return intact

    def write(self, number: int, group: DocumentGroup, vectors: Any) -> None:
        """Write what `encode` returned for a group: the arrays first, and the metadata when they are complete."""
        path = self.path(number)
        with atomic_write(path) as temporary:
            np.savez(temporary, **_arrays(vectors))  # type: ignore[arg-type]
        write_sealed_json(path.with_suffix(".json"), {**group.metadata(), "vectors": digest_file(path)})

    def path(self, number: int) -> Path:
        """The .npz file of a part."""
        return self.folder / f"part-{number:08d}.npz"

    def _read(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the folder; None if it is missing or damaged."""
        if not (self.folder / name).exists():
            return None
        try:
            return read_sealed_json(self.folder / name)
        except ValueError as error:
            logger.warning("%s It is made again.", error)
            return None


def _arrays(vectors: Any) -> dict[str, np.ndarray]:
    """The arrays of a part, by name, from what `encode` returned."""
    if isinstance(vectors, np.ndarray):
        return {"vectors": vectors}
    if vectors and isinstance(vectors[0], ChunkVectors):
        arrays = {name: np.concatenate([getattr(row, name) for row in vectors]) for name in ("vectors", "spans")}
        return arrays | {"counts": np.array([len(row.spans) for row in vectors])}
    rows = [row.vectors if isinstance(row, TokenVectors) else row for row in vectors]
    arrays = {f"vectors-{i}": row for i, row in enumerate(rows)}
    return arrays | {f"offsets-{i}": row.offsets for i, row in enumerate(vectors) if isinstance(row, TokenVectors)}


@contextmanager
def merge_parts(parts: list[Part], out: Path) -> Iterator[list[Path]]:
    """Write all parts as one file, with one part in memory at a time. Yields the files that were written, before they
    appear at their places."""
    with atomic_write(out) as temporary:
        written = [temporary]
        if out.suffix == ".parquet":
            _write_parquet(parts, temporary)
        else:
            rows = [row for part in parts for row in _rows(part)]
            _write_array(parts, temporary, len(rows), out.suffix)
            written.append(temporary.with_name(ids_file(out).name))
            written[1].write_text("[\n " + ",\n ".join(map(json.dumps, rows)) + "\n]\n")
        yield written
        for path in written[1:]:
            publish(path, out.with_name(path.name))


def _rows(part: Part) -> list[Any]:
    """What stands in the file of ids for each row: the document's id, and for a chunk also its span."""
    path, ids = part
    with np.load(path) as arrays:
        if "counts" not in arrays:
            return list(ids)
        names = [name for name, count in zip(ids, arrays["counts"].tolist(), strict=True) for _ in range(count)]
        return [
            {"id": name, "start": start, "stop": stop}
            for name, (start, stop) in zip(names, arrays["spans"].tolist(), strict=True)
        ]


def _write_parquet(parts: list[Part], path: Path) -> None:
    """Write a row group for each table."""
    arrow = import_pyarrow()
    tables = _tables(arrow, parts)
    first = next(tables)
    with arrow.parquet.ParquetWriter(path, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def _tables(arrow: Any, parts: list[Part]) -> Iterator[Any]:
    """Arrow tables: one per part for vectors of documents and chunks, one per document for the larger token and window
    vectors."""
    for path, ids in parts:
        with np.load(path) as part:
            if "counts" in part:
                rows = _rows((path, ids))
                columns = {name: arrow.array([row[name] for row in rows], kind) for name, kind in
                           (("id", arrow.string()), ("start", arrow.int64()), ("stop", arrow.int64()))}  # fmt: skip
                yield arrow.table(columns | {"vector": _lists(arrow, part["vectors"])})
                continue
            if "vectors" in part:
                yield arrow.table({"id": arrow.array(ids), "vector": _lists(arrow, part["vectors"])})
                continue
            for i, document_id in enumerate(ids):
                vectors = part[f"vectors-{i}"]
                columns = {
                    "id": arrow.array([document_id]),
                    "vectors": _lists(arrow, vectors.reshape(1, -1)),
                    "shape": _lists(arrow, np.array([vectors.shape])),
                }
                if f"offsets-{i}" in part:
                    pairs = _lists(arrow, part[f"offsets-{i}"])
                    columns["offsets"] = arrow.LargeListArray.from_arrays([0, len(pairs)], pairs)
                yield arrow.table(columns)


def _lists(arrow: Any, rows: np.ndarray) -> Any:
    """The rows of a matrix as a column of lists, without a Python object per number."""
    borders = np.arange(len(rows) + 1) * rows.shape[1]  # may exceed 32 bits for the tokens of a book: large lists
    return arrow.LargeListArray.from_arrays(borders, rows.reshape(-1))


def _write_array(parts: list[Part], path: Path, rows: int, suffix: str) -> None:
    """Write the header of a .npy or .safetensors file, and then the vectors of each part."""
    with np.load(parts[0][0]) as part:
        shape = rows, part["vectors"].shape[1]
    with path.open("wb") as file:
        if suffix == ".npy":
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
        else:
            entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, 4 * shape[0] * shape[1]]}
            header = json.dumps({"vectors": entry}).encode()
            header += b" " * (-len(header) % 8)
            file.write(len(header).to_bytes(8, "little") + header)
        for part_path, _ in parts:
            with np.load(part_path) as part:
                file.write(part["vectors"].astype("<f4").tobytes())
