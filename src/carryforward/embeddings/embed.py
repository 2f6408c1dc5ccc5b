# SPDX-License-Identifier: Apache-2.0
"""`carryforward embed`: from a file of JSON lines or Parquet to a file of vectors, for corpora larger than memory.

The input is read in chunks. The vectors of a chunk are written as a part, in a folder beside the output, and the parts
are merged at the end. When the same command is run again after an interruption, chunks whose part is intact are not
embedded again. A JSON file beside the output records how it was made.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from ..models.loading import Loaded, load_recurrent
from ..models.model_files import version_of
from ..settings.commands import EmbedSettings
from ..utils import console
from ..utils.digests import damaged_file, digest_files
from ..utils.files import clear_leftovers, delete_folder, read_sealed_json, write_sealed_json
from ..utils.install import import_pyarrow
from ..utils.locks import LOCK, lock_output
from ..utils.parsing import read_json_object
from ..utils.progress import ProgressBar
from ..utils.provenance import provenance
from .document_chunks import CHARACTERS_PER_CHUNK, digest_source, read_chunks, source_size
from .encode import check_choices, encode
from .vector_files import FORMATS, Part, Parts, ids_file, is_parts_folder, merge_parts

_SPEED = ("batch_size", "on_error")  # settings that the vectors do not depend on


def embed(name: str, source: Path, out: Path, settings: EmbedSettings, *, device: str | None = None) -> dict[str, Any]:
    """Embed every document of a file of JSON lines or Parquet.

    Args:
        name: a recurrent model, or a plain encoder, whose windows are read independently, without a state.
        source: a .parquet file, one document per row, or a JSON lines file, one per line.
        out: a .parquet file takes every kind of vectors; .npy and .safetensors take document vectors, with the ids in a
            .ids.json file beside them.

    Returns:
        The number of documents, the numbers of skipped lines, and the output path.
    """
    output: Any = settings.what
    parts = out.with_name(out.name + ".parts")
    if not source.is_file():
        raise ValueError(
            f"{source} does not exist: give a JSON lines or Parquet file with a {settings.text_field!r} field."
        )
    _check_output(out, parts, output, settings.pooling)
    used = {field: value for field, value in dataclasses.asdict(settings).items() if field not in _SPEED}
    identity = {"model": name, "version": version_of(name), **used}
    if out.exists():
        return _finished(source, out, settings, parts, identity)
    loaded = load_recurrent(name, window=settings.window, device=device)
    kwargs: dict[str, Any] = {"output": output, "use_state": settings.state and not loaded.untrained}
    kwargs |= {field: getattr(settings, field) for field in ("pooling", "overlap", "batch_size")}
    encode(loaded.model, [], loaded.tokenizer, **kwargs)  # raises for bad arguments before a folder is made
    parts.mkdir(exist_ok=True)
    with lock_output(parts / LOCK, out):
        if out.exists():  # another process has just written it
            return _finished(source, out, settings, parts, identity)
        try:
            return _embed(loaded, source, out, settings, Parts(parts, identity), kwargs)
        finally:
            if parts.is_dir() and not any(parts.glob("part-*")):
                delete_folder(parts)


def _embed(
    loaded: Loaded, source: Path, out: Path, settings: EmbedSettings, parts: Parts, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Embed what is not embedded yet, merge the parts and record how the output was made."""
    merged, skipped = list[Part](), list[int]()
    read = {"bytes": 0, "digest": ""}
    with ProgressBar(f"embedding {source.name}", source_size(source, settings), "bytes") as bar:
        for number, chunk in enumerate(read_chunks(source, settings, CHARACTERS_PER_CHUNK[settings.what])):
            skipped += chunk.skipped
            read = {"bytes": chunk.bytes, "digest": chunk.digest}
            if not chunk.ids:
                continue  # the last lines of the source, skipped or blank
            if not parts.has(number, chunk):
                progress = partial(_advance, bar, bar.done, chunk.bytes)
                vectors = encode(loaded.model, chunk.texts, loaded.tokenizer, progress=progress, **kwargs)
                parts.write(number, chunk, vectors)
            merged.append((parts.path(number), chunk.ids))
            bar.update(chunk.bytes)
    result = {"documents": sum(len(ids) for _, ids in merged), "skipped": skipped, "out": str(out)}
    if merged:
        record = {"kind": "embedding", **provenance(str(loaded.model.device)), "settings": parts.identity}
        record |= {"source": read, **result}
        with merge_parts(merged, out) as written:
            write_sealed_json(record_file(out), {**record, "files": digest_files(written[0].parent, written)})
    delete_folder(parts.folder)
    if not merged:
        raise ValueError(f"nothing to embed: {out.name} would be empty.")
    return result


def record_file(out: Path) -> Path:
    """The file beside an output that records how it was made: model, settings, source, versions, digests."""
    return out.with_name(out.name + ".json")


def _finished(
    source: Path, out: Path, settings: EmbedSettings, parts: Path, identity: dict[str, Any]
) -> dict[str, Any]:
    """The result of an earlier call that has written the output. Refuses an output of anything else."""
    refusal = f"--out {out} exists already"
    if not record_file(out).is_file():
        raise ValueError(f"{refusal}. Use another name, or delete it.")
    record = read_sealed_json(record_file(out), "Use another name, or delete the output.")
    if record.get("settings") != identity:
        raise ValueError(f"{refusal}, of another model or other settings ({record_file(out)}). Use another name.")
    if record["source"] != digest_source(source, settings):
        raise ValueError(f"{refusal}, and {source} has changed since. Use another name, or delete the output.")
    if (file := damaged_file(out.parent, record["files"])) is not None:
        raise ValueError(f"{refusal}, and {file} is damaged or was changed. Use another name, or delete the output.")
    if parts.is_dir():  # the run that wrote the output was killed at its very end
        with lock_output(parts / LOCK, out):
            delete_folder(parts)
    for name in (out, parts, record_file(out), ids_file(out)):
        clear_leftovers(out.parent, name.name)
    console.note(f"{out} is finished already.")
    return {name: record[name] for name in ("documents", "skipped", "out")}


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
    if not out.absolute().parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.absolute().parent}. Create it first.")
    for path, kind in ((out, "folder"), (parts, "file")):
        if path.exists() and path.is_dir() == (kind == "folder"):
            raise ValueError(f"--out {out}: {path} is a {kind}. Use another name.")
    if parts.is_dir() and not is_parts_folder(parts):
        raise ValueError(f"--out {out}: the folder {parts} holds other files. Use another name, or move it.")
    record = record_file(out)
    if record.exists() and read_json_object(record, "Use another name.").get("kind") != "embedding":
        raise ValueError(f"--out {out}: {record} exists already and is not a record of embed. Use another name.")
    # with a record or a folder of parts, the ids were written by an earlier run of the same output
    own = record.exists() or parts.exists()
    if out.suffix != ".parquet" and ids_file(out).exists() and not own:
        raise ValueError(f"--out {out}: {ids_file(out)} exists already. Use another name, or delete it.")
    if out.suffix == ".parquet":
        import_pyarrow()
