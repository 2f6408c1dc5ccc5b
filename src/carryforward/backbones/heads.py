# SPDX-License-Identifier: Apache-2.0
"""The head of a base model, applied to given hidden states.

A head may do anything: pool, project, drop out, normalise. So it is not taken apart: the model's own forward pass runs
with something in its backbone's place that returns the hidden states. This holds for every family alike.
"""

from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

_FIRST_TOKEN = ("cls", "bos")  # what configs call the first token of a window


def classify(model: PreTrainedModel, first: Tensor) -> Tensor:
    """The logits [B, classes] of a sequence classifier, from vectors [B, k] in place of its first token's."""
    return _apply_head(model, first[:, None]).logits


def answer_scores(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The scores [B, T] of a question-answering model for starts and ends of answers, from hidden states [B, T, k]."""
    output = _apply_head(model, hidden)
    return output.start_logits, output.end_logits


def check_first_token(config: PreTrainedConfig) -> None:
    """Refuse a sequence classifier that does not read the first token: it is what joins windows."""
    pooling = getattr(config, "classifier_pooling", None)
    if pooling not in (None, *_FIRST_TOKEN):
        raise ValueError(
            f"Recurrence cannot be added to a sequence classifier with classifier_pooling={pooling!r}: windows are "
            f"joined by their first token. Set it to {' or '.join(map(repr, _FIRST_TOKEN))}, whichever "
            f"{config.model_type} has, and train the head."
        )


def _apply_head(model: PreTrainedModel, hidden: Tensor) -> Any:
    return type(model).forward(_Headed(model, hidden), input_ids=None, return_dict=True)  # type: ignore[arg-type]


class _Headed:
    """A model whose backbone returns given hidden states; everything else is the model's own."""

    def __init__(self, model: PreTrainedModel, hidden: Tensor):
        self._model = model
        self._backbone = model.base_model
        self._hidden = hidden

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._model, name)
        return self._run_backbone if value is self._backbone else value

    def _run_backbone(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        pooler = getattr(self._backbone, "pooler", None)
        pooled = None if pooler is None else pooler(self._hidden)
        activation = getattr(self._backbone, "pooler_activation", None)
        if pooled is not None and activation is not None:  # ALBERT's pooler is only the linear layer
            pooled = activation(pooled[:, 0])
        return BaseModelOutputWithPooling(last_hidden_state=self._hidden, pooler_output=pooled)  # type: ignore[arg-type]
