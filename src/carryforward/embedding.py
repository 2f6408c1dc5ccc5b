# SPDX-License-Identifier: Apache-2.0
"""Contextual embeddings of whole documents: a vector per token, per window or per document, as NumPy arrays.

A document is read once, window by window, with the state carried on; nothing is strided over twice unless an overlap is
asked for. Documents of similar length are read side by side, a few windows at a time, so memory depends neither on
their length nor, for document vectors, on their number of tokens.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from .data.samples import pad
from .heads import RecurrentModel
from .modeling import RecurrentPreTrainedModel
from .state import State

logger = logging.getLogger(__name__)

Output = Literal["document", "tokens", "windows"]
Pooling = Literal["mean", "state"]
WINDOWS_PER_CALL = 8  # how much of each document one call reads; only speed notices


@dataclass(frozen=True)
class TokenVectors:
    """The tokens of one document.

    Attributes:
        vectors: one for each of the document's own tokens, [N, k].
        offsets: where each token stands in the text: characters [from, to), [N, 2].
    """

    vectors: np.ndarray
    offsets: np.ndarray


def encode(
    model: PreTrainedModel,
    texts: Sequence[str],
    tokenizer: Any,
    *,
    output: str = "document",
    pooling: str = "mean",
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Any:
    """Embed documents of any length.

    Args:
        model: a recurrent model; a head it may have is left out.
        texts: the documents.
        tokenizer: the model's; a fast one, as "tokens" needs offsets. Special tokens are the model's business.
        output: "document" gives one vector each, [documents, k]; "tokens" a list of `TokenVectors`; "windows" a list of
            the states after each full window, [windows, states, slots, k].
        pooling: for "document": the "mean" of its token vectors, or its last "state", all slots side by side. A
            document without a full window has no state: its vector is zero, as is that of an empty one.
        overlap: read at another overlap than the model was made for. A token's vector then comes from the window in
            which it is farthest from an edge (encoders) or has the most context (causal models).
        use_state: False removes the state: every window stands alone, as with the base model.
        batch_size: documents read side by side.
        progress: called with the number of tokens just read.
    """
    for name, value, choices in (("output", output, get_args(Output)), ("pooling", pooling, get_args(Pooling))):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
    if isinstance(texts, str):
        raise ValueError("texts is one string: give a list of documents.")
    if pooling == "state" and output == "document" and not use_state:
        raise ValueError('pooling="state" needs the state that use_state=False removes: use "mean".')
    tokenised = [_tokens(text, tokenizer, offsets=output == "tokens") for text in texts]
    ids = [token_ids for token_ids, _ in tokenised]
    if any(not len(token_ids) for token_ids in ids):
        logger.warning("%d documents have no tokens.", sum(not len(token_ids) for token_ids in ids))
    reader = _headless(model)
    collect = {"document": _Mean if pooling == "mean" else _LastState, "tokens": _Tokens, "windows": _States}[output]
    found = [collect(reader) for _ in texts]
    step = 1 if output == "windows" else WINDOWS_PER_CALL
    was_training = model.training
    reader.eval()
    try:
        with torch.inference_mode():
            for document, vectors, state in _read(reader, ids, overlap, use_state, batch_size, step):
                found[document].add(vectors, state)
                progress(len(vectors))
    finally:
        model.train(was_training)
    results = [one.result() for one in found]
    if output == "tokens":
        return [TokenVectors(vectors, offsets) for vectors, (_, offsets) in zip(results, tokenised, strict=True)]
    width = reader.config.base_config.hidden_size
    return results if output == "windows" else np.stack(results) if results else np.zeros((0, width), np.float32)


def _tokens(text: str, tokenizer: Any, offsets: bool) -> tuple[np.ndarray, Any]:
    if offsets and not tokenizer.is_fast:
        raise ValueError(
            f'output="tokens" needs offsets, which {type(tokenizer).__name__} cannot give: use a fast one.'
        )
    # verbose: a text longer than the model's positions is what this is for
    encoding = tokenizer(
        text, add_special_tokens=False, truncation=False, verbose=False, return_offsets_mapping=offsets
    )
    spans = np.array(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2) if offsets else None
    return np.array(encoding["input_ids"], dtype=np.int64), spans


def _headless(model: PreTrainedModel) -> RecurrentModel:
    """The same model without its head; weights are shared."""
    if isinstance(model, RecurrentModel):
        return model
    if not isinstance(model, RecurrentPreTrainedModel):
        raise ValueError(f"model is a {type(model).__name__}: make it recurrent with add_recurrence first.")
    reader = RecurrentModel(model.config, base=model._body)
    reader.recurrence = model.recurrence
    return reader


def _read(
    model: RecurrentModel, ids: list[np.ndarray], overlap: int | None, use_state: bool, batch_size: int, step: int
) -> Iterator[tuple[int, np.ndarray, State]]:
    """Give each document's vectors piece by piece, in order, with the state behind the piece."""
    recurrence = model.config.recurrence
    overlap = recurrence.overlap if overlap is None else overlap
    room = recurrence.window - len(recurrence.prefix) - len(recurrence.suffix)
    stride = room - overlap
    order = sorted((i for i in range(len(ids)) if len(ids[i])), key=lambda i: -len(ids[i]))
    for first in range(0, len(order), batch_size):
        rows, state = order[first : first + batch_size], None
        start, stop = 0, step * stride + overlap + 1  # a window is complete with the token behind it
        while rows:
            going_on = [row for row, i in enumerate(rows) if len(ids[i]) > stop]
            ending = [row for row, i in enumerate(rows) if len(ids[i]) <= stop]
            kept = None
            for part, final in ((ending, True), (going_on, False)):
                if not part:
                    continue
                batch = pad([torch.from_numpy(ids[rows[row]][start:stop]) for row in part])
                out = model(
                    **{name: tensor.to(model.device) for name, tensor in batch.items()},
                    state=None if state is None else state[part], overlap=overlap, use_state=use_state, final=final,
                )  # fmt: skip
                for row, vectors in zip(part, _unpadded(out, batch["attention_mask"]), strict=True):
                    yield rows[row], vectors, out.state[[part.index(row)]]
                kept = out.state if part is going_on else kept
            rows, state = [rows[row] for row in going_on], kept
            start, stop = stop, stop + step * stride


def _unpadded(out: Any, mask: Tensor) -> Iterator[np.ndarray]:
    """Each row's own vectors: for an encoder those it has given out so far."""
    counts = mask.sum(dim=1).tolist()
    if out.emitted is not None:
        counts = (out.emitted[:, 1] - out.emitted[:, 0]).tolist()
    for vectors, count in zip(out.last_hidden_state.float().cpu().numpy(), counts, strict=True):
        yield vectors[:count]


class _Mean:
    """The mean of token vectors, without keeping them."""

    def __init__(self, model: RecurrentModel):
        self.total, self.count = np.zeros(model.config.base_config.hidden_size), 0

    def add(self, vectors: np.ndarray, state: State) -> None:
        self.total, self.count = self.total + vectors.sum(axis=0, dtype=np.float64), self.count + len(vectors)

    def result(self) -> np.ndarray:
        return (self.total / max(self.count, 1)).astype(np.float32)


class _LastState:
    """What the last full window passed on."""

    def __init__(self, model: RecurrentModel):
        self.last = np.zeros(model.config.state_shape, np.float32)

    def add(self, vectors: np.ndarray, state: State) -> None:
        if state.started.all():
            self.last = state.carried[0].float().cpu().numpy()

    def result(self) -> np.ndarray:
        return self.last.flatten()


class _States(_LastState):
    """What each full window passed on."""

    def __init__(self, model: RecurrentModel):
        super().__init__(model)
        self.shape, self.pending = model.config.state_shape, -1
        self.found: list[np.ndarray] = []

    def add(self, vectors: np.ndarray, state: State) -> None:
        start = int(state.read - state.pending)  # the next window's: it moves when a window is finished
        if state.started.all() and start != self.pending:
            self.found.append(state.carried[0].float().cpu().numpy())
        self.pending = start

    def result(self) -> np.ndarray:
        return np.stack(self.found) if self.found else np.zeros((0, *self.shape), np.float32)


class _Tokens:
    """Every token's vector."""

    def __init__(self, model: RecurrentModel):
        self.parts = [np.zeros((0, model.config.base_config.hidden_size), np.float32)]

    def add(self, vectors: np.ndarray, state: State) -> None:
        self.parts.append(vectors)

    def result(self) -> np.ndarray:
        return np.concatenate(self.parts)
