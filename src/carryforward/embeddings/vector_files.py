# SPDX-License-Identifier: Apache-2.0
"""Files of vectors: parts of an unfinished output, and the .parquet, .npy or .safetensors file they are merged into.

A part is an .npz file of arrays and a .json file of metadata. The metadata is written last, so a part is complete if
its .json file exists.
"""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.files import atomic_write, write_json
from .encode import TokenVectors

FORMATS = (".parquet", ".npy", ".safetensors")
Part = tuple[Path, list[str]]  # the .npz file, and the ids of its documents


def ids_file(out: Path) -> Path:
    """The file of document ids beside a .npy or .safetensors file."""
    return out.with_name(out.name + ".ids.json")


def import_pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("a .parquet file needs pyarrow: pip install carryforward[parquet]") from error
    return pyarrow


def open_parts(folder: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Create the folder of parts, or open that of an interrupted run with the same settings.

    Returns:
        The metadata of the parts in it.
    """
    settings_file = folder / "settings.json"
    metadata = [json.loads(path.read_text()) for path in _metadata_files(folder)]
    if metadata and json.loads(settings_file.read_text()) != settings:
        raise ValueError(f"{folder} was begun with another model or other settings. Delete it, or use another --out.")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(settings_file, settings)
    return metadata


def _metadata_files(folder: Path) -> list[Path]:
    """One file for each complete part, in order."""
    return sorted(folder.glob("part-*.json"))


def write_part(path: Path, vectors: Any, output: str, metadata: dict[str, Any]) -> None:
    """Write a part.

    Args:
        path: without a suffix.
        vectors: what `encode` returns for `output`.
    """
    if output == "document":
        arrays = {"vectors": vectors}
    else:
        rows = [row.vectors if isinstance(row, TokenVectors) else row for row in vectors]
        arrays = {f"vectors-{i}": row for i, row in enumerate(rows)}
        arrays |= {f"offsets-{i}": row.offsets for i, row in enumerate(vectors) if isinstance(row, TokenVectors)}
    with atomic_write(path.with_suffix(".npz")) as temporary:
        np.savez(temporary, **arrays)
    write_json(path.with_suffix(".json"), metadata)


def merge_parts(folder: Path, out: Path, documents: int) -> None:
    """Write all parts as one file, with one part in memory at a time."""
    parts = [(path.with_suffix(".npz"), json.loads(path.read_text())["ids"]) for path in _metadata_files(folder)]
    with atomic_write(out) as temporary:
        if out.suffix == ".parquet":
            _write_parquet(parts, temporary)
        else:
            _write_array(parts, temporary, documents, out.suffix)
            write_json(ids_file(out), [document_id for _, ids in parts for document_id in ids])


def _write_parquet(parts: list[Part], path: Path) -> None:
    """Write a row group for each table."""
    arrow = import_pyarrow()
    tables = _tables(arrow, parts)
    first = next(tables)
    with arrow.parquet.ParquetWriter(path, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


def _tables(arrow: Any, parts: list[Part]) -> Iterator[Any]:
    """Arrow tables: one per part for document vectors, one per document for the larger token and window vectors."""
    for path, ids in parts:
        with np.load(path) as part:
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


def _write_array(parts: list[Part], path: Path, documents: int, suffix: str) -> None:
    """Write the header of a .npy or .safetensors file, and then the vectors of each part."""
    with np.load(parts[0][0]) as part:
        shape = documents, part["vectors"].shape[1]
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
