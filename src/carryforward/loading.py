# SPDX-License-Identifier: Apache-2.0
"""Models by name: a Hub name, a folder, a GGUF file, or a run of `carryforward train`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from . import checkpoints
from .modeling import RecurrentPreTrainedModel

RUN_FILE = "run.json"  # what `carryforward train` writes in its folder


@dataclass
class Loaded:
    """A causal language model with its tokenizer.

    Attributes:
        run: the record of the training run it comes from, if it comes from one.
    """

    name: str
    model: PreTrainedModel
    tokenizer: Any
    run: dict[str, Any] | None = None

    @property
    def recurrent(self) -> bool:
        return isinstance(self.model, RecurrentPreTrainedModel)


def load_causal(name: str, dtype: torch.dtype = torch.float32) -> Loaded:
    """Load a causal language model, plain or recurrent, and its tokenizer."""
    path, here = Path(name), Path()
    options: dict[str, Any] = {}
    where = name
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"model {name!r}: there is no such file.")
        where, options = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir() and not (path / "config.json").exists():
        raise ValueError(_no_model(path))
    elif not path.exists() and (
        path.is_absolute() or name.count("/") > 1 or (path.parent != here and path.parent.is_dir())
    ):
        raise ValueError(f"model {name!r}: there is no such folder.")
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options)
    if options:
        _make_plain(model)
    return Loaded(name, model, tokenizer, _run_of(path))


def _make_plain(model: PreTrainedModel) -> None:
    """A model read from GGUF holds ordinary weights, but says it is quantised and then refuses to be saved."""
    for owner in (model.config, model):
        for attribute in ("quantization_config", "hf_quantizer", "quantization_method", "is_quantized"):
            if hasattr(owner, attribute):
                delattr(owner, attribute)


def _run_of(path: Path) -> dict[str, Any] | None:
    for folder in (path, path.parent):  # a run, or one of its checkpoints
        if (folder / RUN_FILE).is_file():
            return json.loads((folder / RUN_FILE).read_text())
    return None


def _no_model(path: Path) -> str:
    if not (path / RUN_FILE).exists():
        return f"model {str(path)!r}: this folder holds no model (config.json is missing)."
    found = [folder for folder in checkpoints.of_run(path) if checkpoints.is_complete(folder)]
    hint = f" Its newest checkpoint is {found[-1]}." if found else ""
    return f"model {str(path)!r}: this run is not finished. Run the same train command again to go on.{hint}"
