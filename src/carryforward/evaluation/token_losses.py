# SPDX-License-Identifier: Apache-2.0
"""The loss of every token, and the loss of windows by how many windows back their state starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..backbones.modes import eval_mode
from ..data.samples import batch_by_length, check_documents, collate, make_sample
from ..engine import bptt, run_windows
from ..engine.window_batches import WindowBatch
from ..engine.window_program import OutputSpec
from ..models import argument_checks
from ..models.causal_lm import RecurrentForCausalLM
from ..utils.checks import check_callable, check_count, check_flag
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE, Window


def _no_progress(scored: int) -> None:
    """Show no progress."""


@dataclass
class ScoredWindows:
    """A batch of b windows, with logits and targets of the tokens that they score.

    Attributes:
        documents: the index of each window's document.
        logits: at n positions, [b, n, V], in float32.
        targets: the token after each position, [b, n]; -100 if another window scores it, or there is none.
        has_state: whether each window received a state.
        attention: by layer that receives a state, the attention paid to it at these positions, [b, heads, n]; empty if
            attention is not recorded or no window has a state.
    """

    documents: list[int]
    windows: list[Window]
    has_state: list[bool]
    logits: Tensor
    targets: Tensor
    attention: dict[int, Tensor] = field(default_factory=dict)

    def losses(self) -> Tensor:
        """The negative log-likelihood of every target, [b, n], in nats."""
        return F.cross_entropy(self.logits.transpose(1, 2), self.targets, reduction="none", ignore_index=IGNORE)

    def put(self, values: Tensor, into: Sequence[np.ndarray]) -> None:
        """Write one value per target, [b, n, ...], to the arrays `into`, one per document, at the target's index."""
        array, scored = values.cpu().numpy(), (self.targets != IGNORE).cpu().numpy()
        for row, (document, window) in enumerate(zip(self.documents, self.windows, strict=True)):
            into[document][window.score_from : window.score_to] = array[row, scored[row]]


def score(
    model: RecurrentForCausalLM,
    documents: Sequence[Any],
    consume: Callable[[ScoredWindows], object],
    *,
    overlap: int | None = None,
    use_state: bool = True,
    record_attention: bool = False,
    batch_size: int = 8,
    progress: Callable[[int], object] = _no_progress,
) -> None:
    """Score documents batch by batch of windows, and hand each batch to `consume`; none is stored.

    Args:
        documents: token ids of each document.
        consume: called with the windows of each batch.
        overlap: tokens that consecutive windows share; by default that of the config.
        use_state: False removes the state.
        record_attention: record attention to the state; call it inside `backbones.attention.recording_attention`.
        batch_size: documents in a batch.
        progress: called with the number of newly scored tokens.
    """
    overlap = checked_overlap(model, overlap)
    check_documents(documents)
    check_count("batch_size", batch_size)
    check_flag("use_state", use_state)
    check_callable("progress", progress)
    batches = batch_by_length([len(document) for document in documents], batch_size, min_length=2)

    def read(rows: list[int]) -> None:
        batch = collate([make_sample(documents[i], 0, len(documents[i]), 0) for i in rows])
        ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
        plan = model._plan(
            ids, mask, labels, None, overlap=overlap, use_state=use_state, outputs=False, final=False, logits=True
        )

        def make(batch: WindowBatch, logits: Tensor, *attention: Tensor) -> bptt.Outputs:
            start = batch.first_scored
            logits = logits.float()
            targets = batch.targets(start).to(logits.device)
            layers = model.memory.layers if attention else []
            by_layer = {layer: weights[:, :, start:] for layer, weights in zip(layers, attention, strict=True)}
            has_state = [i >= batch.num_first for i in range(len(batch.rows))]
            indices = [rows[row] for row in batch.rows]
            consume(ScoredWindows(indices, batch.windows, has_state, logits, targets, by_layer))
            progress(batch.num_scored)
            return ()

        outputs = OutputSpec(make, lambda batch: batch.first_scored, record_attention=record_attention)
        run_windows.stream_outputs(model, plan, outputs)

    with eval_mode(model), torch.inference_mode():
        for rows in batches:
            read(rows)


def token_losses(
    model: RecurrentForCausalLM,
    documents: Sequence[Any],
    *,
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: Callable[[int], object] = _no_progress,
) -> list[np.ndarray]:
    """The negative log-likelihood of every token, in nats: one array per document, NaN at its first token.

    Arguments as in `score`.
    """
    check_documents(documents)
    losses = [np.full(len(document), np.nan) for document in documents]
    score(
        model, documents, lambda scored: scored.put(scored.losses(), losses),
        overlap=overlap, use_state=use_state, batch_size=batch_size, progress=progress,
    )  # fmt: skip
    return losses


def loss_by_depth(
    model: RecurrentForCausalLM,
    documents: Sequence[Any],
    depths: Sequence[int],
    *,
    batch_size: int = 8,
    progress: Callable[[int], object] = _no_progress,
) -> tuple[dict[int, float], int]:
    """The loss of windows whose state comes from only so many windows before them (their depth).

    The same tokens are scored at every depth: those of full windows with at least the greatest depth of windows before
    them.

    Returns:
        nats per token by depth, and the number of tokens.
    """
    ends, stride = deep_windows(model, documents, depths)
    check_count("batch_size", batch_size)
    check_callable("progress", progress)
    size, nats_per_token, total = model.config.recurrence.window, {}, len(ends) * stride
    with eval_mode(model), torch.inference_mode():
        for depth in depths:
            nats = 0.0
            for begin in range(0, len(ends), batch_size):
                # Scored are the targets of the window's last `stride` positions.
                samples = [make_sample(documents[i], end - size - depth * stride, end + 1, end + 1 - stride)
                           for i, end in ends[begin : begin + batch_size]]  # fmt: skip
                nats += float(model(**collate(samples)).nll_sum)
                progress(sum(int((sample["labels"] != IGNORE).sum()) for sample in samples))
            nats_per_token[depth] = nats / total
    return nats_per_token, total


def deep_windows(
    model: RecurrentForCausalLM, documents: Sequence[Any], depths: Sequence[int]
) -> tuple[list[tuple[int, int]], int]:
    """The windows that `loss_by_depth` scores, as (index of the document, end), and the tokens that each scores."""
    if not isinstance(depths, Sequence) or isinstance(depths, str) or not depths:
        raise ValueError(f"depths={depths!r}: give numbers of windows, from 0.")
    for depth in depths:
        check_count("depths", depth, 0)
    check_documents(documents)
    overlap, size = checked_overlap(model, None), model.config.recurrence.window
    stride = size - overlap
    ends = [(i, end) for i, document in enumerate(documents)
            for end in range(size + max(depths) * stride, len(document), stride)]  # fmt: skip
    if not ends:
        raise ValueError(
            f"no document has {max(depths) + 1} full windows of {size} tokens and one token more. Use smaller depths, "
            "or longer documents."
        )
    return ends, stride


def checked_overlap(model: RecurrentForCausalLM, overlap: int | None) -> int:
    """Check the model and the overlap; returns the overlap. Raises ValueError unless the model is a causal LM."""
    if get_recurrent_model(model) is not model:
        raise ValueError(f"model is a {type(model).__name__}: give the model inside it, model.get_base_model().")
    if not isinstance(model, RecurrentForCausalLM):
        raise ValueError(f"model: a recurrent causal language model is needed, not {type(model).__name__}.")
    return argument_checks.check_overlap(model.config, overlap)
