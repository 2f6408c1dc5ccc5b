# SPDX-License-Identifier: Apache-2.0
"""The models that read documents for embeddings: without a head, and plain encoders made recurrent.

Token vectors may contain a share of their window's special tokens (`WithSpecialTokens`), because the models of
sentence-transformers pool special tokens too. A window's special tokens are shared out evenly among its tokens. So the
vectors of a text that fits one window are exactly those of sentence-transformers, a long document weighs the special
tokens of every window, and the parts of a document add up to the whole.
"""

from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.base import RecurrentPreTrainedModel
from ..models.headless import RecurrentModel, without_head
from ..models.loading import read_in_windows
from ..utils.peft import get_recurrent_model

Share = Literal["mean", "max", "cls"]


class WithSpecialTokens(RecurrentModel):
    """Reads like `RecurrentModel`; the vector of a token contains its share of the window's special tokens.

    Attributes:
        share: "mean": the sum of the special tokens' vectors, divided by the window's tokens, is added to each token,
            and a last number says how many tokens each vector then stands for, [k + 1]. "max": the largest of each
            number. "cls": the vector of the first special token, in place of the token's own.
    """

    share: Share

    @property
    def _output_size(self) -> int:
        return super()._output_size + (self.share == "mean")

    def _token_outputs(self, inputs: dict[str, Any], start: int, width: int) -> tuple[Tensor, Any]:
        hidden, outputs = super()._token_outputs(inputs, 0, width)
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        if self.share == "cls":
            return hidden[:, :1].expand(-1, width - start, -1), outputs
        special, tokens = self._special(inputs["attention_mask"], width, hidden.device)
        if self.share == "max":
            most = hidden.masked_fill(~special[..., None], -torch.inf).amax(dim=1, keepdim=True)
            return torch.maximum(hidden, most)[:, start:], outputs
        count = special.sum(dim=1, keepdim=True)
        total = (hidden * special[..., None]).sum(dim=1, keepdim=True)
        weights = (1 + count / tokens).to(hidden.dtype)[..., None].expand(len(hidden), width, 1)
        return torch.cat([hidden + total / tokens[..., None], weights], dim=-1)[:, start:], outputs

    def _special(self, mask: Tensor | None, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Which positions hold special tokens, [1 or b, width], and the number of other tokens, [1 or b, 1]."""
        recurrence, positions = self.config.recurrence, torch.arange(width, device=device)[None]
        length = torch.full((1, 1), width, device=device) if mask is None else mask.sum(dim=1, keepdim=True)
        end = length - len(recurrence.suffix)
        special = (positions < len(recurrence.prefix)) | ((positions >= end) & (positions < length))
        return special, (end - len(recurrence.prefix)).clamp(min=1)


def reader_of(model: PreTrainedModel, tokenizer: Any, share: Share | None = None) -> tuple[RecurrentModel, bool]:
    """The model that reads for another one, and whether it may carry a state: a plain model's windows are independent.

    Args:
        share: how special tokens are shared out; None leaves them out.
    """
    model = get_recurrent_model(model)
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: give a transformers model, or the name of one.")
    plain = not isinstance(model, RecurrentPreTrainedModel)
    if plain:
        with torch.random.fork_rng(devices=[]):
            model = read_in_windows(model.base_model, tokenizer)  # type: ignore[arg-type]
    reader = without_head(model)
    if share == "cls" and not reader.config.recurrence.prefix:
        raise ValueError(
            'pooling="cls": no special token stands in front of the model\'s windows. Use pooling="mean", or add '
            "recurrence with the model's tokenizer: add_recurrence(tokenizer=...)."
        )
    return reader if share is None else _with_special_tokens(reader, share), not plain


def _with_special_tokens(reader: RecurrentModel, share: Share) -> WithSpecialTokens:
    """A reader's counterpart with special tokens; the weights are shared."""
    readers = _READERS.setdefault(reader, {})
    result = readers.get(share)
    if result is None or result.base is not reader.base or result.fast_path != reader.fast_path:
        with torch.device("meta"):  # its own recurrence is replaced below: do not draw random numbers for it
            result = readers[share] = WithSpecialTokens(reader.config, base=reader.base)
        result.fast_path, result.share = reader.fast_path, share
    result.memory = reader.memory
    return result


# By reader and share. Cached because a RecurrentModel holds captured CUDA graphs, which later calls reuse.
_READERS: WeakKeyDictionary[RecurrentModel, dict[str, WithSpecialTokens]] = WeakKeyDictionary()
