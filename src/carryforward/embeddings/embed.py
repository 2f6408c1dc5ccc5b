# SPDX-License-Identifier: Apache-2.0
"""`carryforward embed`: from a file of JSON lines or Parquet to a file of vectors, for corpora larger than memory.

The input is read in groups of documents. The vectors of a group are written as a part, in a folder beside the output,
and the parts are merged at the end. When the same command is run again after an interruption, groups whose part is
intact are not embedded again. A JSON file beside the output records how it was made.

Several processes divide the groups. Each reads the whole input, and a group goes to the process with the fewest
characters so far. So parts, and the output, do not depend on the number of processes, which may change at a restart.
The first process holds the lock on the output, and merges the parts when all are done.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..distributed.processes import ALONE, Processes
from ..models.loading import Loaded
from ..models.model_files import version_of
from ..settings.commands import EmbedSettings
from ..utils import console
from ..utils.digests import damaged_file, digest_files
from ..utils.files import clear_leftovers, delete_folder, read_sealed_json, write_sealed_json
from ..utils.install import import_pyarrow
from ..utils.locks import LOCK, lock_output
from ..utils.parsing import read_json_object
from ..utils.provenance import provenance
from .document_groups import CHARACTERS_PER_GROUP, DocumentGroup, digest_source, read_groups, source_size
from .encode import check_choices, encode
from .modules import load_embedder, read_modules
from .vector_files import FORMATS, Part, Parts, ids_file, is_parts_folder, merge_parts

_SPEED = ("batch_size", "on_error")  # settings that the vectors do not depend on


def embed(
    name: str,
    source: Path,
    out: Path,
    settings: EmbedSettings,
    *,
    device: str | None = None,
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Embed every document of a file of JSON lines or Parquet.

    Args:
        name: a recurrent model, or a plain encoder, whose windows are read independently, without a state. What a
            folder of sentence-transformers says is the default of pooling, normalization, prompt and window.
        source: a .parquet file, one document per row, or a JSON lines file, one per line.
        out: a .parquet file takes every kind of vectors; .npy and .safetensors take vectors of documents and chunks,
            with the ids in a .ids.json file beside them.
        processes: of the command; all must see the same files.

    Returns:
        The number of documents, the numbers of skipped lines, and the output path.
    """
    output: Any = settings.what
    parts = out.with_name(out.name + ".parts")
    if not source.is_file():
        raise ValueError(
            f"{source} does not exist: give a JSON lines or Parquet file with a {settings.text_field!r} field."
        )
    how = read_modules(name).choose(settings.pooling, settings.special_tokens, settings.normalize, settings.prompt)
    check_choices(output, how["pooling"], how["special_tokens"])
    processes.first(lambda: _check_output(out, parts, output))
    used = {field: value for field, value in dataclasses.asdict(settings).items() if field not in _SPEED}
    identity = {"model": name, "version": version_of(name), **used, **how}
    if processes.first(out.exists):
        return processes.first(lambda: _finished(source, out, settings, parts, identity))
    loaded, _ = load_embedder(name, window=settings.window, device=processes.device(device))
    kwargs: dict[str, Any] = {"output": output, "use_state": settings.state and not loaded.untrained}
    kwargs |= {**how, "overlap": settings.overlap, "batch_size": settings.batch_size}
    encode(loaded.model, [], loaded.tokenizer, **_with_chunks(kwargs, settings, DocumentGroup()))  # checks arguments
    with _locked(parts, out, processes):
        if processes.first(out.exists):  # another command has just written it
            return processes.first(lambda: _finished(source, out, settings, parts, identity))
        own = Parts(parts, identity)
        processes.first(own.prepare)
        merged, record = _embed_chunks(loaded, source, settings, own, kwargs, processes)
        processes.wait()
        return processes.first(lambda: _merge(out, parts, merged, record))


@contextmanager
def _locked(parts: Path, out: Path, processes: Processes) -> Iterator[None]:
    """Hold the lock on the output, in the first process. One alone leaves no folder of parts without a part."""
    if not processes.is_first:
        yield
        return
    parts.mkdir(exist_ok=True)
    with lock_output(parts / LOCK, out):
        try:
            yield
        finally:
            if processes.count == 1 and parts.is_dir() and not any(parts.glob("part-*")):
                delete_folder(parts)


def _embed_chunks(
    loaded: Loaded, source: Path, settings: EmbedSettings, parts: Parts, kwargs: dict[str, Any], processes: Processes
) -> tuple[list[Part], dict[str, Any]]:
    """Embed this process's share of what is not embedded yet. Returns all parts, and the record of the output."""
    merged, skipped = list[Part](), list[int]()
    read: dict[str, Any] = {"bytes": 0, "digest": ""}
    characters = [0] * processes.count  # of the groups of each process
    size = source_size(source, settings)
    with processes.progress_bar(f"embedding {source.name}", size, "bytes") as advance:
        for number, group in enumerate(read_groups(source, settings, CHARACTERS_PER_GROUP[settings.what])):
            skipped += group.skipped
            length, read = group.bytes - read["bytes"], {"bytes": group.bytes, "digest": group.digest}
            if not group.ids:
                continue  # the last lines of the source, skipped or blank
            merged.append((parts.path(number), group.ids))
            owner = characters.index(min(characters))
            characters[owner] += sum(map(len, group.texts))
            if owner != processes.rank:
                continue
            progress = _Steps(length, advance)
            if not parts.has(number, group):
                arguments = _with_chunks(kwargs, settings, group)
                vectors = encode(loaded.model, group.texts, loaded.tokenizer, progress=progress.update, **arguments)
                parts.write(number, group, vectors)
            progress.finish()
    record = {"kind": "embedding", **provenance(str(loaded.model.device)), "processes": processes.count}
    record |= {"settings": parts.identity, "source": read}
    return merged, {**record, "documents": sum(len(ids) for _, ids in merged), "skipped": skipped}


def _merge(out: Path, folder: Path, parts: list[Part], record: dict[str, Any]) -> dict[str, Any]:
    """Merge the parts to the output, and record how it was made."""
    if missing := next((path for path, _ in parts if not path.exists()), None):
        raise ValueError(
            f"{missing} is missing: another process has written it elsewhere. All machines must see the same files."
        )
    result = {"documents": record["documents"], "skipped": record["skipped"], "out": str(out)}
    if parts:
        with merge_parts(parts, out) as written:
            files = digest_files(written[0].parent, written)
            write_sealed_json(record_file(out), {**record, **result, "files": files})
    delete_folder(folder)
    if not parts:
        raise ValueError(f"nothing to embed: {out.name} would be empty.")
    return result


def _with_chunks(kwargs: dict[str, Any], settings: EmbedSettings, group: DocumentGroup) -> dict[str, Any]:
    """Arguments of `encode` for a group of documents: of chunks, their size or their spans."""
    return {**kwargs, "chunks": settings.chunk_size if settings.chunks_field is None else group.spans}


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


class _Steps:
    """Advances a bar by the bytes of a group, in proportion to its tokens that were read."""

    def __init__(self, size: int, advance: Callable[[int], object]):
        self.size, self.done, self._advance = size, 0, advance

    def update(self, read: int, total: int | None) -> None:
        self._to(self.size * read // (total or 1))

    def finish(self) -> None:
        self._to(self.size)

    def _to(self, done: int) -> None:
        self._advance(done - self.done)
        self.done = done


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
