# SPDX-License-Identifier: Apache-2.0
"""A base model by its name, with its head and its tokenizer: for `add_recurrence("gpt2")`."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ...config import RecurrentModelConfig
from ..model_files import load_config, load_model, load_tokenizer

# transformers' classes, by the names of their pipelines
HEADS: dict[str, Any] = {
    "text-generation": transformers.AutoModelForCausalLM,
    "fill-mask": transformers.AutoModelForMaskedLM,
    "token-classification": transformers.AutoModelForTokenClassification,
    "text-classification": transformers.AutoModelForSequenceClassification,
    "question-answering": transformers.AutoModelForQuestionAnswering,
    "feature-extraction": transformers.AutoModel,
}


def load_base(
    name: str, *, head: str | None, tokenizer: Any, dtype: torch.dtype | str | None, revision: str | None
) -> tuple[PreTrainedModel, Any]:
    """A plain model and its tokenizer.

    Args:
        name: a Hub name or a folder; "bundled" is the model that comes with the package.
        head: one of `HEADS`; by default the one that the model was saved with.
        tokenizer: used instead of the model's own.
        dtype, revision: for `from_pretrained`.
    """
    if Path(name).suffix == ".gguf":
        raise ValueError(f"model={name!r}: load it yourself, AutoModelForCausalLM.from_pretrained(..., gguf_file=...).")
    if head is not None and head not in HEADS:
        raise ValueError(f"head={head!r}: there are {', '.join(map(repr, HEADS))}.")
    known = getattr(torch, str(dtype).removeprefix("torch."), None)
    if dtype not in (None, "auto") and not isinstance(known, torch.dtype):
        raise ValueError(f"dtype={dtype!r}: give a floating-point type of torch, such as torch.bfloat16.")
    if revision is not None and Path(name).is_dir():
        raise ValueError(f"revision={revision!r}: {name} is a folder, which has no other versions. Leave it out.")
    version = {} if revision is None else {"revision": revision}
    config = load_config(name, **version)
    if isinstance(config, RecurrentModelConfig):
        raise ValueError(f"{name} is recurrent already: load it with from_pretrained.")
    loader = _saved_class(config) if head is None else HEADS[head]
    precision = {} if dtype is None else {"dtype": dtype}
    model = load_model(loader.from_pretrained, name, **version, **precision)
    return model, load_tokenizer(name, config, **version) if tokenizer is None else tokenizer


def _saved_class(config: PreTrainedConfig) -> Any:
    """The class that a model was saved from; without its head if that is not known."""
    classes = (getattr(transformers, str(name), None) for name in config.architectures or [])
    known = (cls for cls in classes if isinstance(cls, type) and issubclass(cls, PreTrainedModel))
    return next(known, transformers.AutoModel)
