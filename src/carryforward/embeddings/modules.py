# SPDX-License-Identifier: Apache-2.0
"""What a folder of sentence-transformers says about its model's vectors: pooling, normalization, length, prompts.

Only its JSON files are read: `modules.json` and the config of each module. Nothing of sentence-transformers is needed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import cached_file

from ..backbones.architectures import architecture_of, is_supported
from ..config import RecurrentModelConfig
from ..models.loading import Loaded, load_recurrent
from ..models.model_files import find, load_config
from ..utils.parsing import read_json, read_json_object

POOLINGS = ("mean", "max", "cls")
_OLD_FLAGS = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
_REMEDY = "Copy the folder again."


@dataclass(frozen=True)
class EmbeddingModules:
    """How a model's token vectors become the vectors of texts. The defaults are those of a model that says nothing.

    Attributes:
        pooling: "mean", "max" or "cls".
        special_tokens: pool the special tokens too.
        normalize: give vectors unit length.
        max_seq_length: tokens of a window, with special tokens: the model was trained on no more.
        prompts, default_prompt: texts to put in front, by name, and the name of the one that is always used.
    """

    pooling: str = "mean"
    special_tokens: bool = False
    normalize: bool = False
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None

    def choose(
        self,
        pooling: str | None = None,
        special_tokens: bool | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> dict[str, Any]:
        """Arguments of `encode`: those that are given, and the model's own for those that are None. A prompt is the
        name of one of the model's, or a text."""
        if pooling is None:
            pooling = self.pooling
        if special_tokens is None:
            special_tokens = self.special_tokens and pooling in POOLINGS
        if prompt is None:
            prompt = "" if self.default_prompt is None else self.default_prompt
        return {
            "pooling": pooling, "special_tokens": special_tokens,
            "normalize": self.normalize if normalize is None else normalize,
            "prompt": self.prompts.get(prompt, prompt),
        }  # fmt: skip


def load_embedder(
    name: str, *, window: int | None = None, device: str | None = None
) -> tuple[Loaded, EmbeddingModules]:
    """Load a model by its name, as `load_recurrent` does, and what it says about vectors. The window of a plain one is
    no longer than the texts that it was trained on."""
    modules = read_modules(name)
    config = load_config(name)
    if window is None and not isinstance(config, RecurrentModelConfig):
        window = modules.max_seq_length
        if window is not None and is_supported(config):
            window = min(window, architecture_of(config).max_positions(config))
    return load_recurrent(name, window=window, device=device), modules


def read_modules(name: str) -> EmbeddingModules:
    """What a model's folder, or its repository on the Hub, says; the defaults if it is not one of
    sentence-transformers."""
    modules = _read(name, "modules.json")
    if modules is None:
        return EmbeddingModules()
    if not isinstance(modules, list):
        raise ValueError(f"model {name!r}: its modules.json is not a list of modules. {_REMEDY}")
    fields: dict[str, Any] = {"special_tokens": True}
    for module in modules:
        kind, path = str(module.get("type")).rpartition(".")[2], module.get("path") or ""
        if kind in ("Transformer", "RecurrentTransformer"):
            fields |= _of_transformer(name, kind, path)
        elif kind == "Pooling":
            fields["pooling"] = _pooling(name, _read(name, f"{path}/config.json") or {})
        elif kind == "Normalize":
            fields["normalize"] = True
        else:
            raise ValueError(
                f"model {name!r}: its modules.json has a module {kind!r}, which is not supported here. Use "
                "sentence-transformers, with carryforward's RecurrentTransformer in place of its Transformer."
            )
    settings = _read(name, "config_sentence_transformers.json") or {}
    fields |= {"prompts": settings.get("prompts") or {}, "default_prompt": settings.get("default_prompt_name")}
    _check_prompts(name, fields["prompts"], fields["default_prompt"])
    return EmbeddingModules(**fields)


def _of_transformer(name: str, kind: str, path: str) -> dict[str, Any]:
    """The fields that the first module decides."""
    if path:
        raise ValueError(f"model {name!r}: its transformer is in the folder {path!r}. Name that folder instead.")
    if kind == "RecurrentTransformer":  # pools a text's own tokens, as `encode` does
        return {"special_tokens": False}
    settings = _read(name, "sentence_bert_config.json") or {}
    if settings.get("do_lower_case"):
        raise ValueError(f"model {name!r}: do_lower_case is not supported here. Use sentence-transformers.")
    length = settings.get("max_seq_length")
    if length is None:  # newer folders leave it to the tokenizer
        length = (_read(name, "tokenizer_config.json") or {}).get("model_max_length")
    return {"max_seq_length": length if isinstance(length, int) and 2 < length < 1_000_000 else None}


def _pooling(name: str, settings: dict[str, Any]) -> str:
    """The one pooling of a `Pooling` module."""
    modes = settings.get("pooling_mode") or [mode for flag, mode in _OLD_FLAGS.items() if settings.get(flag)] or "mean"
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(
            f"model {name!r}: its pooling is {' and '.join(map(str, modes))}. Supported are {', '.join(POOLINGS)}, one "
            "at a time: use sentence-transformers, with carryforward's RecurrentTransformer."
        )
    if not settings.get("include_prompt", True):
        raise ValueError(
            f"model {name!r}: its pooling leaves out prompts (include_prompt), which is not supported here. Use "
            "sentence-transformers, with carryforward's RecurrentTransformer."
        )
    return modes[0]


def _check_prompts(name: str, prompts: Any, default: Any) -> None:
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ValueError(f"model {name!r}: the prompts of config_sentence_transformers.json are not texts. {_REMEDY}")
    if default is not None and default not in prompts:
        raise ValueError(f"model {name!r}: its default prompt {default!r} is none of its prompts. {_REMEDY}")


def _read(name: str, file: str) -> Any:
    """The content of a JSON file of a model; None if it has no such file."""
    where, more = find(name)
    path = cached_file(
        where, file, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False,
        local_files_only=more.get("local_files_only", False),
    )  # fmt: skip
    if path is None:
        return None
    return read_json(Path(path), _REMEDY) if file == "modules.json" else read_json_object(Path(path), _REMEDY)
