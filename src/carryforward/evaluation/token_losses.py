# SPDX-License-Identifier: Apache-2.0
"""What a model makes of each token, and how far back its state helps: the numbers behind the figures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.samples import by_length, collate, sample
from ..engine import bptt
from ..engine.cuda_graphs import Result, Work
from ..engine.window_batches import Cell
from ..engine.window_program import Emit, Program
from ..models import argument_checks
from ..models.base import eval_mode
from ..models.causal_lm import RecurrentForCausalLM
from ..utils.peft import unwrapped
from ..windows import IGNORE, Window


def _nothing(scored: int) -> None:
    """No bar."""


@dataclass
class Scored:
    """Windows that were read together, and what the model makes of the tokens they answer for.

    Attributes:
        documents: which one each window is of.
        logits: at n positions, [b, n, V], in float32.
        targets: the token behind each position, [b, n]; -100 where another window answers for it, or none.
        paid: for each layer that the state enters, the attention paid to it at these positions, [b, heads, n], if that
            is watched and there is a state.
    """

    documents: list[int]
    windows: list[Window]
    logits: Tensor
    targets: Tensor
    paid: dict[int, Tensor] = field(default_factory=dict)

    def losses(self) -> Tensor:
        """The negative log-likelihood of every target, [b, n], in nats."""
        return F.cross_entropy(self.logits.transpose(1, 2), self.targets, reduction="none", ignore_index=IGNORE)

    def put(self, values: Tensor, into: Sequence[np.ndarray]) -> None:
        """Write what belongs to the targets, [b, n, ...], where they stand in arrays of their documents."""
        found, scored = values.cpu().numpy(), (self.targets != IGNORE).cpu().numpy()
        for row, (document, window) in enumerate(zip(self.documents, self.windows, strict=True)):
            into[document][window.score_from : window.score_to] = found[row, scored[row]]


def score(
    model: RecurrentForCausalLM,
    documents: Sequence[Any],
    take: Callable[[Scored], object],
    *,
    overlap: int | None = None,
    use_state: bool = True,
    watch: bool = False,
    batch_size: int = 8,
    progress: Callable[[int], object] = _nothing,
) -> None:
    """Read documents and hand out what becomes of them, window by window; nothing of a window is kept.

    Args:
        documents: token ids of each.
        take: called with the windows that were read together.
        overlap: another than the model was made for.
        use_state: False removes the state.
        watch: also say how much attention is paid to the state, for which `doors.recording_attention` is needed.
        batch_size: documents read side by side.
        progress: called with the number of tokens just scored.
    """
    overlap = checked_overlap(model, overlap)
    batches = by_length([len(document) for document in documents], batch_size, least=2)

    def read(rows: list[int]) -> None:
        batch = collate([sample(documents[i], 0, len(documents[i]), 0) for i in rows])
        ids, mask, labels = (batch[name].to(model.device) for name in ("input_ids", "attention_mask", "labels"))
        reading = model._plan(ids, mask, labels, None, overlap=overlap, use_state=use_state, outputs=False, final=False)

        def window(work: Work) -> Result:
            carry, inputs = model._inputs(work)
            carry.watching = watch
            (logits,) = model._given(inputs, work.start)
            layers[:] = carry.paid
            return (logits.float(), *carry.paid.values()), model._states(carry, work)

        def emit(cell: Cell, logits: Tensor, *paid: Tensor) -> bptt.Emission:
            start = reading.scored_from(cell)
            targets = reading.targets(cell, start).to(logits.device)
            attention = {layer: weights[:, :, start:] for layer, weights in zip(layers, paid, strict=True)}
            take(Scored([rows[row] for row in cell.rows], cell.windows, logits, targets, attention))
            progress(sum(window.score_to - window.score_from for window in cell.windows))
            return ()

        layers: list[int] = []  # that are watched
        program = Program(model, reading, Emit(emit, reading.scored_from), window=window)
        table = model._table(reading.before)
        for cell in reading.cells:
            _, table = program.advance(cell, table, head=True)

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
    progress: Callable[[int], object] = _nothing,
) -> list[np.ndarray]:
    """The negative log-likelihood of every token, in nats: an array for each document, NaN at its first token.

    The arguments are those of `score`.
    """
    losses = [np.full(len(document), np.nan) for document in documents]
    score(
        model, documents, lambda scored: scored.put(scored.losses(), losses),
        overlap=overlap, use_state=use_state, batch_size=batch_size, progress=progress,
    )  # fmt: skip
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
    ends, stride = deep_windows(model, documents, depths)
    size, found, total = model.config.recurrence.window, {}, len(ends) * stride
    with eval_mode(model), torch.inference_mode():
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


def deep_windows(
    model: RecurrentForCausalLM, documents: Sequence[Any], depths: Sequence[int]
) -> tuple[list[tuple[int, int]], int]:
    """The windows that `horizon` scores, each by its document and where it ends, and how many tokens each scores."""
    if not depths or min(depths) < 0:
        raise ValueError(f"depths={list(depths)}: give numbers of windows, from 0.")
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
    """The overlap that a model is read at; refuses models whose tokens cannot be scored."""
    if unwrapped(model) is not model:
        raise ValueError(f"{type(model).__name__}: give the model inside, model.get_base_model().")
    if not isinstance(model, RecurrentForCausalLM):
        raise ValueError(f"a recurrent causal language model is needed, not {type(model).__name__}.")
    return argument_checks.overlap(model.config, overlap)
