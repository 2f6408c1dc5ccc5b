# SPDX-License-Identifier: Apache-2.0
"""The recurrent models, one class per head, all ordinary `PreTrainedModel`s.

Each says what a window gives out and how that becomes the call's output: logits or hidden states for every token, a
loss computed inside the window, or one vector per window for a classifier of whole documents.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from ..state import State
from . import argument_checks
from .outputs import RecurrentOutput, columns_of
from .token_outputs import TokenOutputModel


class RecurrentModel(TokenOutputModel):
    """A model without a head: the hidden states of whole documents."""

    auto_class = "AutoModel"

    def _outputs(self, inputs: dict[str, Any], start: int, width: int) -> Tensor:
        return self.base(**inputs).last_hidden_state[:, start:]

    @property
    def _num_outputs(self) -> int:
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
        **others: Any,
    ) -> RecurrentOutput:
        """Read documents, or the next piece of them.

        Args:
            input_ids: the documents' own tokens, [B, N]; an encoder's special tokens are added to every window.
            attention_mask: 0 where a row is padded, left or right.
            state: an earlier call's `state`, to go on from there.
            token_type_ids: accepted for convenience; must be all zero.
            overlap: read at another overlap than the model was made for.
            use_state: False removes the state: every window stands alone, as with the base model.
            final: the documents end here. Give False for every piece but the last when an encoder reads in pieces:
                it gives out a window once it is complete, so outputs then start where `emitted` says.
            **others: what Hugging Face's models may be given beside, and must not ask for anything here.
        """
        argument_checks.token_types(token_type_ids)
        argument_checks.neutral(others)
        reading = self._plan(
            input_ids, attention_mask, None, state, overlap=overlap, use_state=use_state, outputs=True, final=final
        )
        hidden, fields = self._run(reading, *columns_of(reading, state))
        return RecurrentOutput(last_hidden_state=hidden, **fields)
