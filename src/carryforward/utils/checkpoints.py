# SPDX-License-Identifier: Apache-2.0
"""Saving without half-written files, and loading without silently missing weights."""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

logger = logging.getLogger(__name__)

# the names under which transformers writes weights, whole or in pieces, for each variant
_WEIGHTS = re.compile(r"model(?P<piece>-\d{5}-of-\d{5})?\.safetensors(\.index(\.(?P<index>\w+))?\.json)?|"
                      r"model\.(?P<variant>\w+)(-\d{5}-of-\d{5})?\.safetensors")  # fmt: skip


@contextmanager
def atomic_folder(directory: str | os.PathLike) -> Iterator[Path]:
    """A folder to write to, which then takes the place of `directory`, or of its files where it exists already.

    A new folder appears whole or not at all. In an existing one each file is replaced whole, weights first, then
    weights of an earlier save in more or fewer pieces are removed, and config.json comes last.
    """
    target = Path(directory).resolve()
    if target.is_file():
        raise ValueError(f"save_directory={str(directory)!r} is a file; give a folder.")
    name = f".{target.name}.{os.getpid()}.tmp"
    beside = target / name if target.exists() else target.with_name(name)  # in both cases on the same file system
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        if not target.exists():
            beside.rename(target)
            return
        written = {path.name for path in beside.iterdir()}
        for file in sorted(written - {"config.json"}):
            os.replace(beside / file, target / file)
        kinds = {_weights_of(file) for file in written} - {None}
        for path in target.iterdir():
            if path.name not in written and _weights_of(path.name) in kinds:
                path.unlink()
        if "config.json" in written:
            os.replace(beside / "config.json", target / "config.json")
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _weights_of(file: str) -> str | None:
    """The variant whose weights a file holds ("" for none in particular), or None if it holds no weights."""
    match = _WEIGHTS.fullmatch(file)
    return match and (match["variant"] or match["index"] or "")


def load_strictly(load: Callable, cls: type, name: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `load` (a `from_pretrained`) and refuse a checkpoint whose weights are cut short, missing or misfit."""
    wants_info = kwargs.pop("output_loading_info", False)
    try:
        model, info = load(name, *args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(
            f"{name}: a weights file is cut short or damaged ({error}). Copy or save the checkpoint again."
        ) from error
    except (FileNotFoundError, json.JSONDecodeError) as error:
        raise ValueError(f"{name}: a file of the checkpoint is missing or damaged: {error}") from error
    except RuntimeError as error:
        if "mismatch" not in str(error).lower():
            raise
        raise ValueError(f"{name}: weights do not fit the config: {error}") from error
    wrong = {kind: sorted(map(str, info.get(f"{kind}_keys") or ())) for kind in ("missing", "unexpected", "mismatched")}
    if any(wrong.values()):
        found = "; ".join(
            f"{kind}: {', '.join(keys[:3])}{' ...' * (len(keys) > 3)}" for kind, keys in wrong.items() if keys
        )
        saved_as = getattr(model.config, "architectures", None)
        raise ValueError(
            f"{name}: the weights do not fit {cls.__name__} ({found}). It was saved from {saved_as}; load it with the "
            "Auto class for that head, or save it again if a file was lost."
        )
    return (model, info) if wants_info else model


# --- checkpoints of a training run ---------------------------------------------------------------------------------

_SEAL = "complete.json"


def seal(folder: Path) -> None:
    """Note every file's size, so that `is_complete` can tell a checkpoint that was cut short."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / _SEAL).write_text(json.dumps(sizes, indent=1))


def is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _SEAL).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, json.JSONDecodeError):
        return False


def of_run(run: Path) -> list[Path]:
    """The checkpoints of a run, complete or not, oldest first."""
    found = [(int(match[1]), path) for path in run.glob("checkpoint-*") if (match := re.search(r"-(\d+)$", path.name))]
    return [path for _, path in sorted(found)]


def latest(run: Path) -> Path | None:
    """The newest complete checkpoint of a run; what is incomplete is passed over with a warning."""
    for leftover in run.glob(".checkpoint-*.discarded"):
        shutil.rmtree(leftover, ignore_errors=True)
    for path in reversed(of_run(run)):
        if is_complete(path):
            return path
        logger.warning("%s is incomplete and is passed over.", path)
    return None


def discard(folder: Path) -> None:
    """Delete a checkpoint; it is out of sight before the first file goes."""
    hidden = folder.with_name(f".{folder.name}.discarded")
    shutil.rmtree(hidden, ignore_errors=True)  # of a deletion that was cut short
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def fingerprint(model: nn.Module) -> str:
    """A name for a model's weights: the same for the same, and for no other in practice. Reads a few of each."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        some = tensor.detach().flatten()[:: max(1, tensor.numel() // 256)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + some.numpy().tobytes())
    return digest.hexdigest()
