# SPDX-License-Identifier: Apache-2.0
"""The recurrent model without a head."""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple

from ..state import State
from ..utils.peft import get_recurrent_model
from . import argument_checks
from .base import RecurrentPreTrainedModel
from .outputs import RecurrentOutput, input_layout
from .token_model import TokenOutputModel


class RecurrentModel(TokenOutputModel):
    """A model without a head: the hidden states of whole documents."""

    auto_class = "AutoModel"

    def _token_outputs(self, inputs: dict[str, Any], start: int, width: int) -> tuple[Tensor, Any]:
        outputs = self.base(**inputs)
        return outputs.last_hidden_state[:, start:], outputs

    @property
    def _output_size(self) -> int:
        return self.config.base_config.hidden_size

    @torch.compiler.disable  # planning is Python; `compile` compiles what a window runs
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        state: State | None = None,
        *,
        token_type_ids: Tensor | None = None,
        overlap: int | None = None,
        use_state: bool = True,
        final: bool = True,
        allow_other_model: bool = False,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> RecurrentOutput:
        """Read documents, or the next piece of them. Arguments as in `encoders.EncoderHead.forward`."""
        argument_checks.refuse_unsupported({**others, "token_type_ids": token_type_ids})
        plan = self._plan(
            input_ids, attention_mask, None, state, overlap=overlap, use_state=use_state, outputs=True, final=final,
            allow_other_model=allow_other_model,
        )  # fmt: skip
        hidden, fields = self._read_documents(
            plan, *input_layout(plan, state), hidden_states=self._asks_for_hidden_states(output_hidden_states)
        )
        return RecurrentOutput(last_hidden_state=hidden, **fields)


def without_head(model: PreTrainedModel) -> RecurrentModel:
    """The same model without its head; the weights are shared."""
    model = get_recurrent_model(model)
    if isinstance(model, RecurrentModel):
        return model
    if not isinstance(model, RecurrentPreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: make it recurrent with add_recurrence first.")
    reader, path = _WITHOUT_HEAD.get(model, (None, None))
    if reader is None or reader.base is not model.backbone or path != model.fast_path:
        with torch.device("meta"):  # its own recurrence is replaced below: do not draw random numbers for it
            reader = RecurrentModel(model.config, base=model.backbone)
        reader.fast_path = model.fast_path
        _WITHOUT_HEAD[model] = reader, model.fast_path
    reader.memory = model.memory
    return reader


# By the model with a head. Cached because a RecurrentModel holds captured CUDA graphs, which later calls reuse.
_WITHOUT_HEAD: WeakKeyDictionary[PreTrainedModel, tuple[RecurrentModel, str]] = WeakKeyDictionary()
