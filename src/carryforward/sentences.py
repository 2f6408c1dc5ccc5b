# SPDX-License-Identifier: Apache-2.0
"""A module for sentence-transformers: whole documents in, token embeddings out, for its `Pooling` to follow.

    SentenceTransformer(modules=[RecurrentTransformer("my-model"), Pooling(384)])

Needs `pip install carryforward[sentences]`. No text is ever cut.
"""

import json
from pathlib import Path
from typing import Any, cast

import torch
from sentence_transformers.base.modules import InputModule
from transformers import AutoModel, AutoTokenizer

from .adding import add_recurrence
from .data.samples import pad
from .heads import RecurrentModel


class RecurrentTransformer(InputModule):
    """What `Transformer` is in sentence-transformers, without its length limit."""

    config_file_name = "recurrent_transformer.json"
    config_keys = ["use_state"]
    max_seq_length = None
    auto_model: RecurrentModel
    tokenizer: Any

    def __init__(
        self, model: str | Path | RecurrentModel, tokenizer: Any = None, use_state: bool | None = None, **fields: Any
    ):
        """
        Args:
            model: a recurrent model without a head, or the name of one, or of an encoder to which recurrence is added.
            tokenizer: the model's, where a model is given.
            use_state: False reads windows that stand alone. By default the state is used unless recurrence is added
                here, and so untrained; to train it, say True.
            **fields: fields of `RecurrenceConfig`, where recurrence is added.
        """
        super().__init__()
        untrained = False
        if isinstance(model, str | Path):
            tokenizer = AutoTokenizer.from_pretrained(model)
            loaded = AutoModel.from_pretrained(model)
            untrained = not isinstance(loaded, RecurrentModel)
            model = cast(RecurrentModel, add_recurrence(loaded, tokenizer=tokenizer, **fields) if untrained else loaded)
        if not isinstance(model, RecurrentModel) or tokenizer is None:
            raise ValueError("RecurrentTransformer needs a recurrent model without a head, and its tokenizer.")
        self.auto_model = model
        self.tokenizer = tokenizer
        self.use_state = not untrained if use_state is None else use_state

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        texts = self._prepend_prompt(list(inputs), prompt) if prompt else list(inputs)
        # special tokens are put around every window by the model itself
        rows = self.tokenizer(texts, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        if not all(rows):
            raise ValueError("a text has no tokens: leave empty texts out.")
        return pad([torch.tensor(row) for row in rows])

    def forward(self, features: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, Any]:
        ids, mask = features["input_ids"], features["attention_mask"]
        out = self.auto_model(input_ids=ids, attention_mask=mask, use_state=self.use_state)
        return {**features, "token_embeddings": out.last_hidden_state}

    def get_embedding_dimension(self) -> int:
        return self.auto_model.config.base_config.hidden_size

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        self.auto_model.save_pretrained(output_path)
        self.tokenizer.save_pretrained(output_path)
        self.save_config(output_path)

    @classmethod
    def load(cls, model_name_or_path: str, *args: Any, subfolder: str = "", **kwargs: Any) -> "RecurrentTransformer":
        folder = Path(model_name_or_path, subfolder)
        return cls(folder, **json.loads((folder / cls.config_file_name).read_text()))
