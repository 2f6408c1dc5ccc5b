# SPDX-License-Identifier: Apache-2.0
"""A module for sentence-transformers that embeds the tokens of whole documents; a `Pooling` module follows it.

    SentenceTransformer(modules=[RecurrentTransformer("my-model"), Pooling(384)])

Texts are never truncated. Needs the package sentence-transformers.
"""

from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.base.modules import InputModule
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..config import RecurrentModelConfig
from ..data.samples import pad
from ..data.tokenization import check_tokenizer
from ..models import auto
from ..models.add_recurrence import add_recurrence
from ..models.base import RecurrentPreTrainedModel
from ..models.headless import RecurrentModel, without_head
from ..models.model_files import load_tokenizer
from ..utils.peft import get_recurrent_model


class RecurrentTransformer(InputModule):
    """The counterpart of `Transformer` in sentence-transformers, without its length limit."""

    config_file_name = "recurrent_transformer.json"
    config_keys = ["use_state"]
    auto_model: RecurrentModel
    tokenizer: Any

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        tokenizer: Any = None,
        use_state: bool | None = None,
        *,
        model_kwargs: dict[str, Any] | None = None,
        processor_kwargs: dict[str, Any] | None = None,
        **fields: Any,
    ):
        """
        Args:
            model: a recurrent model, or the name of a recurrent model or of an encoder, to which recurrence is added.
                The head of a recurrent model is not used.
            tokenizer: the tokenizer of the model; not needed with a name, whose own tokenizer is loaded.
            use_state: False reads every window on its own. By default the state is used, unless recurrence is added
                here and is therefore untrained; give True to train it.
            model_kwargs, processor_kwargs: for `from_pretrained` of the model and of the tokenizer, if `model` is a
                name.
            **fields: arguments of `add_recurrence`, if recurrence is added; by default the memory is a vector.
        """
        super().__init__()
        untrained = False
        model = model if isinstance(model, str | Path) else get_recurrent_model(model)
        if isinstance(model, str | Path):
            config = AutoConfig.from_pretrained(model)
            tokenizer = load_tokenizer(str(model), config, **(processor_kwargs or {}))
            untrained = not isinstance(config, RecurrentModelConfig)
            # load with the saved head: without it, transformers would warn about unused weights
            load: Any = AutoModel if untrained else auto.classes()[config.architectures[0]]
            model = loaded = load.from_pretrained(model, **(model_kwargs or {}))
            if untrained:
                model, fields = add_recurrence(loaded, tokenizer=tokenizer, **{"memory": "vector", **fields}), {}
        elif model_kwargs or processor_kwargs:
            raise ValueError("model_kwargs and processor_kwargs need the name of a model. Leave them out.")
        if not isinstance(model, RecurrentPreTrainedModel) or tokenizer is None:
            raise ValueError("RecurrentTransformer needs a recurrent model and its tokenizer.")
        if fields:
            raise ValueError(
                f"{', '.join(fields)}: the model is recurrent already and has its own config. Leave it out."
            )
        self.auto_model = without_head(model)
        check_tokenizer(tokenizer, self.auto_model._vocabulary)
        self.tokenizer = self.auto_model.tokenizer = tokenizer
        self.use_state = not untrained if use_state is None else use_state

    @property
    def max_seq_length(self) -> None:
        """None: there is no limit."""
        return None

    @max_seq_length.setter
    def max_seq_length(self, value: int | None) -> None:
        if value is not None:
            raise ValueError(f"max_seq_length={value}: texts are not truncated. Leave it out, or shorten the texts.")

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        rows = self._ids(self._prepend_prompt(list(inputs), prompt) if prompt else list(inputs))
        features: dict[str, Any] = pad([torch.tensor(row or [0]) for row in rows])
        features["attention_mask"] *= torch.tensor([[bool(row)] for row in rows])  # all 0 for an empty text
        if prompt:  # count the tokens that do not change when a word follows: it may take up a space at the end
            pairs = zip(*self._ids([prompt, prompt + "a"]), strict=False)
            features["prompt_length"] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return features

    def _ids(self, texts: list[str]) -> list[list[int]]:
        # without special tokens: the model adds them to every window
        return self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        ids, mask = features["input_ids"], features["attention_mask"]
        not_empty = mask.any(dim=1, keepdim=True)
        first = torch.arange(mask.shape[1], device=mask.device) == 0  # the model needs at least one token in each row
        mask = torch.where(not_empty, mask, first)
        state = self.auto_model.fresh_state(len(ids))  # with it, special tokens at both ends are part of a text
        out = self.auto_model(input_ids=ids, attention_mask=mask, state=state, use_state=self.use_state)
        return {**features, "token_embeddings": out.last_hidden_state * not_empty[..., None]}

    def get_embedding_dimension(self) -> int:
        return self.auto_model.config.base_config.hidden_size

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        self.auto_model.save_pretrained(output_path)  # with the tokenizer
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, *args: Any, **kwargs: Any) -> "RecurrentTransformer":
        names = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
        hub_kwargs = {name: kwargs[name] for name in names if name in kwargs}
        folder = cls.load_dir_path(model_name_or_path, **hub_kwargs)
        if folder is None:
            raise ValueError(f"{model_name_or_path!r} is not a folder and cannot be loaded from the Hub.")
        settings = {name: kwargs[name] for name in ("model_kwargs", "processor_kwargs") if kwargs.get(name)}
        return cls(folder, **cls.load_config(model_name_or_path, **hub_kwargs), **settings)
