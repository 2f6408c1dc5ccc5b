# SPDX-License-Identifier: Apache-2.0
"""The recurrent model without a head."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from ..state import State
from . import argument_checks
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
