# SPDX-License-Identifier: Apache-2.0
"""Perplexity of whole documents at any overlap, for recurrent and plain causal models alike (section 4.2).

Every token of a document but its first is scored exactly once. Sums first, the ratio last: results of splits, batches
and processes add up. Words and bytes are those of the original text, so models with different tokenizers compare.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from .. import windows
from ..backbones.architectures import positions_of
from ..data.samples import by_length, collate, cut, sample
from ..models import argument_checks
from ..models.base import RecurrentPreTrainedModel, eval_mode
from ..models.causal_lm import RecurrentForCausalLM
from ..state import State
from ..utils.peft import unwrapped
from ..windows import IGNORE

WINDOWS_PER_CALL = 16  # how much of each document one call reads; only speed and the progress bar notice


@dataclass(frozen=True)
class Perplexity:
    """What a model made of a set of documents. Two of them add up.

    Attributes:
        nats: summed negative log-likelihood of the scored tokens.
        tokens: how many were scored.
        words, bytes, line_ends: of the documents' text; 0 when unknown.
        documents: how many documents.
    """

    nats: float = 0.0
    tokens: int = 0
    words: int = 0
    bytes: int = 0
    line_ends: int = 0
    documents: int = 0

    def __add__(self, other: "Perplexity") -> "Perplexity":
        return Perplexity(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words), the paper's measure."""
        return _exp(self.nats, self.words)

    @property
    def token_perplexity(self) -> float:
        return _exp(self.nats, self.tokens)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.bytes / math.log(2) if self.bytes else math.nan


def perplexity(
    model: PreTrainedModel,
    documents: Sequence[Any],
    *,
    overlap: int | None = None,
    window: int | None = None,
    use_state: bool = True,
    reset_every: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda scored: None,
) -> Perplexity:
    """Score documents with a causal language model.

    Args:
        model: a recurrent model, or any causal language model of Hugging Face's.
        documents: token ids of each document; `Documents` knows the words and bytes of its text as well.
        overlap: tokens consecutive windows share; a recurrent model's own by default, 0 for a plain one.
        window: tokens a plain model reads at once; a recurrent model knows its own.
        use_state: False removes the state from a recurrent model: the control.
        reset_every: start with an empty state after every so many windows, as training did.
        batch_size: documents (for a plain model, windows) read side by side.
        progress: called with the number of tokens just scored.
    """
    model = unwrapped(model)
    if not _is_causal(model):
        raise ValueError(f"perplexity needs a causal language model, not {type(model).__name__}.")
    recurrence = model.config.recurrence if isinstance(model, RecurrentPreTrainedModel) else None
    if recurrence is None and window is None:
        raise ValueError("window is missing: a plain model must be told how many tokens to read at once.")
    if recurrence is not None and window not in (None, recurrence.window):
        raise ValueError(
            f"window={window}: this recurrent model reads {recurrence.window} tokens at once. Leave it out."
        )
    for name, value in (("batch_size", batch_size), ("reset_every", reset_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    size = recurrence.window if recurrence else window
    assert size is not None
    if recurrence is None:
        check_positions(model.config, size)
    overlap = (recurrence.overlap if recurrence else 0) if overlap is None else overlap
    windows.check(size, overlap)
    counts = {name: _count(documents, name) for name in ("words", "bytes", "line_ends")}
    with eval_mode(model), torch.inference_mode():
        if recurrence is None:
            parts = _alone(model, documents, size, overlap, batch_size)
        elif reset_every is not None or not use_state:  # without a state a document may be cut anywhere
            parts = _pieces(model, documents, overlap, reset_every or WINDOWS_PER_CALL, batch_size, use_state)
        else:
            parts = _streams(model, documents, overlap, batch_size)
        nats, tokens = torch.zeros((), dtype=torch.float64), 0
        for nll_sum, scored in parts:
            nats = nats.to(nll_sum.device) + nll_sum.double()
            tokens += scored
            progress(scored)
    return Perplexity(nats=float(nats), tokens=tokens, documents=len(documents), **counts)


def _is_causal(model: PreTrainedModel) -> bool:
    """Not an encoder, which sees the tokens it is asked for and would be given a number all the same. A class that
    transformers does not know is trusted."""
    if isinstance(model, RecurrentPreTrainedModel):
        return isinstance(model, RecurrentForCausalLM)
    names = {cls.__name__ for cls in type(model).__mro__}
    if names & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}:
        return True
    return not names & {*MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()} and model.get_output_embeddings() is not None


def check_positions(config: PreTrainedConfig, window: int) -> None:
    """Refuse a window that a plain model has no positions for."""
    positions = positions_of(config)
    if positions is not None and window > positions:
        raise ValueError(f"window={window}: this model has {positions} positions. Use {positions} or less.")


def _alone(
    model: PreTrainedModel, documents: Sequence[Any], window: int, overlap: int, batch_size: int
) -> Iterator[tuple[Tensor, int]]:
    """Windows that know nothing of each other run side by side, of whichever document."""
    embeddings: Any = model.get_input_embeddings()
    vocabulary = embeddings.weight.shape[0]
    for batch in _batches(documents, window, overlap, 1, batch_size):
        argument_checks.vocabulary(batch["input_ids"], batch["attention_mask"], vocabulary)
        ids, labels = batch["input_ids"].to(model.device), batch["labels"][:, 1:]
        first = int((labels != IGNORE).any(dim=0).nonzero()[0])  # nothing before is scored
        # padding stands on the right, where no token of a causal model sees it
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, first:].float()
        targets = labels[:, first:].to(logits.device)
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
        yield nll.double().sum(), int((labels != IGNORE).sum())


def _pieces(
    model: PreTrainedModel, documents: Sequence[Any], overlap: int, count: int, batch_size: int, use_state: bool
) -> Iterator[tuple[Tensor, int]]:
    """Training samples of so many windows: each starts with an empty state."""
    for batch in _batches(documents, model.config.recurrence.window, overlap, count, batch_size):
        scored = int((batch["labels"] != IGNORE).sum())
        yield model(**_to(batch, model.device), overlap=overlap, use_state=use_state).nll_sum, scored


def _streams(
    model: PreTrainedModel, documents: Sequence[Any], overlap: int, batch_size: int
) -> Iterator[tuple[Tensor, int]]:
    """Whole documents side by side, a few windows of each at a time, the state carried on."""
    stride = model.config.recurrence.window - overlap
    step = WINDOWS_PER_CALL * stride
    for rows in by_length([len(document) for document in documents], batch_size, least=2):
        state: State | None = None
        start, stop = 0, step + overlap + 1  # a window is complete with the target just behind it
        while rows:
            batch = collate([sample(documents[i], start, stop, max(start, 1)) for i in rows])
            # in pieces, a piece's first token is a target too: the state knows what came before
            out = model(**_to(batch, model.device), state=state, overlap=overlap)
            yield out.nll_sum, sum(min(len(documents[i]), stop) - max(start, 1) for i in rows)
            alive = [row for row, i in enumerate(rows) if len(documents[i]) > stop]
            rows, state = [rows[row] for row in alive], out.state[alive] if alive else None
            start, stop = stop, stop + step


def _batches(
    documents: Sequence[Any], window: int, overlap: int, windows_per_sample: int, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    samples: list[dict[str, Tensor]] = []
    for document in documents:
        for start, stop, score_from in cut(len(document), window, overlap, windows_per_sample):
            samples.append(sample(document, start, stop, score_from))
            if len(samples) == batch_size:
                yield collate(samples)
                samples = []
    if samples:
        yield collate(samples)


def _to(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """A batch on its way to the device, which need not be waited for."""
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def _count(documents: Sequence[Any], name: str) -> int:
    return int(np.sum(getattr(documents, name, 0)))


def _exp(nats: float, count: int) -> float:
    if not count:
        return math.nan
    return math.exp(nats / count) if nats / count < 700 else math.inf
