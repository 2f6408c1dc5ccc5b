# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and runs: loading that refuses missing weights, and the complete checkpoints of a training run."""

import contextlib
import hashlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..settings.recurrence import BUNDLED
from .digests import damaged_file, digest_files
from .files import read_sealed_json

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


# --- fingerprints of weights ---------------------------------------------------------------------------------------


def fingerprint(*modules: nn.Module) -> str:
    """Return a digest of modules' weights, computed from some 256 to 512 values of each tensor.

    Values are rounded to bfloat16: a model has the same fingerprint in float32 and in bfloat16. (In float16 it has
    another one: values are then rounded twice.) It is empty if there are no weights here: on the meta device, sharded.
    """
    named = [(f"{i}.{name}", x) for i, module in enumerate(modules) for name, x in sorted(_tensors(module).items())]
    tensors = [(name, part) for name, tensor in named for part in tensor_parts(tensor)]
    if not tensors or not all(_is_here(tensor) for _, tensor in tensors):
        return ""
    samples = [x.detach().flatten()[:: max(1, x.numel() // 256)].to(torch.bfloat16) for _, x in tensors]
    if len({sample.device for sample in samples}) > 1:
        samples = [sample.cpu() for sample in samples]
    digest = hashlib.blake2b("".join(f"{name} {tuple(x.shape)} " for name, x in tensors).encode(), digest_size=8)
    digest.update(torch.cat(samples).cpu().view(torch.int16).numpy().tobytes())  # one transfer from the device
    return digest.hexdigest()


class CachedFingerprint:
    """`fingerprint`, computed again only if a weight was replaced, moved or changed in place.

    Updates of `weight.data` leave no trace on a weight: call `forget` where they may have happened.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._weights: list[ref[Tensor]] = []
        self._versions: list[tuple[int, int]] = []
        self._value = ""

    def __call__(self, *modules: nn.Module) -> str:
        # parts: torch cannot move a quantised weight to which a weak reference exists
        weights = [part for module in modules for weight in module.parameters() for part in tensor_parts(weight)]
        if not all(_is_here(weight) for weight in weights):
            return ""
        versions = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        known = versions == self._versions and all(a() is b for a, b in zip(self._weights, weights, strict=True))
        if not known:
            self._value = fingerprint(*modules)
            self._weights, self._versions = [ref(weight) for weight in weights], versions
        return self._value

    def __reduce__(self) -> tuple[type, tuple]:
        return CachedFingerprint, ()  # a copy has other weights; references to weights cannot be pickled


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict(keep_vars=True)  # quantised weights cannot be detached in inference mode
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def tensor_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that a quantised weight consists of, such as integers and scales; an ordinary tensor itself. A
    weight that is sharded over processes is returned as it is."""
    if not hasattr(tensor, "__tensor_flatten__") or is_shard(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in tensor_parts(getattr(tensor, name))]


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, of which this process has a part."""
    return hasattr(tensor, "full_tensor")


def _is_here(tensor: Tensor) -> bool:
    """Whether a tensor has its values on this process: it is not on the meta device, and not a DTensor's shard."""
    return not tensor.is_meta and not is_shard(tensor)


# --- checkpoints of a training run ---------------------------------------------------------------------------------

_SEAL = "complete.json"


def seal(folder: Path) -> None:
    """Record the size and digest of every file, so that damage to the checkpoint can be found."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    (folder / _SEAL).write_text(json.dumps({"sizes": sizes, "digests": digest_files(folder, files)}, indent=1))


def is_sealed(folder: Path) -> bool:
    """Whether a folder is a checkpoint of a training run, complete or not."""
    return (folder / _SEAL).exists()


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint was sealed and all its files have the recorded sizes. Reads no weights."""
    sizes = _read_seal(folder, "sizes")
    with contextlib.suppress(OSError):
        return sizes is not None and all((folder / name).stat().st_size == size for name, size in sizes.items())
    return False


def find_damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, in words, or None: it reads every file and compares its digest."""
    digests = _read_seal(folder, "digests")
    if digests is None or not is_complete(folder):
        return "incomplete"
    file = damaged_file(folder, digests)
    return None if file is None else f"damaged ({file})"


def _read_seal(folder: Path, key: str) -> dict[str, Any] | None:
    """What the seal records of each file; None if it cannot be read."""
    with contextlib.suppress(FileNotFoundError, ValueError, RecursionError):  # other errors do not prove damage
        seal = json.loads((folder / _SEAL).read_bytes())
        if isinstance(seal, dict) and isinstance(seal.get(key), dict) and seal[key]:
            return seal[key]
    return None


def list_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, complete or not, oldest first."""
    numbered = [(int(match[1]), path) for path in run.glob("checkpoint-*")
                if (match := re.fullmatch(r"checkpoint-(\d+)", path.name)) and path.is_dir()]  # fmt: skip
    return [path for _, path in sorted(numbered)]


def latest_checkpoint(run: Path) -> Path | None:
    """Return the newest intact checkpoint of a run; warn about incomplete and damaged ones after it."""
    for path in reversed(list_checkpoints(run)):
        damage = find_damage(path)
        if damage is None:
            return path
        logger.warning("%s is %s and is made again, from the one before.", path, damage)
    return None


# --- the record of a training run ----------------------------------------------------------------------------------

RUN_FILE = "run.json"  # in the run's folder


def run_of(name: str) -> dict[str, Any] | None:
    """The record of the training run that a model's folder, or the checkpoint's parent folder, belongs to."""
    if name == BUNDLED:
        return None
    path = Path(name).absolute()
    is_checkpoint = path.is_dir() and path in list_checkpoints(path.parent)
    for file in (path / RUN_FILE, path.parent / RUN_FILE)[: 1 + is_checkpoint]:
        if file.is_file() and (record := read_sealed_json(file, _WITHOUT_RECORD)).get("kind") == "run":
            return _checked_run(record, file, _WITHOUT_RECORD)
    return None


_WITHOUT_RECORD = "Take it away to use the model without its record."


def read_run(path: Path, remedy: str = _WITHOUT_RECORD) -> dict[str, Any]:
    """The record of a training run. A file that is damaged is refused, with what to do in `remedy`."""
    return _checked_run(read_sealed_json(path, remedy), path, remedy)


def _checked_run(record: dict[str, Any], path: Path, remedy: str) -> dict[str, Any]:
    settings, circumstances = record.get("settings"), record.get("circumstances", {})
    if record.get("kind") != "run" or not isinstance(settings, dict) or not isinstance(circumstances, dict):
        raise ValueError(f"{path} is not the record of a training run, or damaged. {remedy}")
    values = [(record, "tokens", int), (record, "block_windows", int), (record, "files", dict),
              (settings, "window", int), (settings, "model", str), (settings, "recurrence", bool),
              (circumstances, "window", int)]  # fmt: skip
    wrong = [name for owner, name, kind in values if owner.get(name) is not None and type(owner[name]) is not kind]
    if wrong:
        raise ValueError(f"{path} is damaged: {', '.join(wrong)} cannot be right. {remedy}")
    return record
