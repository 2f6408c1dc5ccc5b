# SPDX-License-Identifier: Apache-2.0
"""`carryforward embed`: from a JSON lines file to a file of vectors, for corpora larger than memory.

The input is read in groups of documents. The vectors of a group are written as a part, in a folder beside the output,
and the parts are merged at the end. When the same command is run again after an interruption, groups whose part is
intact are not embedded again. A JSON file beside the output records how it was made.
"""

import dataclasses
import hashlib
from functools import partial
from pathlib import Path
from typing import Any

from ..models.loading import Loaded
from ..models.model_files import version_of
from ..settings.commands import EmbedSettings
from ..utils import console
from ..utils.digests import damaged_file, digest_files
from ..utils.files import clear_leftovers, delete_folder, read_sealed_json, write_sealed_json
from ..utils.locks import LOCK, lock_output
from ..utils.parsing import read_json_object
from ..utils.progress import ProgressBar
from ..utils.provenance import provenance
from .document_groups import CHARACTERS_PER_GROUP, DocumentGroup, read_groups
from .encode import check_choices, encode
from .modules import load_embedder, read_modules
from .vector_files import FORMATS, Part, Parts, ids_file, import_pyarrow, is_parts_folder, merge_parts

_SPEED = ("batch_size", "on_error")  # settings that the vectors do not depend on


def embed(name: str, source: Path, out: Path, settings: EmbedSettings, *, device: str | None = None) -> dict[str, Any]:
    """Embed every document of a JSON lines file.

    Args:
        name: a recurrent model, or a plain encoder, whose windows are read independently, without a state. What a
            folder of sentence-transformers says is the default of pooling, normalization, prompt and window.
        source: a JSON lines file, one document per line.
        out: a .parquet file takes every kind of vectors; .npy and .safetensors take vectors of documents and chunks,
            with the ids in a .ids.json file beside them.

    Returns:
        The number of documents, the numbers of skipped lines, and the output path.
    """
    output: Any = settings.what
    parts = out.with_name(out.name + ".parts")
    if not source.is_file():
        raise ValueError(f"{source} does not exist: give a JSON lines file with a {settings.text_field!r} field.")
    how = read_modules(name).choose(settings.pooling, settings.special_tokens, settings.normalize, settings.prompt)
    check_choices(output, how["pooling"], how["special_tokens"])
    _check_output(out, parts, output)
    used = {field: value for field, value in dataclasses.asdict(settings).items() if field not in _SPEED}
    identity = {"model": name, "version": version_of(name), **used, **how}
    if out.exists():
        return _finished(source, out, parts, identity)
    loaded, _ = load_embedder(name, window=settings.window, device=device)
    kwargs: dict[str, Any] = {"output": output, "use_state": settings.state and not loaded.untrained}
    kwargs |= {**how, "overlap": settings.overlap, "batch_size": settings.batch_size}
    encode(loaded.model, [], loaded.tokenizer, **_with_chunks(kwargs, settings, DocumentGroup()))  # checks arguments
    parts.mkdir(exist_ok=True)
    with lock_output(parts / LOCK, out):
        if out.exists():  # another process has just written it
            return _finished(source, out, parts, identity)
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
    with ProgressBar(f"embedding {source.name}", source.stat().st_size, "bytes") as bar:
        for number, group in enumerate(read_groups(source, settings, CHARACTERS_PER_GROUP[settings.what])):
            skipped += group.skipped
            read = {"bytes": group.bytes, "digest": group.digest}
            if not group.ids:
                continue  # the last lines of the source, skipped or blank
            if not parts.has(number, group):
                progress = partial(_advance, bar, bar.done, group.bytes)
                arguments = _with_chunks(kwargs, settings, group)
                vectors = encode(loaded.model, group.texts, loaded.tokenizer, progress=progress, **arguments)
                parts.write(number, group, vectors)
            merged.append((parts.path(number), group.ids))
            bar.update(group.bytes)
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


def _with_chunks(kwargs: dict[str, Any], settings: EmbedSettings, group: DocumentGroup) -> dict[str, Any]:
    """Arguments of `encode` for a group of documents: of chunks, their size or their spans."""
    return {**kwargs, "chunks": settings.chunk_size if settings.chunks_field is None else group.spans}


def record_file(out: Path) -> Path:
    """The file beside an output that records how it was made: model, settings, source, versions, digests."""
    return out.with_name(out.name + ".json")


def _finished(source: Path, out: Path, parts: Path, identity: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier call that has written the output. Refuses an output of anything else."""
    refusal = f"--out {out} exists already"
    if not record_file(out).is_file():
        raise ValueError(f"{refusal}. Use another name, or delete it.")
    record = read_sealed_json(record_file(out), "Use another name, or delete the output.")
    if record.get("settings") != identity:
        raise ValueError(f"{refusal}, of another model or other settings ({record_file(out)}). Use another name.")
    if record["source"] != _digest_source(source):
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


def _digest_source(source: Path) -> dict[str, Any]:
    """The bytes and the digest of the whole source, as its last group has them."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return {"bytes": file.tell(), "digest": digest.hexdigest()}


def _advance(bar: ProgressBar, begin: int, end: int, read: int, total: int | None) -> None:
    """Move a bar between bytes `begin` and `end`, in proportion to the tokens of the group that were read."""
    bar.update(begin + (end - begin) * read // (total or 1))


def _check_output(out: Path, parts: Path, output: str) -> None:
    """Raise ValueError if the vectors cannot be written to `out`."""
    if out.suffix not in FORMATS:
        raise ValueError(f"--out {out}: the name must end in {', '.join(FORMATS)}.")
    if out.suffix != ".parquet" and output not in ("document", "chunks"):
        raise ValueError(f"--out {out}: {out.suffix} takes vectors of documents or chunks; for {output} use .parquet.")
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
