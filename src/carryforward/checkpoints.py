# SPDX-License-Identifier: Apache-2.0
"""Saving without half-written files, and loading without silently missing weights."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


@contextmanager
def written_beside(directory: str | os.PathLike) -> Iterator[Path]:
    """A folder to write to, which then takes the place of `directory`, or of its files where it exists already.

    A new folder appears whole or not at all. In an existing one each file is replaced whole, config last.
    """
    target = Path(directory)
    if target.is_file():
        raise ValueError(f"save_directory={str(target)!r} is a file; give a folder.")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
        if not target.exists():
            beside.rename(target)
            return
        written = {path.name for path in beside.iterdir()}
        for name in sorted(written, key=lambda name: (name == "config.json", name)):
            os.replace(beside / name, target / name)
        for stale in target.glob("model*.safetensors*"):  # of an earlier save in more or fewer pieces
            if stale.name not in written:
                stale.unlink()
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def load_strictly(load: Callable, cls: type, name: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `load` (a `from_pretrained`) and refuse a checkpoint whose weights are cut short, missing or misfit."""
    wants_info = kwargs.pop("output_loading_info", False)
    try:
        model, info = load(name, *args, output_loading_info=True, **kwargs)
    except SafetensorError as error:
        raise ValueError(
            f"{name}: a weights file is cut short or damaged ({error}). Copy or save the checkpoint again."
        ) from error
    except RuntimeError as error:
        if "size mismatch" not in str(error).lower() and "mismatch" not in str(error).lower():
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
