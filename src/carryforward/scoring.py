# SPDX-License-Identifier: Apache-2.0
"""What a model makes of each token, and how far back its state helps: the numbers behind the figures."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from . import checks
from .data.samples import collate, sample
from .heads import RecurrentForCausalLM
from .modeling import evaluating
from .reading import IGNORE


def _nothing(scored: int) -> None:
    """No bar."""


def token_losses(
    model: RecurrentForCausalLM,
    documents: Sequence[Any],
    *,
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: Callable[[int], object] = _nothing,
) -> list[np.ndarray]:
    """The negative log-likelihood of every token, in nats: an array for each document, NaN at its first token.

    Args:
        documents: token ids of each.
        overlap: another than the model was made for.
        use_state: False removes the state.
        batch_size: documents read side by side.
        progress: called with the number of tokens just scored.
    """
    overlap = _overlap(model, overlap)
    stride = model.config.recurrence.window - overlap
    losses = [np.full(len(document), np.nan) for document in documents]
    order = sorted((i for i in range(len(documents)) if len(documents[i]) > 1), key=lambda i: -len(documents[i]))
    with evaluating(model), torch.inference_mode():
        for begin in range(0, len(order), batch_size):
            rows, state, start = order[begin : begin + batch_size], None, 0
            while rows:
                # a window, then what each one adds; it is finished with the token behind it
                stop = start + stride + (overlap + 1 if start == 0 else 0)
                batch = collate([sample(documents[i], start, stop, start) for i in rows])
                ids, mask = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
                out = model(ids, attention_mask=mask, state=state, overlap=overlap, use_state=use_state)
                following = collate([sample(documents[i], start + 1, stop + 1, start + 1) for i in rows])["input_ids"]
                width = following.shape[1]  # one less where all documents end here
                nats = F.cross_entropy(
                    out.logits[:, :width].flatten(0, 1).float(), following.flatten().to(ids.device), reduction="none"
                )
                found = nats.view(len(rows), width).double().cpu().numpy()
                for row, i in enumerate(rows):
                    count = min(len(documents[i]), stop + 1) - start - 1
                    losses[i][start + 1 : start + 1 + count] = found[row, :count]
                    progress(count)
                alive = [row for row, i in enumerate(rows) if len(documents[i]) > stop + 1]
                rows, state = [rows[row] for row in alive], out.state[alive] if alive else None
                start = stop
    return losses


def horizon(
    model: RecurrentForCausalLM,
    documents: Sequence[Any],
    depths: Sequence[int],
    *,
    batch_size: int = 8,
    progress: Callable[[int], object] = _nothing,
) -> tuple[dict[int, float], int]:
    """Nats per token of windows whose state comes from so many windows back at most, and how many tokens that is of.

    The same tokens for every depth: full windows that have as many before them as the greatest depth.
    """
    if not depths or min(depths) < 0:
        raise ValueError(f"depths={list(depths)}: give numbers of windows, from 0.")
    overlap, size = _overlap(model, None), model.config.recurrence.window
    stride = size - overlap
    ends = [(i, end) for i, document in enumerate(documents)
            for end in range(size + max(depths) * stride, len(document), stride)]  # fmt: skip
    if not ends:
        raise ValueError(
            f"no document has {max(depths) + 1} full windows of {size} tokens and one token more. Use smaller depths, "
            "or longer documents."
        )
    found, total = {}, len(ends) * stride
    with evaluating(model), torch.inference_mode():
        for depth in depths:
            nats = 0.0
            for begin in range(0, len(ends), batch_size):
                # a window scores what it adds: the targets behind its last `stride` tokens
                samples = [sample(documents[i], end - size - depth * stride, end + 1, end + 1 - stride)
                           for i, end in ends[begin : begin + batch_size]]  # fmt: skip
                batch = {name: tensor.to(model.device) for name, tensor in collate(samples).items()}
                nats += float(model(**batch).nll_sum)
                progress(sum(int((one["labels"] != IGNORE).sum()) for one in samples))
            found[depth] = nats / total
    return found, total


def _overlap(model: RecurrentForCausalLM, overlap: int | None) -> int:
    if not isinstance(model, RecurrentForCausalLM):
        raise ValueError(f"a recurrent causal language model is needed, not {type(model).__name__}.")
    overlap = model.config.recurrence.overlap if overlap is None else overlap
    checks.overlap(model.config, overlap)
    return overlap
