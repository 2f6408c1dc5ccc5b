# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: loading that refuses missing weights, and the complete checkpoints of a training run."""

import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from .files import finish_deletions

logger = logging.getLogger(__name__)


def load_strictly(load: Callable, cls: type, name: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `load` (a `from_pretrained`); raise a ValueError if weights are truncated, missing or do not fit."""
    return_info = kwargs.pop("output_loading_info", False)
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
        problems = "; ".join(
            f"{kind}: {', '.join(keys[:3])}{' ...' * (len(keys) > 3)}" for kind, keys in wrong.items() if keys
        )
        saved_as = getattr(model.config, "architectures", None)
        raise ValueError(
            f"{name}: the weights do not fit {cls.__name__} ({problems}). It was saved from {saved_as}; load it with "
            "the Auto class for that head, or save it again if a file was lost."
        )
    return (model, info) if return_info else model


def fingerprint(model: nn.Module) -> str:
    """Return a digest of a model's weights, computed from at most some 256 values of each tensor."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().flatten()[:: max(1, tensor.numel() // 256)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()


# --- checkpoints of a training run ---------------------------------------------------------------------------------

_SEAL = "complete.json"


def seal(folder: Path) -> None:
    """Record the size of every file, so that `is_complete` can tell whether the checkpoint is complete."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / _SEAL).write_text(json.dumps(sizes, indent=1))


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was sealed and all its files still have the recorded sizes."""
    try:
        sizes = json.loads((folder / _SEAL).read_text())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):  # whatever is in the file
        return False


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, complete or not, oldest first."""
    numbered = [(int(match[1]), path) for path in run.glob("checkpoint-*")
                if (match := re.search(r"-(\d+)$", path.name))]  # fmt: skip
    return [path for _, path in sorted(numbered)]


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest complete checkpoint of a run; warn about incomplete ones, which are skipped."""
    finish_deletions(run, "checkpoint-*")
    for path in reversed(list_checkpoints(run)):
        if is_complete(path):
            return path
        logger.warning("%s is incomplete and is skipped.", path)
    return None
