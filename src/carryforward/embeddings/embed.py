# SPDX-License-Identifier: Apache-2.0
"""`carryforward embed`: from a JSON lines file to a file of vectors, for corpora larger than memory.

The input is read in chunks. The vectors of a chunk are written as a part, in a folder beside the output, and the parts
are merged at the end. An interrupted run continues after the last complete part when the same command is run again.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

from ..models.loading import load_recurrent, version_of
from ..settings import EmbedSettings
from ..utils.progress import ProgressBar
from .document_chunks import CHARACTERS_PER_CHUNK, Chunk, read_chunks
from .encode import check_choices, encode
from .vector_files import FORMATS, ids_file, import_pyarrow, merge_parts, open_parts, write_part

_SAME = ("pooling", "window", "overlap", "text_field", "id_field")  # settings that all parts of an output share


def embed(name: str, source: Path, out: Path, settings: EmbedSettings, *, device: str | None = None) -> dict[str, Any]:
    """Embed every document of a JSON lines file.

    Args:
        name: a recurrent model, or a plain encoder, whose windows are read independently, without a state.
        source: a JSON lines file, one document per line.
        out: a .parquet file takes every kind of vectors; .npy and .safetensors take document vectors, with the ids in a
            .ids.json file beside them.

    Returns:
        The number of documents, the numbers of skipped lines, and the output path.
    """
    output: Any = settings.what
    parts = out.with_name(out.name + ".parts")
    _check_output(out, parts, output, settings.pooling)
    if not source.is_file():
        raise ValueError(f"{source} does not exist: give a JSON lines file with a {settings.text_field!r} field.")
    loaded = load_recurrent(name, window=settings.window, device=device)
    kwargs: dict[str, Any] = {"output": output, "use_state": settings.state and not loaded.untrained}
    kwargs |= {field: getattr(settings, field) for field in ("pooling", "overlap", "batch_size")}
    encode(loaded.model, [], loaded.tokenizer, **kwargs)  # raises for bad arguments before a folder is made
    identity = {"model": name, "fingerprint": version_of(name), "output": output, "use_state": settings.state}
    done = open_parts(parts, identity | {field: getattr(settings, field) for field in _SAME})
    last = done[-1] if done else Chunk().metadata()
    documents = sum(len(part["ids"]) for part in done)
    skipped = [line for part in done for line in part["skipped"]]
    chunks = read_chunks(source, last, settings, CHARACTERS_PER_CHUNK[output])
    with ProgressBar(f"embedding {source.name}", source.stat().st_size, "bytes", done=last["bytes"]) as bar:
        for number, chunk in enumerate(chunks, start=len(done)):
            skipped += chunk.skipped
            if not chunk.ids:
                continue  # the last lines of the source, all of them skipped
            progress = partial(_advance, bar, bar.done, chunk.bytes)
            vectors = encode(loaded.model, chunk.texts, loaded.tokenizer, progress=progress, **kwargs)
            write_part(parts / f"part-{number:08d}", vectors, output, chunk.metadata())
            documents += len(chunk.ids)
            bar.update(chunk.bytes)
    if documents:
        merge_parts(parts, out, documents)
    shutil.rmtree(parts)
    if not documents:
        raise ValueError(f"nothing to embed: {out.name} would be empty.")
    return {"documents": documents, "skipped": skipped, "out": str(out)}


def _advance(bar: ProgressBar, begin: int, end: int, read: int, total: int | None) -> None:
    """Move a bar between bytes `begin` and `end`, in proportion to the tokens of the chunk that were read."""
    bar.update(begin + (end - begin) * read // (total or 1))


def _check_output(out: Path, parts: Path, output: str, pooling: str) -> None:
    """Raise ValueError if the vectors cannot be written to `out`."""
    check_choices(output, pooling)
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: the name must end in {', '.join(FORMATS)}.")
    if out.suffix != ".parquet" and output != "document":
        raise ValueError(f"--out {out}: {out.suffix} takes one vector per document; for {output} use .parquet.")
    if out.exists():
        raise ValueError(f"--out {out} exists already. Use another name, or delete it.")
    # with a folder of parts, the ids were written by an interrupted run of the same output
    if out.suffix != ".parquet" and ids_file(out).exists() and not parts.exists():
        raise ValueError(f"--out {out}: {ids_file(out)} exists already. Use another name, or delete it.")
    if out.suffix == ".parquet":
        import_pyarrow()
