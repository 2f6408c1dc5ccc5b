# SPDX-License-Identifier: Apache-2.0
"""What a position adds to keys and values on average: with it a model that has learned positions reads what is kept.

Where positions are learned vectors, a key says where its token stood: kept for the next window, it must say that it
stands further back. What a layer makes of a token is, to a good part, a sum of what the token and what its position
contribute, so the mean over many texts, position by position, shows the latter, and keys and values are moved from one
position to another by the difference of two means.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from ..backbones import attention, hooks
from ..utils.peft import unwrapped
from ..utils.progress import Progress, bar
from . import argument_checks
from .base import RecurrentPreTrainedModel, eval_mode

logger = logging.get_logger(__name__)

ROWS = 128  # stretches of text: with more, what is kept is read no better
FEW = 16  # with fewer it is read badly
_AT_ONCE = 8


def needs_position_offsets(model: RecurrentPreTrainedModel) -> bool:
    """Whether something is kept, positions are learned, and nothing has been measured or learned yet."""
    return model.recurrence.keeping is not None and not model.recurrence.keeping.known


@torch.no_grad()
def measure_position_offsets(
    model: RecurrentPreTrainedModel, documents: Sequence[Any], *, rows: int = ROWS, progress: Progress | None = None
) -> None:
    """Start the `places` of a model that keeps keys and values and has learned positions. No weight of the base model
    is touched, and nothing is done for models with rotary positions, which need none.

    Args:
        documents: token ids of texts, without special tokens, in the language the model is to read.
        rows: how many stretches of them are read.
        progress: called with the rows done and all rows; without it, a bar if there is a terminal.
    """
    model = unwrapped(model)
    if not isinstance(model, RecurrentPreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: add recurrence first (add_recurrence(model, kept=...)).")
    if rows < 1:
        raise ValueError(f"rows={rows} must be at least 1.")
    keeping = model.recurrence.keeping
    if keeping is None or keeping.places is None:
        return
    attention.use_wrapped_attention(model.backbone.config)
    prefix = model.config.recurrence.prefix
    texts = _stretches(documents, keeping.places.shape[-2] - len(prefix), rows)
    argument_checks.vocabulary(torch.from_numpy(texts), None, model._vocabulary)
    if len(texts) < min(rows, FEW):
        logger.warning(
            "Only %d stretches of %d tokens to measure positions on: what is kept will be read badly. Give %d of them.",
            len(texts), texts.shape[1], ROWS,
        )  # fmt: skip
    total = torch.zeros(keeping.places.shape, dtype=torch.float64)  # here: not every device has such numbers
    with eval_mode(model), bar(progress, "measuring positions", after=2) as report:
        for begin in range(0, len(texts), _AT_ONCE):
            part = torch.from_numpy(texts[begin : begin + _AT_ONCE]).to(model.device)
            front = torch.tensor(prefix, dtype=torch.long, device=part.device).expand(len(part), -1)
            carry = hooks.HookContext()
            carry.noting = True
            model.backbone(input_ids=torch.cat([front, part], dim=1), carry=carry, return_dict=True)
            for layer, pair in enumerate(carry.take_noted()):
                for i, found in enumerate(pair):
                    total[layer, i] += found.sum(0, dtype=torch.float32).cpu()
            report(begin + len(part), len(texts))
    keeping.places.copy_(total / len(texts))


def _stretches(documents: Sequence[Any], length: int, rows: int) -> np.ndarray:
    """Rows of `length` tokens, from the middle of documents all over the corpus, joined where they are short."""
    try:
        count = min(len(documents), rows)
        chosen = [np.asarray(documents[i * len(documents) // count], dtype=np.int64) for i in range(count)]
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError("documents must be a list of token ids for each text, as `tokenise` gives.") from error
    share = -(-rows * length // max(count, 1))
    middles = [text[max((len(text) - share) // 2, 0) :][:share] for text in chosen]
    joined = np.concatenate([np.empty(0, np.int64), *middles])
    if len(joined) < length:
        raise ValueError(
            f"documents have {len(joined):,} tokens where {length:,} are needed, better {rows * length:,}: as many as "
            "a window and what is kept before it. Give more text."
        )
    return joined[: len(joined) // length * length].reshape(-1, length)[:rows]
